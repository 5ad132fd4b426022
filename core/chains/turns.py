"""Samples conversations: turns of the policy and observations of an environment in the same rows of the KV cache.

Turns are never encoded or computed again: observations are appended to the sampled tokens, each row at its own length.
A sample depends on the row's own tokens and their number alone. It depends neither on other rows nor on the time that
an environment takes.

B rows, A columns behind the prompt.
"""

import time
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from threading import Event
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int, UInt32

from core.chains.pages import LaunchedSegment, PagedChain, PageSizes
from core.chains.replies import Replies
from core.records import Completions
from core.sampler import ChainJob, Sampler
from envs.base import DIALECTS, INLINE, Dialect, Env, Problem, Reply, Step
from envs.scoring.patience import HURRY, Patience
from envs.scoring.scorer import GradedReplies, ScoringStream
from envs.scoring.worker import Failure, Outcome, Turns, heard, outcome_from_json, outcome_to_json
from models.messages import Message, is_begun
from models.names import Weights
from models.tokenizer import UNREAD, Tokenizer
from utils.devices.sharding import JSON, Layout
from utils.devices.threads import between_turns
from utils.metrics.terminal import Wait
from utils.settings.errors import UserError


class Observation(NamedTuple):
    """Tokens to append to a row, or the end of its episode if there are none."""

    tokens: Sequence[int] = ()
    finished: bool = False  # the episode ended in another way than by the limit of tokens
    begins: bool = False  # the tokens are a row's prompt: see core/chains/agents.py


class TurnChain(PagedChain):
    """The conversations of some prompts while they are sampled; rows wait while their environment computes."""

    def __init__(
        self, environment: "Conversations", first_row: int, sampler: Sampler, weights: Weights, job: ChainJob
    ):
        super().__init__(sampler, weights, job)
        self.environment = environment
        self.row_offset += first_row
        self.num_observed = np.zeros(len(self.keys), int)
        self.sizes = self.sizes._replace(steps=turn_steps(self.sampler, self.sizes, environment.tokens_per_turn))
        self.was_in_vain = False  # the last wait for late rows
        self.clock = time.perf_counter()

    def run(self, cancelled: Event) -> Completions:
        """Samples segments and appends observations until all episodes are over."""
        return replace(super().run(cancelled), num_observed=self.num_observed)

    def turn_limits(self) -> Int[np.ndarray, "B"]:
        """Returns the column of each row before which its turn must end."""
        limit = self.sampler.max_new_tokens
        tokens_per_turn = self.environment.tokens_per_turn or limit
        return np.minimum(limit, self.turn_starts + tokens_per_turn)

    def end_turn(self, row: int, is_cut_off: bool) -> None:
        """Hands a turn that has ended to the environment."""
        stop = int(self.num_tokens[row])
        turn = self.drawn.tokens[row, self.turn_starts[row] : stop].copy()
        num_left = self.sampler.max_new_tokens - stop
        self.is_drawing[row] = False
        self.environment.end_turn(self.number(row), turn, -1 if is_cut_off and not num_left else num_left)

    def read(self, segment: LaunchedSegment) -> None:
        """Adds the tokens of a segment, and remembers how long it takes to begin or to continue rows."""
        super().read(segment)
        if segment.has_prefill:
            self.sampler.paging.seconds.append(time.perf_counter() - self.clock)

    def between_segments(self, is_idle: bool) -> None:
        """Appends the observations that have come; waits for one if no row can be sampled."""
        waiting = np.flatnonzero(~self.is_drawing & ~self.is_over)
        if waiting.size:
            rows = set(map(self.number, waiting.tolist()))
            seconds = self.sampler.paging.seconds
            may_wait = bool(seconds) and (is_idle or not self.was_in_vain)
            patience = Patience(median(seconds), int(self.is_drawing.sum())) if may_wait else HURRY
            with between_turns():
                observations = self.environment.observe(rows, is_idle, patience)
            self.was_in_vain = not observations
            for number, observation in observations.items():
                self.take(self.place(number), observation)
        self.clock = time.perf_counter()

    def number(self, row: int) -> int:
        """Returns the number of a row over all calls."""
        return self.row_offset + row

    def place(self, number: int) -> int:
        """Returns the row of this chain that has a number."""
        return number - self.row_offset

    def take(self, row: int, observation: Observation) -> None:
        """Appends an observation to a row, or removes an episode that is over."""
        if observation.tokens:
            self.append(row, observation.tokens)
            self.turn_starts[row] = self.num_tokens[row]
            self.is_drawing[row] = True
            self.num_observed[row] += len(observation.tokens)
        else:
            self.finish(row, observation.finished)


