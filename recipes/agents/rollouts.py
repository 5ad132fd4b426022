"""Samples conversations of programs: a row begins when its program asks, and continues when it asks again.

Tokens, keys and masks of a row are those of core/chains/turns.py. What differs: prompts come while others are sampled,
and a request that continues no earlier conversation begins a row of its own, a fork. The rows of a server (serve.py)
have no end: one that a new conversation takes begins anew.

B rows of the rollout, F rows for forks.
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Event
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt32

from core.chains.turns import Conversations, Record, form_of
from core.records import Completions
from core.sampler import Next, Sampler, Scheduler, Stops, Turn
from envs.base import Problem, Reply, Step
from envs.scoring.scorer import NO_WAIT, GradedReplies, WaitForMore
from envs.scoring.worker import Failure
from models.names import Weights
from recipes.agents.host import AgentHost, AgentJob
from recipes.agents.protocol import THINK, Sampled
from recipes.agents.server import BadRequest
from recipes.agents.sessions import FULL, Asked, Endpoint, Rewards
from recipes.agents.texts import chat_prompt, check_forged
from utils.batching import concatenate, select_rows
from utils.metrics.terminal import Wait
from utils.runs.shutdown import Stop
from utils.settings.errors import UserError
from utils.threefry import make_key, threefry

UNSCORED = "its program's last line is not valid JSON, and neither --reward nor a column answer grades its last reply"


class AgentConversations(Conversations):
    """The programs of a rollout, one for each row: what they ask, and what they are paid; or the rows of a server."""

    def prepare(self) -> None:
        settings = self.env.rollouts.settings
        self.num_rows = len(self.problems)
        self.is_served = isinstance(settings, Endpoint)
        if self.is_served:
            self.host, self.blank, self.key = settings, self.problems[0], make_key(settings.seed)
            self.longest_prompt = settings.context - 1
        else:
            self.host = self.stream.scorer.hold(partial(AgentHost, settings))
            self.host.reset()
        self.host.tokenizer = self.tokenizer
        self.asked: dict[int, Asked] = {}  # what a row's next reply answers
        self.begun: dict[int, Sequence[int]] = {}  # tokens that begin a row's next reply, and are not sampled
        self.sampled: dict[int, Sampled] = {}  # tokens of a row's last turn
        self.parents: dict[int, int] = {}  # rows of forks, and those of their programs
        self.kept: dict[int, int] = {}  # tokens of a row's last turn that its program got, if not all
        self.unpaid = set(range(self.num_rows))
        self.open, self.closed = set(self.unpaid), set()  # rows of programs that have not ended; rows that are over
        self.numbers = count()  # of replies without a seed

    def prompts(self) -> list[tuple[int, Problem]]:
        """Returns the problems; what programs ask first replaces their messages."""
        return super(Conversations, self).prompts()

    def sample(
        self,
        sampler: Sampler,
        weights: Weights,
        prompts: Sequence[list[int]],
        keys: UInt32[np.ndarray, "B 2"],
        wait: Wait,
    ) -> Completions:
        """Samples until all programs have ended; returns the rows of the rollout. As many others are for forks."""
        self.wait, self.longest_prompt = wait, sampler.max_prompt_tokens
        self.host.context = sampler.max_prompt_tokens + sampler.max_new_tokens
        self.start(len(keys))
        places = np.array([self.place(number) for number in range(2 * self.num_rows)])
        of_places = np.zeros((2 * self.num_rows, 2), np.uint32)
        of_places[places[: self.num_rows]] = keys
        cancelled = sampler.cancelled or Event()
        completions = select_rows(self.scheduler(sampler, weights, of_places).run(cancelled), places)
        if cancelled.is_set():
            raise Stop
        is_auxiliary = np.isin(np.arange(len(places)), list(self.host.auxiliary))
        completions = replace(completions, mask=completions.mask & ~is_auxiliary[:, None])
        self.host.close(list(range(len(places))))  # programs may go on asking
        is_fork = (np.arange(len(places)) >= self.num_rows) & completions.mask.any(axis=1)
        self.forks, self.of_forks = np.flatnonzero(is_fork).tolist(), select_rows(completions, np.flatnonzero(is_fork))
        return select_rows(completions, np.arange(self.num_rows))

    def scheduler(self, sampler: Sampler, weights: Weights, keys: UInt32[np.ndarray, "B 2"]) -> Scheduler:
        """Returns the rows of programs, whose prompts come while others are sampled."""
        self.has_states = sampler.model.delta is not None
        return Scheduler(self.listening(sampler), weights, [[]] * len(keys), keys)

    def listening(self, sampler: Sampler) -> Sampler:
        return replace(super().listening(sampler), on_tokens=self.on_tokens)

    def place(self, number: int) -> int:
        """Returns the row of the scheduler: every second one is for a fork, so that the shards of a mesh have both."""
        if self.is_served:
            return number
        return 2 * number if number < self.num_rows else 2 * (number - self.num_rows) + 1

    def number(self, place: int) -> int:
        return place if self.is_served else place // 2 + self.num_rows * (place % 2)

    def start(self, num_forks: int) -> None:
        """Starts the programs, with rows for their forks."""
        forks = range(self.num_rows, self.num_rows + num_forks)
        self.problems += [self.problems[0]] * num_forks
        self.task_ids += [0] * num_forks
        self.episodes += [Record(0) for _ in forks]
        rows = zip(self.problems, self.episodes[: self.num_rows], strict=False)
        jobs = [AgentJob(row, problem.answer, episode.game) for row, (problem, episode) in enumerate(rows)]
        self.host.begin(jobs, deque(forks))

    def on_tokens(self, turn: Turn) -> bool:
        """Streams a reply; False if nobody waits for it."""
        row = self.number(turn.row)
        asked = self.asked[row]
        if asked.on_tokens and not asked.has_left:
            self.show(row, sampled_of(turn))
        return not asked.has_left

    def on_end(self, turn: Turn) -> None:
        """Hands a reply to its program, with its tokens and their log-probabilities; the row waits."""
        turn = turn._replace(row=self.number(turn.row))
        kept = self.num_kept(turn.row, turn.tokens.tolist())
        if self.has_states and kept < len(turn.tokens):
            kept = -1  # the state of a Gated DeltaNet cannot go back
        self.sampled[turn.row] = sampled_of(turn)._replace(is_whole=kept >= 0)
        super().on_end(turn)
        if 0 <= kept < len(turn.tokens):
            self.kept[turn.row] = kept
            episode = self.episodes[turn.row]
            episode.last_token = int(turn.tokens[kept - 1]) if kept else -1
            episode.num_left = turn.num_left + len(turn.tokens) - kept

    def on_wait(self, rows: Set[int], is_idle: bool, seconds: float, num_sampling: int) -> dict[int, Next]:
        """Returns what programs ask next; once all have ended, the ends of the rows that are left."""
        rows = {self.number(row) for row in rows}
        if self.open:
            found = super().on_wait(rows, is_idle, seconds, num_sampling)
        else:  # without the replies that programs did not get
            left = set(range(len(self.episodes))) - self.closed
            unheard = (left - rows) | self.unasked
            found = {row: Next(finished=True, num_kept=0 if row in unheard else None) for row in left}
        return {self.place(row): following for row, following in found.items()}

    def key_of(self, row: int) -> UInt32[np.ndarray, "2"] | None:
        """Returns the sampling key of a row: of a request's seed, if it is served; of a fork, by its program's."""
        if self.is_served:
            asked = self.asked[row]
            is_own = asked.request.seed is None
            words = np.asarray(jax.random.key_data(self.key if is_own else make_key(asked.request.seed)))
            number = np.array([next(self.numbers) if is_own else asked.index])
            return np.concatenate(threefry((words[:1], words[1:]), number))
        if row < self.num_rows:
            return None
        seed = self.episodes[self.parents[row]].seed
        words = np.array([[seed >> 32]], np.uint32), np.array([[seed & 0xFFFFFFFF]], np.uint32)
        forks = [fork for fork, parent in self.parents.items() if parent == self.parents[row]]
        return np.concatenate(threefry(words, np.array([[1 + forks.index(row)]])), axis=1)[0]

    def stops(self, row: int) -> Stops | None:
        """Returns what ends a row's turn: texts and ids of its request, and the end of an only call."""
        request = self.asked[row].request
        texts, ids = [*request.stop], [*request.stop_token_ids]
        form = None if request.parallel_tool_calls else form_of(self.tokenizer, self.env.dialect)
        if form and request.schemas:
            closing = self.tokenizer.added_ids.get(form.closing)
            texts += [form.closing] if closing is None and form.closing else []
            ids += [] if closing is None else [closing]
        return Stops(tuple(texts), tuple(ids)) if texts or ids else None

    def num_kept(self, row: int, ids: Sequence[int]) -> int:
        """Returns how many tokens of a turn make the text before its stop text; -1: that ends within a token."""
        text = self.tokenizer.decode(ids) if (stops := self.asked[row].request.stop) else ""
        places = [text.find(stop) for stop in stops if stop in text]
        for num_kept in range(len(ids), 0, -1) if places else ():
            known = self.tokenizer.decode(ids[:num_kept])
            if len(known) <= min(places):
                return num_kept if len(known) == min(places) else -1
        return 0 if places else len(ids)

    def show(self, row: int, sampled: Sampled) -> None:
        """Hands the beginning of a reply to the client that reads it."""
        reply, is_thinking = self.reply(row, np.array(sampled.ids, int)), self.opens_thoughts(sampled.prompt_ids)
        self.host.server.call(self.asked[row].on_tokens, sampled._replace(reply=reply, is_thinking=is_thinking))

    def opens_thoughts(self, prompt: Sequence[int]) -> bool:
        return self.tokenizer.decode(prompt[-4:]).rstrip().endswith(THINK[0])

    def send(self, rows: Set[int]) -> None:
        """Gives programs their replies."""
        for row in sorted(rows):
            sampled = self.sampled.pop(row)
            reply, is_thinking = self.episodes[row].replies[-1], self.opens_thoughts(sampled.prompt_ids)
            self.host.answer(row, self.asked[row], sampled._replace(reply=reply, is_thinking=is_thinking))
        self.unasked -= rows

    def ask(self, rows: Set[int], num_needed: int, more: WaitForMore = NO_WAIT) -> dict[int, Asked | Rewards | Failure]:
        self.send(rows & self.unasked)
        return self.host.take(rows, num_needed, more)

    def observe(self, rows: Set[int], is_blocking: bool, more: WaitForMore = NO_WAIT) -> dict[int, Next]:
        outcomes = self.ask(rows, int(is_blocking), more)
        found = {row: self.observation(row, outcome) for row, outcome in outcomes.items()}
        return {row: following for row, following in found.items() if following is not None}

    def observation(self, row: int, outcome: Asked | Rewards | Failure) -> Next | None:
        """Returns what a program asks, as tokens, or the end of its row; None: it is refused."""
        if not isinstance(outcome, Asked):
            return self.end(row, outcome)
        if outcome.has_left:
            return None
        self.asked[row] = outcome
        try:
            following = self.opening(row, outcome) if outcome.is_new else self.continued(row, outcome)
        except UserError as error:  # the chat template does not take these messages
            self.host.answer(row, outcome, BadRequest(str(error)))
            return None
        if not following.tokens:
            return following
        return following._replace(
            key=self.key_of(row) if following.begins else None,
            num_kept=self.kept.pop(row, None),
            limit=outcome.request.limit or 0,
            stops=self.stops(row),
            distribution=outcome.distribution,
        )

    def opening(self, row: int, asked: Asked) -> Next:
        """Returns the prompt of a conversation that begins. Raises: UserError for one that is too long."""
        if self.is_served:
            self.episodes[row] = Record(0)
        elif row >= self.num_rows:
            self.parents[row] = self.host.parents[row]
            self.task_ids[row] = self.task_ids[self.parents[row]]
            self.problems[row] = self.problems[self.parents[row]]
        problem = self.blank if self.is_served else self.problems[row]
        request, prompt = asked.request, asked.prompt
        if not prompt:
            if request.schemas and form_of(self.tokenizer, self.env.dialect) is None:
                raise UserError("tools is not supported: the chat template writes calls in a form that is not read")
            thinking = request.chat_template_kwargs.get("enable_thinking", problem.thinking)
            problem = replace(
                problem, messages=list(asked.messages), tools=tuple(request.schemas), thinking=thinking, prefix=""
            )
            prompt = chat_prompt(check_forged(self.tokenizer, [*asked.messages, *request.schemas]), problem)
        prompt = [*prompt, *self.beginning(row, asked, prompt)]
        if len(prompt) > self.longest_prompt:
            raise UserError(FULL)
        self.problems[row] = problem
        return Next(prompt, begins=True)

    def beginning(self, row: int, asked: Asked, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the tokens by which a reply must begin: the start of a call, if tool_choice is required."""
        self.begun[row] = ()
        if not asked.prompt and asked.request.tool_choice == "required":
            if self.opens_thoughts(prompt):
                raise UserError("tool_choice required is not supported after an open think block: set enable_thinking "
                                "to false, or tool_choice to auto")  # fmt: skip
            self.begun[row] = self.tokenizer.encode(form_of(self.tokenizer, self.env.dialect).opening or "{")
        return self.begun[row]

    def reply(self, row: int, turn: Int[np.ndarray, "A"]) -> Reply:
        return super().reply(row, np.append(np.array(self.begun[row], int), turn))

    def continued(self, row: int, asked: Asked) -> Next:
        """Returns what follows a row's last reply, or its end if that is too long."""
        tokenizer, episode = check_forged(self.tokenizer, asked.messages), self.episodes[row]
        tokens = self.encode(row, Step(list(asked.messages)), tokenizer)
        tokens = [*tokens, *self.beginning(row, asked, tokens)]
        if len(tokens) < episode.num_left:
            episode.messages.append(list(asked.messages))
            return Next(tokens)
        return self.overflow(row)

    def overflow(self, row: int) -> Next:
        """Returns the end of a row whose program asks for more than fits; the row of a server stays."""
        if self.is_served:
            raise UserError(FULL)
        self.host.close([row])
        return self.over(row, "max_tokens")

    def over(self, row: int, stop: str) -> Next:
        """Returns the end of a row."""
        self.episodes[row].stop = self.episodes[row].stop or stop
        self.closed.add(row)
        self.open.discard(row)
        self.wait.done += row < self.num_rows
        return Next(finished=stop != "max_tokens")

    def end(self, row: int, outcome: Rewards | Failure) -> Next:
        """Takes the reward of a program that has ended; its forks end with it."""
        if row < self.num_rows:
            self.unpaid.discard(row)
            if isinstance(outcome, Failure):
                self.failures[row] = outcome
            else:
                self.episodes[row].scores.update(outcome)
        return self.over(row, "done")

    def finish(self) -> GradedReplies:
        """Waits for programs whose rows are full; grades the last replies of those that print no reward."""
        self.unasked.clear()  # replies that came after their programs had ended
        while self.unpaid:
            for row, outcome in self.host.take(self.unpaid, 1).items():
                if not isinstance(outcome, Asked):  # which is refused
                    self.end(row, outcome)
        for rows in self.problems, self.task_ids, self.episodes:
            del rows[self.num_rows :]
        silent = {}
        for row, episode in enumerate(self.episodes):
            episode.replies = episode.replies or [Reply("")]
            if row not in self.failures and "return" not in episode.scores:
                silent[row] = self.task_ids[row], episode.replies[-1].text
        self.stream.add(silent)
        for row, outcome in self.stream.take(silent.keys(), len(silent)).items():
            if isinstance(outcome, Failure):
                self.failures[row] = outcome
            elif "unscored" in outcome:
                self.failures[row] = Failure("reward_errors", UNSCORED)
            else:
                self.episodes[row].scores.update(outcome)
        for episode in self.episodes:
            num_before = len(episode.replies) - 1
            episode.turn_rewards = [*[0.0] * num_before, float(episode.scores["return"])]
        return super().finish()

    def records(self, completions: Completions) -> dict[str, Any]:
        """Returns fields of Episodes; a program's other conversations are further rows of its rollout."""
        fields = super().records(completions)
        if not self.forks:
            return fields
        rollout = np.concatenate([fields["rollout"], [self.parents[number] for number in self.forks]])
        order = np.argsort(rollout, kind="stable")
        rows = concatenate([completions, self.of_forks])
        return fields | {"completions": select_rows(rows, order), "rollout": rollout[order]}


def sampled_of(turn: Turn) -> Sampled:
    """Returns a reply as its program gets it."""
    return Sampled(
        None,
        ids=turn.tokens.tolist(),
        logprobs=turn.logprobs.tolist(),
        is_truncated=turn.is_truncated,
        prompt_ids=turn.context,
    )
