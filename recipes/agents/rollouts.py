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
from jaxtyping import Bool, Int, UInt32

from core.chains.pages import LaunchedSegment
from core.chains.turns import Conversations, Observation, Record, TurnChain, form_of
from core.records import Completions
from core.sampler import ChainJob, Sampler
from envs.base import Problem, Reply, Step
from envs.scoring.patience import HURRY, Patience
from envs.scoring.scorer import GradedReplies
from envs.scoring.worker import Failure
from models.names import Weights
from recipes.agents.host import AgentHost, AgentJob
from recipes.agents.protocol import THINK, Sampled
from recipes.agents.server import BadRequest
from recipes.agents.sessions import FULL, Asked, Endpoint, Rewards
from recipes.agents.texts import chat_prompt, check_forged
from utils.batching import concatenate, select_rows
from utils.metrics.terminal import Wait
from utils.settings.errors import UserError
from utils.threefry import make_key, threefry

UNSCORED = "its program's last line is no JSON, and neither --reward nor a column answer grades its last reply"


class ProgramChain(TurnChain):
    """The conversations of programs while they are sampled; a segment has one distribution.

    In training every second row is for a fork.
    """

    environment: "AgentConversations"

    def __init__(
        self, environment: "AgentConversations", first_row: int, sampler: Sampler, weights: Weights, job: ChainJob
    ):
        forks_per_row = int(not environment.is_served)
        rows = np.arange(len(job.keys) * (1 + forks_per_row))
        self.is_fork = rows % (1 + forks_per_row) > 0
        keys = np.zeros((len(rows), 2), np.uint32)
        keys[~self.is_fork] = job.keys
        longest = [0] * sampler.max_prompt_tokens  # until the prompt is known
        num_rows, job = len(job.keys), job._replace(prompts=[longest] * len(rows), keys=keys)
        super().__init__(environment, first_row, sampler, weights, job)
        self.is_drawing[:] = False
        self.has_begun = self.is_drawing.copy()
        self.table.prompts = self.table.prompts.copy()  # numbers of prompts, no longer of rows
        self.turn_tokens = np.full(len(rows), sampler.max_new_tokens)
        self.kept = np.zeros(len(rows), int)  # column up to which a row holds what its program got
        self.waits, self.turns = np.zeros(len(rows), int), count(1)  # when rows of each distribution were sampled
        self.prompt_numbers: dict[tuple[int, ...], int] = {}
        self.numbers = np.empty(len(rows), int)
        self.numbers[~self.is_fork] = self.row_offset + np.arange(num_rows)
        self.numbers[self.is_fork] = environment.start(self.numbers[~self.is_fork], self.is_fork.sum())
        self.places = {number: place for place, number in enumerate(self.numbers.tolist())}

    def run(self, cancelled: Event) -> Completions:
        """Samples until all programs have ended; returns the rows of the rollout."""
        completions = super().run(cancelled)
        is_auxiliary = np.isin(self.numbers, list(self.environment.host.auxiliary))
        completions = replace(completions, mask=completions.mask & ~is_auxiliary[:, None])
        others = np.flatnonzero(self.is_fork & completions.mask.any(axis=1))
        self.environment.host.close(self.numbers.tolist())  # programs may go on asking
        self.environment.others.append((self.numbers[others].tolist(), select_rows(completions, others)))
        return select_rows(completions, np.flatnonzero(~self.is_fork))

    def between_segments(self, is_idle: bool) -> None:
        if self.is_over[~self.is_fork].all():
            for row in np.flatnonzero(~self.is_over).tolist():
                if self.is_drawing[row] or self.number(row) in self.environment.unasked:
                    self.num_tokens[row] = self.turn_starts[row]  # without the reply that its program did not get
                self.finish(row, is_finished=True)
        else:
            super().between_segments(is_idle)

    def number(self, row: int) -> int:
        return int(self.numbers[row])

    def place(self, number: int) -> int:
        return self.places[number]

    def take(self, row: int, observation: Observation) -> None:
        """Begins or continues a row, or takes it out."""
        if observation.begins:
            self.begin(row, observation.tokens)
        else:
            super().take(row, observation)
        asked = self.environment.asked.get(self.number(row))
        limit = self.sampler.max_new_tokens
        self.turn_tokens[row] = min(limit, (asked and asked.request.limit) or limit)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Appends tokens to a row, after those that its program got: a stop text is taken back."""
        start, stop = int(self.kept[row]), int(self.num_tokens[row])
        if start < stop:
            for column in (self.drawn.mask, self.drawn.logprobs, self.drawn.support, self.drawn.routes):
                column[row, start:stop] = 0
            self.num_tokens[row] = start
            self.forget_launched(row)
        super().append(row, tokens)

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Gives a row its prompt; what it held is forgotten. Equal prompts of a rollout share pages."""
        if self.environment.is_served:
            if self.table.slots[row] >= 0:
                self.table.leave(row)
                self.table.shards[self.table.shard_of_row[row]].waiting.append(row)
            for numbers in (self.num_tokens, self.num_launched, self.num_cached, self.num_lost, self.turn_starts):
                numbers[row] = 0
            self.versions[row] += 1
            number = self.versions[row] * len(self.keys) + row
        else:
            number = self.prompt_numbers.setdefault(tuple(prompt), row)
        self.write_prompt(row, prompt)
        self.keys[row] = self.environment.key_of(self.number(row), self.keys[row])
        self.table.prompts[row] = number
        self.table.num_shared[row] = 0 if self.model.delta else (len(prompt) - 1) // self.sizes.page
        self.is_drawing[row] = self.has_begun[row] = True

    def write_prompt(self, row: int, prompt: Sequence[int]) -> None:
        self.drawn.prompts[row] = prompt
        self.prompt_lengths[row] = len(prompt)
        self.drawn.first_tokens[row] = prompt[-1]

    def finish(self, row: int, is_finished: bool) -> None:
        """Takes a row out; one whose program got no reply has a prompt too."""
        if not self.has_begun[row]:
            self.write_prompt(row, self.sampler.stop_ids[:1])
        super().finish(row, is_finished)

    def turn_limits(self) -> Int[np.ndarray, "B"]:
        return np.minimum(super().turn_limits(), self.turn_starts + self.turn_tokens)

    def turn_ends(
        self, rows: Int[np.ndarray, "R"], starts: Int[np.ndarray, "R"], counts: Int[np.ndarray, "R"], tokens: np.ndarray
    ) -> tuple[Int[np.ndarray, "R"], Bool[np.ndarray, "R"]]:
        """Returns how many tokens belong to a turn; requests have stop texts and ids of their own."""
        counts, has_stop = super().turn_ends(rows, starts, counts, tokens)
        for i, row in enumerate(rows.tolist()):
            texts, ids = self.environment.stops(self.number(row))
            if texts or ids:
                sampler = replace(self.sampler, stop_strings=texts, stop_ids=ids)
                if end := self.text_end(sampler, row, starts[i], tokens[i, : counts[i]]):
                    counts[i], has_stop[i] = end, True
        return counts, has_stop

    def read(self, segment: LaunchedSegment) -> None:
        """Adds the tokens of a segment; streams them, and ends the turns for which nobody waits."""
        super().read(segment)
        for row in segment.rows[self.is_drawing[segment.rows]].tolist():
            asked = self.environment.asked[self.number(row)]
            if asked.has_left:
                self.is_drawing[row] = False
                self.forget_launched(row)
            elif asked.on_tokens:
                self.environment.show(self.number(row), self.sampled(row))

    def sampled(self, row: int, is_truncated: bool = False) -> Sampled:
        """Returns the turn of a row so far, with its log-probabilities."""
        start, stop, drawn = int(self.turn_starts[row]), int(self.num_tokens[row]), self.drawn
        return Sampled(
            None,
            ids=drawn.tokens[row, start:stop].tolist(),
            logprobs=drawn.logprobs[row, start:stop].tolist(),
            is_truncated=is_truncated,
            prompt_ids=[*drawn.prompts[row], *drawn.tokens[row, :start].tolist()],
        )

    def end_turn(self, row: int, is_cut_off: bool) -> None:
        """Hands a turn to its program, with its tokens and their log-probabilities."""
        number, sampled, environment = self.number(row), self.sampled(row, is_cut_off), self.environment
        kept = environment.num_kept(number, sampled.ids)
        if self.model.delta and kept < len(sampled.ids):
            kept = -1  # the state of a Gated DeltaNet cannot go back
        environment.sampled[number] = sampled._replace(is_whole=kept >= 0)
        super().end_turn(row, is_cut_off)
        self.kept[row] = self.num_tokens[row]
        if 0 <= kept < len(sampled.ids):
            self.kept[row] = self.turn_starts[row] + kept
            episode = environment.episodes[number]
            episode.last_token = sampled.ids[kept - 1] if kept else -1
            episode.num_left = self.sampler.max_new_tokens - int(self.kept[row])

    def launch(self) -> LaunchedSegment | None:
        """Launches a segment of the rows with the distribution whose first row has waited longest."""
        if not self.environment.is_served:
            return super().launch()
        drawing = np.flatnonzero(self.is_drawing & (self.table.slots >= 0))
        default = self.sampler.distribution
        wanted = {row: self.environment.asked[self.number(row)].distribution or default for row in drawing.tolist()}
        if not wanted:
            return None
        chosen = wanted[min(wanted, key=lambda row: self.waits[row])]
        others = [row for row, distribution in wanted.items() if distribution != chosen]
        self.waits[drawing[~np.isin(drawing, others)]] = next(self.turns)
        self.is_drawing[others] = False
        self.sampler = replace(self.sampler, distribution=chosen)
        try:
            return super().launch()
        finally:
            self.is_drawing[others] = True
            self.sampler = replace(self.sampler, distribution=default)


