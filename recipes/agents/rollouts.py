"""Samples conversations of programs: a row begins when its program asks, and continues when it asks again.

Tokens, keys and masks of a row are those of core/chains/turns.py. What differs: prompts come while others are sampled,
and a request that continues no earlier conversation begins a row of its own, a fork.

B rollouts. Row 2 i is of program i; odd rows are for forks, so that all shards of a mesh have both.
"""

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from core.chains.turns import Conversations, Record, form_of
from core.records import Completions
from core.sampler import Next, Sampler, Stops, Turn
from envs.base import Problem, Reply, Step
from envs.scoring.scorer import NO_WAIT, GradedReplies, WaitForMore
from envs.scoring.worker import Failure
from models.names import Weights
from models.tokenizer import Tokenizer
from recipes.agents.endpoint import FULL, Asked, Endpoint, Rewards
from recipes.agents.host import AgentHost, AgentJob
from recipes.agents.protocol import THINK, BadRequest, Sampled
from utils.batching import select_rows
from utils.metrics.terminal import Wait
from utils.settings.errors import UserError
from utils.threefry import threefry

remark = cache(print)  # prints a line once
UNSCORED = "its program's last line is not valid JSON, and neither --reward nor a column answer grades its last reply"


class RequestedRows(Conversations):
    """Rows whose prompts and further messages are the requests of clients.

    A subclass has `key_of` a row that begins, and `end`, which takes a program's rewards.
    """

    host: Endpoint
    longest_prompt: int

    def prepare(self) -> None:
        self.host.tokenizer = self.tokenizer
        self.asked: dict[int, Asked] = {}  # what a row's next reply answers
        self.begun: dict[int, Sequence[int]] = {}  # tokens that begin a row's next reply, and are not sampled
        self.sampled: dict[int, Sampled] = {}  # a row's last reply, until its client gets it
        self.kept: dict[int, int] = {}  # tokens of a row's last turn that its client got, if not all

    def listening(self, sampler: Sampler) -> Sampler:
        self.has_states = sampler.model.delta is not None
        return replace(super().listening(sampler), on_tokens=self.on_tokens)

    def on_tokens(self, turn: Turn) -> bool:
        """Streams a reply; False if nobody waits for it."""
        asked = self.asked[turn.row]
        if asked.has_left:
            self.unasked.add(turn.row)
        elif asked.on_tokens:
            self.host.call(asked.on_tokens, self.sampled_of(turn, self.reply(turn.row, turn.tokens)))
        return not asked.has_left

    def on_end(self, turn: Turn) -> None:
        """Takes a reply that has ended; the row waits. A stop text is cut off if it begins with a token."""
        super().on_end(turn)
        row, episode, kept = turn.row, self.episodes[turn.row], self.num_kept(turn.row, turn.tokens.tolist())
        is_cut = 0 <= kept < len(turn.tokens) and not self.has_states  # the state of a Gated DeltaNet cannot go back
        is_whole = is_cut or kept == len(turn.tokens)
        self.sampled[row] = self.sampled_of(turn, episode.replies[-1])._replace(is_whole=is_whole)
        if is_cut:
            self.kept[row] = kept
            episode.last_token = int(turn.tokens[kept - 1]) if kept else -1
            episode.num_left = turn.num_left + len(turn.tokens) - kept

    def num_kept(self, row: int, ids: Sequence[int]) -> int:
        """Returns how many tokens of a turn make the text before its stop text; -1: that ends within a token."""
        text = self.tokenizer.decode(ids) if (stops := self.asked[row].request.stop) else ""
        places = [text.find(stop) for stop in stops if stop in text]
        for num_kept in range(len(ids), 0, -1) if places else ():
            known = self.tokenizer.decode(ids[:num_kept])
            if len(known) <= min(places):
                return num_kept if len(known) == min(places) else -1
        return 0 if places else len(ids)

    def sampled_of(self, turn: Turn, reply: Reply) -> Sampled:
        """Returns a reply, or its beginning, as its client gets it."""
        ids, logprobs = turn.tokens.tolist(), turn.logprobs.tolist()
        is_thinking = self.opens_thoughts(turn.context)
        return Sampled(reply, ids, logprobs, turn.is_truncated, prompt_ids=turn.context, is_thinking=is_thinking)

    def opens_thoughts(self, prompt: Sequence[int]) -> bool:
        return self.tokenizer.decode(prompt[-4:]).rstrip().endswith(THINK[0])

    def observe(self, rows: Set[int], is_blocking: bool, more: WaitForMore = NO_WAIT) -> dict[int, Next]:
        """Gives clients the replies of rows; returns what they ask next, as tokens, or the ends of their rows."""
        for row in sorted(rows & self.unasked):
            if not self.asked[row].has_left:
                self.host.answer(row, self.asked[row], self.sampled.pop(row))
                self.unasked.discard(row)
        outcomes = self.host.take(rows, int(is_blocking), more)
        found = {row: self.observation(row, outcome) for row, outcome in outcomes.items()}
        return {row: following for row, following in found.items() if following is not None}

    def observation(self, row: int, outcome: Asked | Rewards | Failure) -> Next | None:
        """Returns what a client asks, as tokens, or the end of a program's row; None: it is refused."""
        if not isinstance(outcome, Asked):
            return self.end(row, outcome)
        if outcome.has_left:
            return None
        self.asked[row] = outcome
        self.unasked.discard(row)
        try:
            following = self.opening(row, outcome) if outcome.is_new else self.continued(row, outcome)
        except UserError as error:  # the chat template does not take these messages
            self.host.answer(row, outcome, BadRequest(str(error)))
            return None
        return following._replace(
            key=self.key_of(row) if following.begins else None,
            num_kept=self.kept.pop(row, None),
            limit=outcome.request.limit or 0,
            stops=self.stops(row),
            distribution=outcome.distribution,
        )

    def stops(self, row: int) -> Stops | None:
        """Returns what ends a row's turn: texts and ids of its request, and the end of an only call."""
        request = self.asked[row].request
        texts, ids = [*request.stop], [*request.stop_token_ids]
        form = None if request.parallel_tool_calls else form_of(self.tokenizer, self.env.dialect)
        if form and request.schemas and form.closing:
            closing = self.tokenizer.added_ids.get(form.closing)
            (texts if closing is None else ids).append(form.closing if closing is None else closing)
        return Stops(tuple(texts), tuple(ids)) if texts or ids else None

    def opening(self, row: int, asked: Asked) -> Next:
        """Returns the prompt of a conversation that begins. Raises: UserError for one that is too long."""
        request, prompt, problem = asked.request, asked.prompt, self.problems[row]
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
        """Returns what follows a row's last reply."""
        tokenizer, episode = check_forged(self.tokenizer, asked.messages), self.episodes[row]
        tokens = self.encode(row, Step(list(asked.messages)), tokenizer)
        tokens = [*tokens, *self.beginning(row, asked, tokens)]
        if len(tokens) >= episode.num_left:
            return self.overflow(row)
        episode.messages.append(list(asked.messages))
        return Next(tokens)

    def overflow(self, row: int) -> Next:
        """Returns the end of a row that has no room for what its client asks. Raises: UserError if it stays."""
        raise UserError(FULL)


