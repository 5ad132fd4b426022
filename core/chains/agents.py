"""Samples conversations of programs: a row begins when its program asks, and continues when it asks again.

Tokens, keys and masks of a row are those of core/chains/turns.py. What differs: prompts come while others are sampled,
and a request that continues no earlier conversation begins a row of its own, a fork.

B rows of the rollout, F rows for forks.
"""

import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt32

from core.chains.turns import Conversations, Observation, Record, TurnChain
from core.records import Completions
from core.sampler import ChainJob, Sampler
from envs.agents.host import AgentHost, AgentJob
from envs.agents.protocol import Sampled
from envs.agents.sessions import FULL, Asked, Ended
from envs.base import Problem, Reply, Step
from envs.scoring.patience import HURRY, Patience
from envs.scoring.scorer import GradedReplies
from envs.scoring.worker import Failure
from models.names import Weights
from models.tokenizer import Tokenizer
from utils.batching import concatenate, select_rows
from utils.metrics.terminal import Wait
from utils.settings.errors import UserError
from utils.threefry import threefry

UNSCORED = "its program's last line is no JSON, and neither --reward nor a column answer grades its last reply"


class ProgramChain(TurnChain):
    """The conversations of programs while they are sampled; every second row is for a fork."""

    environment: "AgentConversations"
    forks_per_row = 1

    def __init__(
        self, environment: "AgentConversations", first_row: int, sampler: Sampler, weights: Weights, job: ChainJob
    ):
        rows = np.arange(len(job.keys) * (1 + self.forks_per_row))
        self.is_fork = rows % (1 + self.forks_per_row) > 0
        keys = np.zeros((len(rows), 2), np.uint32)
        keys[~self.is_fork] = job.keys
        longest = [0] * sampler.max_prompt_tokens  # until the prompt is known
        num_rows, job = len(job.keys), job._replace(prompts=[longest] * len(rows), keys=keys)
        super().__init__(environment, first_row, sampler, weights, job)
        self.is_drawing[:] = False
        self.has_begun = self.is_drawing.copy()
        self.table.prompts = self.table.prompts.copy()  # numbers of prompts, no longer of rows
        self.turn_tokens = np.full(len(rows), sampler.max_new_tokens)
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
        self.turn_tokens[row] = min(limit, (asked and asked.request.max_tokens) or limit)

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Gives a row its prompt; equal prompts share pages."""
        self.write_prompt(row, prompt)
        self.keys[row] = self.environment.key_of(self.number(row), self.keys[row])
        self.table.prompts[row] = self.prompt_numbers.setdefault(tuple(prompt), row)
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
        """Returns how many tokens belong to a turn; requests have stop texts of their own."""
        counts, has_stop = super().turn_ends(rows, starts, counts, tokens)
        for i, row in enumerate(rows.tolist()):
            if stops := self.environment.stops(self.number(row)):
                sampler = replace(self.sampler, stop_strings=stops)
                if end := self.text_end(sampler, row, starts[i], tokens[i, : counts[i]]):
                    counts[i], has_stop[i] = end, True
        return counts, has_stop

    def end_turn(self, row: int, is_cut_off: bool) -> None:
        """Hands a turn to its program, with its tokens and their log-probabilities."""
        start, stop = int(self.turn_starts[row]), int(self.num_tokens[row])
        drawn, number = self.drawn, self.number(row)
        prompt = *drawn.prompts[row], *drawn.tokens[row, :start].tolist()
        self.environment.sampled[number] = Sampled(
            None,
            ids=tuple(drawn.tokens[row, start:stop].tolist()),
            logprobs=tuple(drawn.logprobs[row, start:stop].tolist()),
            is_truncated=is_cut_off,
            prompt_ids=tuple(prompt),
        )
        super().end_turn(row, is_cut_off)


class AgentConversations(Conversations):
    """The programs of a rollout, one for each row: what they ask, and what they are paid."""

    def prepare(self) -> None:
        self.num_rows = len(self.problems)
        self.tokens_per_turn = 0
        self.host = self.stream.scorer.hold(partial(AgentHost, self.env.programs))
        self.host.reset()
        self.asked: dict[int, Asked] = {}  # what a row's next reply answers
        self.sampled: dict[int, Sampled] = {}  # tokens of a row's last turn
        self.parents: dict[int, int] = {}  # rows of forks, and those of their programs
        self.others: list[tuple[list[int], Completions]] = []  # rows of forks, and their numbers
        self.unpaid = set(range(self.num_rows))

    def open(self, rows: range) -> list[tuple[int, Problem]]:
        """Returns the problems; what programs ask first replaces their messages."""
        return super(Conversations, self).open(rows)

    def listen(self, sampler: Sampler, first_row: int, wait: Wait) -> Sampler:
        self.wait, self.longest_prompt = wait, sampler.max_prompt_tokens
        self.host.context = sampler.max_prompt_tokens + sampler.max_new_tokens
        return replace(sampler, make_chain=partial(ProgramChain, self, first_row))

    def start(self, rows: Int[np.ndarray, "B"], num_forks: int) -> Int[np.ndarray, "_"]:
        """Starts the programs of rows, and returns the numbers of rows for their forks."""
        with self.lock:
            forks = len(self.problems) + np.arange(num_forks)
            self.problems += [self.problems[0]] * num_forks
            self.task_ids += [0] * num_forks
            self.episodes += [Record(0) for _ in forks]
        jobs = [AgentJob(row, self.problems[row].answer, self.episodes[row].game) for row in rows.tolist()]
        self.host.begin(jobs, deque(forks.tolist()))
        return forks

    def key_of(self, row: int, key: UInt32[np.ndarray, "2"]) -> UInt32[np.ndarray, "2"]:
        """Returns the sampling key of a row; that of a fork is made from its program's."""
        if row < self.num_rows:
            return key
        seed = self.episodes[self.parents[row]].seed
        words = np.array([[seed >> 32]], np.uint32), np.array([[seed & 0xFFFFFFFF]], np.uint32)
        forks = [fork for fork, parent in self.parents.items() if parent == self.parents[row]]
        return np.concatenate(threefry(words, np.array([[1 + forks.index(row)]])), axis=1)[0]

    def stops(self, row: int) -> tuple[str, ...]:
        return self.asked[row].request.stop if row in self.asked else ()

    def send(self, rows: Set[int]) -> None:
        """Gives programs their replies."""
        for row in sorted(rows):
            reply = self.episodes[row].replies[-1]
            text = reply.text
            for stop in self.stops(row):  # as OpenAI's endpoint: without the stop text
                text = text.partition(stop)[0]
            self.host.answer(row, self.sampled.pop(row)._replace(reply=reply._replace(text=text)))
        self.unasked -= rows

    def ask(self, rows: Set[int], num_needed: int, patience: Patience = HURRY) -> dict[int, Asked | Ended | Failure]:
        self.send(rows & self.unasked)
        return self.host.take(rows, num_needed, patience)

    def observe(self, rows: Set[int], is_blocking: bool, patience: Patience = HURRY) -> dict[int, Observation]:
        outcomes = self.ask(rows, int(is_blocking), patience)
        observations = {row: self.observation(row, outcome) for row, outcome in outcomes.items()}
        return {row: observation for row, observation in observations.items() if observation is not None}

    def observation(self, row: int, outcome: Asked | Ended | Failure) -> Observation | None:
        """Returns what a program asks, as tokens, or the end of its row; None: it is refused."""
        if not isinstance(outcome, Asked):
            return self.end(row, outcome)
        self.asked[row] = outcome
        try:
            return self.opening(row, outcome) if outcome.is_new else self.continued(row, outcome)
        except UserError as error:  # the chat template does not take these messages
            self.host.deny(row, str(error))
            return None

    def opening(self, row: int, asked: Asked) -> Observation:
        """Returns the prompt of a conversation that begins. Raises: UserError for one that is too long."""
        if row >= self.num_rows:
            self.parents[row] = self.host.parents[row]
            self.task_ids[row] = self.task_ids[self.parents[row]]
            self.problems[row] = self.problems[self.parents[row]]
        thinking = self.problems[row].thinking if asked.request.thinking is None else asked.request.thinking
        problem = replace(
            self.problems[row], messages=list(asked.messages), tools=asked.request.tools, thinking=thinking, prefix=""
        )
        tokenizer = check_forged(self.tokenizer, [*asked.messages, *asked.request.tools])
        prompt = chat_prompt(tokenizer, problem)
        if len(prompt) > self.longest_prompt:
            raise UserError(FULL)
        self.problems[row] = problem
        return Observation(prompt, begins=True)

    def continued(self, row: int, asked: Asked) -> Observation:
        """Returns what follows a row's last reply, or its end if that is too long."""
        tokenizer, episode = check_forged(self.tokenizer, asked.messages), self.episodes[row]
        tokens = self.encode(row, Step(list(asked.messages)), tokenizer)
        if len(tokens) < episode.num_left:
            episode.messages.append(list(asked.messages))
            return Observation(tokens)
        return self.overflow(row)

    def overflow(self, row: int) -> Observation:
        """Returns the end of a row whose program asks for more than fits."""
        self.host.close([row])
        return self.over(row, "max_tokens")

    def over(self, row: int, stop: str) -> Observation:
        """Returns the end of a row."""
        self.episodes[row].stop = self.episodes[row].stop or stop
        self.wait.done += row < self.num_rows
        return Observation(finished=stop != "max_tokens")

    def end(self, row: int, outcome: Ended | Failure) -> Observation:
        """Takes the reward of a program that has ended; its forks end with it."""
        if row < self.num_rows:
            self.unpaid.discard(row)
            if isinstance(outcome, Failure):
                self.failures[row] = outcome
            else:
                self.episodes[row].scores.update(outcome.rewards)
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


def chat_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Returns the tokens of a conversation that begins; thoughts of earlier replies that the template refuses are left.

    Raises: UserError as `Tokenizer.chat`.
    """
    messages, *style = problem.messages, problem.thinking, "", problem.plain, problem.tools
    thoughtless = [{key: x for key, x in message.items() if key != "reasoning_content"} for message in messages]
    if thoughtless != list(messages):
        with contextlib.suppress(UserError):
            return tokenizer.chat(messages, *style)
    return tokenizer.chat(thoughtless, *style)


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