class AgentConversations(Conversations):
    """The programs of a rollout, one for each row: what they ask, and what they are paid; or the rows of a server."""

    def prepare(self) -> None:
        settings = self.env.rollouts.settings
        self.num_rows = len(self.problems)
        self.tokens_per_turn = 0
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
        self.others: list[tuple[list[int], Completions]] = []  # rows of forks, and their numbers
        self.unpaid = set(range(self.num_rows))
        self.numbers = count()  # of replies without a seed

    def open(self, rows: range) -> list[tuple[int, Problem]]:
        """Returns the problems; what programs ask first replaces their messages."""
        return super(Conversations, self).open(rows)

    def listen(self, sampler: Sampler, first_row: int, wait: Wait) -> Sampler:
        self.wait, self.longest_prompt = wait, sampler.max_prompt_tokens
        self.host.context = sampler.max_prompt_tokens + sampler.max_new_tokens
        return replace(sampler, make_chain=partial(ProgramChain, self, first_row))

    def start(self, rows: Int[np.ndarray, "B"], num_forks: int) -> Int[np.ndarray, "_"]:
        """Starts the programs of rows, and returns the numbers of rows for their forks."""
        if self.is_served:
            return np.zeros(0, int)
        with self.lock:
            forks = len(self.problems) + np.arange(num_forks)
            self.problems += [self.problems[0]] * num_forks
            self.task_ids += [0] * num_forks
            self.episodes += [Record(0) for _ in forks]
        jobs = [AgentJob(row, self.problems[row].answer, self.episodes[row].game) for row in rows.tolist()]
        self.host.begin(jobs, deque(forks.tolist()))
        return forks

    def key_of(self, row: int, key: UInt32[np.ndarray, "2"]) -> UInt32[np.ndarray, "2"]:
        """Returns the sampling key of a row: of a request's seed, if it is served; of a fork, by its program's."""
        if self.is_served:
            asked = self.asked[row]
            is_own = asked.request.seed is None
            words = np.asarray(jax.random.key_data(self.key if is_own else make_key(asked.request.seed)))
            number = np.array([next(self.numbers) if is_own else asked.index])
            return np.concatenate(threefry((words[:1], words[1:]), number))
        if row < self.num_rows:
            return key
        seed = self.episodes[self.parents[row]].seed
        words = np.array([[seed >> 32]], np.uint32), np.array([[seed & 0xFFFFFFFF]], np.uint32)
        forks = [fork for fork, parent in self.parents.items() if parent == self.parents[row]]
        return np.concatenate(threefry(words, np.array([[1 + forks.index(row)]])), axis=1)[0]

    def stops(self, row: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Returns texts and ids that end a row's turn: those of its request, and the end of an only call."""
        if row not in self.asked:
            return (), ()
        request = self.asked[row].request
        texts, ids = [*request.stop], [*request.stop_token_ids]
        form = None if request.parallel_tool_calls else form_of(self.tokenizer, self.env.dialect)
        if form and request.schemas:
            closing = self.tokenizer.added_ids.get(form.closing)
            texts += [form.closing] if closing is None and form.closing else []
            ids += [] if closing is None else [closing]
        return tuple(texts), tuple(ids)

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

    def ask(self, rows: Set[int], num_needed: int, patience: Patience = HURRY) -> dict[int, Asked | Rewards | Failure]:
        self.send(rows & self.unasked)
        return self.host.take(rows, num_needed, patience)

    def observe(self, rows: Set[int], is_blocking: bool, patience: Patience = HURRY) -> dict[int, Observation]:
        outcomes = self.ask(rows, int(is_blocking), patience)
        observations = {row: self.observation(row, outcome) for row, outcome in outcomes.items()}
        return {row: observation for row, observation in observations.items() if observation is not None}

    def observation(self, row: int, outcome: Asked | Rewards | Failure) -> Observation | None:
        """Returns what a program asks, as tokens, or the end of its row; None: it is refused."""
        if not isinstance(outcome, Asked):
            return self.end(row, outcome)
        if outcome.has_left:
            return None
        self.asked[row] = outcome
        try:
            return self.opening(row, outcome) if outcome.is_new else self.continued(row, outcome)
        except UserError as error:  # the chat template does not take these messages
            self.host.answer(row, outcome, BadRequest(str(error)))
            return None

    def opening(self, row: int, asked: Asked) -> Observation:
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
        return Observation(prompt, begins=True)

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

    def continued(self, row: int, asked: Asked) -> Observation:
        """Returns what follows a row's last reply, or its end if that is too long."""
        tokenizer, episode = check_forged(self.tokenizer, asked.messages), self.episodes[row]
        tokens = self.encode(row, Step(list(asked.messages)), tokenizer)
        tokens = [*tokens, *self.beginning(row, asked, tokens)]
        if len(tokens) < episode.num_left:
            episode.messages.append(list(asked.messages))
            return Observation(tokens)
        return self.overflow(row)

    def overflow(self, row: int) -> Observation:
        """Returns the end of a row whose program asks for more than fits; the row of a server stays."""
        if self.is_served:
            raise UserError(FULL)
        self.host.close([row])
        return self.over(row, "max_tokens")

    def over(self, row: int, stop: str) -> Observation:
        """Returns the end of a row."""
        self.episodes[row].stop = self.episodes[row].stop or stop
        self.wait.done += row < self.num_rows
        return Observation(finished=stop != "max_tokens")

    def end(self, row: int, outcome: Rewards | Failure) -> Observation:
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
        fields, others = super().records(completions), [part for part in self.others if part[0]]
        if not others:
            return fields
        parents = [self.parents[number] for numbers, _ in others for number in numbers]
        rollout = np.concatenate([fields["rollout"], parents])
        order = np.argsort(rollout, kind="stable")
        rows = concatenate([completions, *(rows for _, rows in others)])
        return fields | {"completions": select_rows(rows, order), "rollout": rollout[order]}