class AgentConversations(RequestedRows):
    """The programs of a rollout: what they ask, and what they are paid."""

    host: AgentHost

    def prepare(self) -> None:
        self.host = self.stream.scorer.hold(partial(AgentHost, self.env.rollouts.settings))
        self.host.reset()
        super().prepare()
        self.problems = [problem for problem in self.problems for _ in "12"]
        self.episodes = [each for episode in self.episodes for each in (episode, Record(0))]
        self.unpaid = set(range(0, len(self.problems), 2))

    def prompts(self) -> list[tuple[int, Problem]]:
        return []  # programs ask

    def sample(
        self, sampler: Sampler, weights: Weights, _: Sequence[list[int]], keys: UInt32[np.ndarray, "B 2"], wait: Wait
    ) -> Completions:
        """Samples until all programs have ended; returns their rows and those of forks."""
        rows = range(len(self.problems))
        self.longest_prompt = sampler.max_prompt_tokens
        self.host.context = sampler.max_prompt_tokens + sampler.max_new_tokens
        jobs = [AgentJob(row, self.problems[row].answer, self.episodes[row].game) for row in rows[::2]]
        self.host.begin(jobs, deque(rows[1::2]))
        completions = super().sample(sampler, weights, [[]] * len(rows), np.repeat(keys, 2, axis=0), wait)
        self.host.close(rows)  # programs may go on asking
        is_auxiliary = np.isin(rows, list(self.host.auxiliary))
        return replace(completions, mask=completions.mask & ~is_auxiliary[:, None])

    def key_of(self, row: int) -> UInt32[np.ndarray, "2"] | None:
        """Returns the key of a fork, by its program's and its number."""
        if row % 2 == 0:
            return None
        parent, number = self.host.parents[row]
        seed = self.episodes[parent].seed
        words = np.array([[seed >> 32]], np.uint32), np.array([[seed & 0xFFFFFFFF]], np.uint32)
        return np.concatenate(threefry(words, np.array([[number]])), axis=1)[0]

    def overflow(self, row: int) -> Next:
        self.host.close([row])
        self.episodes[row].stop = "max_tokens"
        self.wait.done += row % 2 == 0
        return Next()

    def end(self, row: int, outcome: Rewards | Failure) -> Next:
        """Takes the reward of a program that has ended. What it did not get is not trained."""
        if row % 2 == 0:
            self.unpaid.discard(row)
            self.wait.done += 1
            if isinstance(outcome, Failure):
                self.failures[row // 2] = outcome
            else:
                self.episodes[row].scores.update(outcome)
        self.episodes[row].stop = self.episodes[row].stop or "done"
        return Next(finished=True, num_kept=0 if row in self.unasked else None)

    def finish(self) -> GradedReplies:
        """Waits for programs whose rows are full; grades the last replies of those that print no reward."""
        while self.unpaid:
            for row, outcome in self.host.take(self.unpaid, 1).items():
                if not isinstance(outcome, Asked):  # which is refused
                    self.end(row, outcome)
        self.unasked.clear()  # replies that came after their programs had ended
        self.problems, self.episodes = self.problems[::2], self.episodes[::2]
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
            episode.turn_rewards = [*[0.0 for _ in episode.replies[1:]], float(episode.scores["return"])]
        return super().finish()

    def records(self, completions: Completions) -> dict[str, Any]:
        """Returns fields of Episodes; a program's other conversations are further rows of its rollout."""
        rows = np.arange(len(completions.mask))
        rollouts = np.array([self.host.parents.get(row, (row, 0))[0] // 2 for row in rows.tolist()])
        order = np.argsort(2 * rollouts + rows % 2, kind="stable")  # a program's own row comes first
        order = order[(order % 2 == 0) | completions.mask.any(axis=1)[order]]
        rows = select_rows(completions, order)
        return super().records(completions) | {"completions": rows, "rollout": rollouts[order]}


def chat_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Returns the tokens of a conversation, without thoughts of earlier replies and names if the template hides them.

    Raises: UserError as `Tokenizer.chat`.
    """
    for hidden in ((), ("reasoning_content",), ("name",), ("reasoning_content", "name")):
        messages = [{key: x for key, x in said.items() if key not in hidden} for said in problem.messages]
        with contextlib.suppress(UserError):
            ids = tokenizer.chat(messages, problem.thinking, "", problem.plain, problem.tools)
            if "name" in hidden:
                remark("the chat template shows no names of messages: they are left out")
            return ids
    return tokenizer.chat(messages, problem.thinking, "", problem.plain, problem.tools)


def check_forged(tokenizer: Tokenizer, said: Sequence[Mapping[str, Any]]) -> Tokenizer:
    """Returns a tokenizer to which special tokens in messages are text.

    Raises: UserError for tokens that the chat template writes itself: a message must not forge a turn.
    """
    spelled = tokenizer.spelled([{"role": "user", "content": json.dumps(said, ensure_ascii=False)}])
    if not spelled:
        return tokenizer
    written = tokenizer.template + tokenizer.hf.decode(tokenizer.stop_ids)
    with contextlib.suppress(UserError):
        written += tokenizer.render([{**message, "content": ""} for message in said if "role" in message], None)
    if forged := next((sign for sign in spelled if sign in written), ""):
        raise UserError(f"a message spells {forged}, which is a token of the chat template: leave it out")
    return replace(tokenizer, plain=frozenset(spelled))