def turn_steps(sampler: Sampler, sizes: PageSizes, tokens_per_turn: int) -> int:
    """Returns the steps of a segment of turns; short turns would wait for the end of a longer segment."""
    return min(sampler.segment, tokens_per_turn or sizes.steps)


def answering_calls(sampler: Sampler, dialect: Dialect) -> Sampler:
    """Returns a sampler whose turns end with a call, if the dialect writes results behind calls."""
    tokenizer = sampler.tokenizer
    if not dialect.is_inline:
        return sampler
    closing = tokenizer.added_ids.get(dialect.closing)
    if closing is None:
        return replace(sampler, stop_strings=(*sampler.stop_strings, dialect.closing))
    return replace(sampler, stop_ids=(*sampler.stop_ids, closing))


@dataclass
class Record:
    """An episode so far."""

    seed: int
    game: int = 0  # seeds the opening, which the group shares
    said: int = 0  # digest of the environment's messages
    replies: list[Reply] = field(default_factory=list)  # replies of the policy, each with its prefix
    messages: list[list[Message]] = field(default_factory=list)  # messages that followed each reply except the last
    num_left: int = 0  # tokens that fit into the row behind the last reply; -1: it was truncated
    last_token: int = -1  # last token of the last reply
    scores: Counter[str] = field(default_factory=Counter)
    turn_rewards: list[float] = field(default_factory=list)
    stop: str = ""  # reason of its end: done, failed, max_turns; max_tokens: truncated, or no room for what follows

    @property
    def turns(self) -> Turns:
        """Request for the environment's response to the last reply."""
        return Turns(
            seed=self.seed,
            replies=tuple(self.replies),
            is_truncated=bool(self.stop),
            game=self.game,
            said=self.said,
        )

    def before(self, prompt: Sequence[Message]) -> list[Message]:
        """Returns the messages up to the last reply, for the chat template: without sampled ones."""
        messages = [*prompt]
        for said in self.messages:
            if said[0]["role"] != INLINE:  # an inline result: the reply continues behind it
                messages += [*([] if is_begun(messages) else [UNREAD]), *said]
        return messages

    def conversation(self) -> list[Message]:
        """Returns turns and what followed them."""
        messages = []
        for i, reply in enumerate(self.replies):
            messages.append({"role": "assistant", "content": reply.text})
            messages += self.messages[i] if i < len(self.messages) else []
        return messages


class Conversations(Replies):
    """Episodes of a rollout: encoded observations, and rewards; rows are numbered over the prompts of all calls.

    Each process sends its share of the turns to the environment. Every process receives all observations, since all
    compute the same rows. A row's sampling key seeds its episode. `games` seeds the opening that a group shares (None:
    the key of the group's first sample).
    """

    def __init__(
        self,
        env: Env,
        tokenizer: Tokenizer,
        layout: Layout,
        problems: Sequence[Problem],
        task_ids: Int[np.ndarray, "N"],
        keys: UInt32[np.ndarray, "B 2"],
        stream: ScoringStream,
        games: UInt32[np.ndarray, "N 2"] | None = None,
    ):
        super().__init__(env, tokenizer, layout, problems, task_ids, keys, stream)
        self.tokens_per_turn = env.tokens_per_turn  # limit; 0: none
        games = keys[:: self.num_samples] if games is None else games
        games = np.repeat(games, self.num_samples, axis=0)
        self.episodes = [Record(seed_of(key), seed_of(game)) for key, game in zip(keys, games, strict=True)]
        self.unasked: set[int] = set()  # rows with a turn that was not sent to the environment
        self.failures: dict[int, Failure] = {}
        self.wait = Wait("")
        self.prepare()

    def prepare(self) -> None:
        """Is called when all rows are there."""

    def listen(self, sampler: Sampler, first_row: int, wait: Wait) -> Sampler:
        """Returns a sampler whose rows are these episodes, beginning with this row."""
        self.wait = wait
        return replace(sampler, make_chain=partial(TurnChain, self, first_row))

    def open(self, rows: range) -> list[tuple[int, Problem]]:
        """Returns task number and problem of each prompt of these rows, with the openings of episodes as messages.

        There is one prompt for each group if its episodes begin alike; if not, one for each row.
        """
        if self.env.opens:
            self.unasked |= set(rows)
            for row, outcome in self.ask(set(rows), len(rows)).items():
                if isinstance(outcome, Step):  # after a failure its first turn fails, too
                    self.problems[row] = replace(self.problems[row], messages=outcome.messages)
                    self.episodes[row].said = heard(0, outcome)
        opened = [(self.task_ids[row], self.problems[row]) for row in rows]
        firsts = super().open(rows)
        shared = [problem.messages for _, problem in firsts for _ in range(self.num_samples)]
        are_alike = [problem.messages for _, problem in opened] == shared
        return firsts if are_alike else opened

    def begin(self, turns: Sequence[Int[np.ndarray, "A"]]) -> None:
        """Plays these turns in each episode, which then continues behind them.

        Raises: UserError if the environment fails in one of them.
        """
        self.open(range(len(self.episodes)))
        for turn in turns:
            for row in range(len(self.episodes)):
                self.end_turn(row, turn, num_left=0)
            for row, outcome in self.ask(set(range(len(self.episodes))), len(self.episodes)).items():
                if isinstance(outcome, Failure):
                    raise UserError(
                        f"the environment fails in a turn before the branch, {outcome.reason!r}: choose an earlier "
                        "--from_turn, or correct the environment"
                    )
                self.add_scores(row, outcome)
                self.episodes[row].messages.append(outcome.messages)

    def end_turn(self, row: int, turn: Int[np.ndarray, "A"], num_left: int) -> None:
        """Takes the tokens of a turn that has ended.

        `num_left`: tokens that still fit into the row; -1 if not even the end of the turn did.
        """
        episode = self.episodes[row]
        episode.replies.append(Reply(self.text_of(row, turn), self.calls(turn)))
        episode.last_token = int(turn[-1])
        episode.num_left = num_left
        self.unasked.add(row)
        self.wait.num_tokens += len(turn)

    def calls(self, turn: Int[np.ndarray, "A"]) -> tuple[str, ...]:
        """Returns the calls of tools in a turn."""
        if not self.env.dialect:
            return ()
        dialect = DIALECTS[self.env.dialect]
        return self.tokenizer.calls(turn, dialect.opening, dialect.closing)

    def observe(self, rows: Set[int], is_blocking: bool, patience: Patience = HURRY) -> dict[int, Observation]:
        """Returns the observations that have come for these rows, as tokens; `is_blocking`: waits for at least one."""
        outcomes = self.ask(rows, int(is_blocking), patience)
        return {row: self.observation(row, outcome) for row, outcome in outcomes.items()}

    def ask(self, rows: Set[int], num_needed: int, patience: Patience = HURRY) -> dict[int, Outcome]:
        """Returns the outcomes of these rows' turns that have come; with several processes, all outcomes."""
        if jax.process_count() > 1:
            return self.ask_together(sorted(rows))
        self.send(rows & self.unasked)
        return self.stream.take(rows, num_needed, patience)

    def ask_together(self, rows: Sequence[int]) -> dict[int, Outcome]:
        """Returns outcomes of all of these rows; this process sends its share of them."""

        def own_outcomes(share: range) -> list[JSON]:
            own_rows = {rows[i] for i in share}
            self.send(own_rows)
            outcomes = self.stream.take(own_rows, len(own_rows))
            return [outcome_to_json(outcome) for outcome in outcomes.values()]

        results = map(outcome_from_json, self.layout.share(own_outcomes, len(rows)))
        return dict(zip(rows, results, strict=True))

    def send(self, rows: Set[int]) -> None:
        """Sends the last turns of rows to the environment, with one request."""
        self.stream.add({row: (self.task_ids[row], self.episodes[row].turns) for row in sorted(rows)})
        self.unasked -= rows

    def observation(self, row: int, outcome: Outcome) -> Observation:
        """Returns the observation in an outcome."""
        episode, tokens, stop = self.episodes[row], [], "failed"
        if isinstance(outcome, Failure):
            self.failures[row] = outcome
        else:
            self.add_scores(row, outcome)
            tokens = [] if outcome.done else self.encode(row, outcome)
            stop = "done" if outcome.done else "max_turns"
        if tokens and len(episode.replies) < self.env.max_turns:
            if len(tokens) < episode.num_left:
                episode.messages.append(outcome.messages)
                return Observation(tokens)
            stop = "max_tokens"
        self.wait.done += 1
        if tokens:
            self.unasked.add(row)  # the environment may have a last reward
        episode.stop = "max_tokens" if episode.num_left < 0 else stop
        return Observation(finished=episode.stop != "max_tokens")

    def encode(self, row: int, step: Step, tokenizer: Tokenizer | None = None) -> list[int]:
        """Returns the tokens between a turn and the next; a turn that was truncated or ended differently is closed."""
        if step.messages[0]["role"] == INLINE:
            dialect = DIALECTS[self.env.dialect]
            return self.tokenizer.results(step.messages, dialect.result_opening, dialect.result_closing)
        problem, episode = self.problems[row], self.episodes[row]
        bridge = (tokenizer or self.tokenizer).bridge(
            episode.before(problem.messages),
            step.messages,
            thinking=problem.thinking,
            prefix=problem.prefix,
            plain=problem.plain,
            tools=problem.tools,
        )
        return bridge.after(episode.last_token)

    def add_scores(self, row: int, step: Step) -> None:
        """Adds the reward of a turn, and the environment's metrics."""
        episode = self.episodes[row]
        episode.said = heard(episode.said, step)
        episode.scores["return"] += step.reward
        episode.scores.update(step.info)
        if len(episode.turn_rewards) < len(episode.replies):
            episode.turn_rewards.append(step.reward)
        else:  # the last reward of a truncated episode
            episode.turn_rewards[-1] += step.reward

    def finish(self) -> GradedReplies:
        """Requests the last rewards of truncated episodes; returns all rewards, None for failures, and their counts."""
        truncated = set(self.unasked)
        for row, outcome in self.ask(truncated, len(truncated)).items():
            if isinstance(outcome, Failure):
                self.failures[row] = outcome
            else:
                self.add_scores(row, outcome)
        played = zip(self.task_ids, self.problems, self.episodes, strict=True)
        jobs = [(task, problem.messages + episode.conversation()) for task, problem, episode in played]
        least = {"return": 0.0, "correct_answer": 0.0}
        rewards = [least | {"turns": float(len(episode.replies))} | episode.scores for episode in self.episodes]
        outcomes = [self.failures.get(row, scores) for row, scores in enumerate(rewards)]
        return self.stream.scorer.check_failures(jobs, outcomes)

    def records(self, completions: Completions) -> dict[str, Any]:
        """Returns fields of Episodes: rows, problem, last reply, end, messages, rewards of turns if none failed."""
        rewards = [[] if row in self.failures else episode.turn_rewards for row, episode in enumerate(self.episodes)]
        return {
            "completions": completions,
            "rollout": np.arange(len(self.episodes)),
            "texts": [episode.replies[-1].text for episode in self.episodes],
            "problems": self.problems,
            "stops": [episode.stop for episode in self.episodes],
            "conversations": [episode.conversation() for episode in self.episodes],
            "turn_rewards": rewards,
        }


def seed_of(key: UInt32[np.ndarray, "2"]) -> int:
    """Returns a key as one number."""
    high, low = key.tolist()
    return high << 32 | low
