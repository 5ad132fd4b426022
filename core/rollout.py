"""Rolls out a policy in an environment: prompts, completions, rewards; replies are scored while others are drawn.

N tasks, G samples of each, B = N G rows, A completion columns.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
from jaxtyping import Int, UInt32

from core.extensions.forced import reply_opening, with_forced_answer
from core.extensions.speculation import with_speculation
from core.extensions.turns import Conversations, answering_calls, check_conversations
from core.records import Completions, Episodes
from core.sampler import Sampler, SamplingConfig, make_sampler, sample_keys
from envs.base import DIALECTS, Env, Problem, Text
from envs.prompts import find_tasks
from envs.scoring.scorer import Scorer, ScoringStream
from envs.scoring.shaping import RewardConfig, add_length_reward, add_truncation_penalty
from envs.scoring.trial import try_rewards
from envs.settings import RolloutSettings
from models.architecture import Decoder
from models.memory import out_of_memory, rows_that_fit
from models.names import Key, Policy, Weights
from models.tokenizer import Tokenizer
from utils.batching import bucket, concatenate
from utils.devices.sharding import Layout
from utils.metrics.terminal import Wait, waiting
from utils.settings.errors import UserError

Rewards = dict[str, float]  # of a reply, "return" and its parts


@dataclass(frozen=True)
class RolloutWorker:
    """Plays the tasks of an environment with the weights it is given, and scores the replies."""

    env: Env
    name: str  # of the environment
    tokenizer: Tokenizer
    sampler: Sampler
    scorer: Scorer
    layout: Layout
    rows_per_call: int  # completions that are sampled at once; 0: all, or as `with_room` says
    fitting_ids: Int[np.ndarray, "N"] | None = None  # problems whose prompts are short enough; None: all

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.scorer.close()

    @property
    def num_tasks(self) -> int:
        return self.env.num_tasks if self.fitting_ids is None else len(self.fitting_ids)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes printed at the start."""
        notes, problem = [], self.env.problem(0)
        if not (self.tokenizer.has_template or problem.plain):
            notes.append("the model has no chat template: messages are joined by newlines, as with plain=true")
        if spelled := self.tokenizer.spelled(problem.messages):
            notes.append(f"prompts spell {spelled}, which stays text: only the chat template writes special tokens")
        return tuple(f"{self.name}: {note}" for note in notes)

    @property
    def max_new_tokens(self) -> int:
        return self.sampler.max_new_tokens

    def with_room(self, num_bytes: int) -> Self:
        """Returns a worker that samples as many rows at once as fit in memory, unless the settings give a number."""
        if self.rows_per_call:
            return self
        sampler = self.sampler
        row_length = bucket(sampler.max_prompt_tokens + sampler.max_new_tokens)
        num_rows = rows_that_fit(num_bytes, sampler.model, self.layout, row_length)
        return replace(self, rows_per_call=num_rows * self.layout.row_shards)

    def load_weights(self, params: Policy) -> Weights:
        """Returns the weights that `play` samples from: cast and laid out for decoding, once for many calls."""
        return self.sampler.load_weights(params)

    def encode(self, problem: Problem) -> list[int]:
        """Returns the prompt of a problem, token ids."""
        return encode_prompt(self.tokenizer, problem)

    def prompts_per_call(self, num_prompts: int, num_samples: int) -> int:
        """Returns how many of the prompts are sampled from at once, in calls of about the same size."""
        if not self.rows_per_call or not num_prompts:
            return max(1, num_prompts)
        most = max(1, self.rows_per_call // num_samples)
        num_calls = -(-num_prompts // most)
        return -(-num_prompts // num_calls)

    def num_eval_tasks(self, num_tasks: int) -> int:
        """Returns the problems of an evaluation of `num_tasks`; 0: all, -1: as many as the environment suggests."""
        suggested = self.env.num_eval_tasks if num_tasks < 0 else num_tasks
        return min(suggested or self.num_tasks, self.num_tasks)

    def play(
        self,
        weights: Weights,
        tasks: Int[np.ndarray, "N"],
        num_samples: int,
        key: Key,
        places: Int[np.ndarray, "N"] | None = None,
    ) -> Episodes:
        """Samples `num_samples` completions of each task and scores them; results do not depend on `rows_per_call`.

        `tasks` are indices into the problems whose prompts fit. A row's key is made from `key`, its sample, and its
        task's number in the environment, or its place in the run where `places` are given.
        """
        clock = time.perf_counter()
        task_ids = tasks if self.fitting_ids is None else self.fitting_ids[tasks]
        places = task_ids if places is None else places
        problems = [self.env.problem(int(i)) for i in task_ids]
        prompts = self.encode_prompts(task_ids, problems)
        with ScoringStream(self.scorer) as stream:
            keys = sample_keys(key, places, num_samples)
            replies = self.make_replies(problems, task_ids, num_samples, stream, keys)
            with waiting("sampling", len(tasks) * num_samples, "rows") as wait:
                completions = self.sample(weights, prompts, keys, replies, wait)
            sampled = time.perf_counter()
            rewards, failures = replies.finish()
        failed = np.array([reward is None for reward in rewards])
        scores = collect_scores(rewards)
        if self.env.truncation_penalty:
            is_truncated = ~completions.finished & ~failed
            scores = add_truncation_penalty(scores, is_truncated, self.env.truncation_penalty)
        times = {"rollout": sampled - clock, "score": time.perf_counter() - sampled}
        row_tasks = np.repeat(task_ids, num_samples)
        facts = row_tasks, replies.texts(), scores, failed, failures, times
        return Episodes(completions, *facts, *replies.records(), places=np.repeat(places, num_samples))

    def make_replies(
        self,
        problems: Sequence[Problem],
        task_ids: Int[np.ndarray, "N"],
        num_samples: int,
        stream: ScoringStream,
        keys: UInt32[np.ndarray, "B 2"],
    ) -> "Replies | Conversations":
        """Returns the collector of a rollout's replies; the seed of an episode is the key of its draws."""
        if self.env.max_turns == 1:
            return Replies(self, problems, task_ids, num_samples, stream)
        return self.converse(problems, task_ids, stream, keys, keys[::num_samples])

    def converse(
        self,
        problems: Sequence[Problem],
        task_ids: Int[np.ndarray, "N"],
        stream: ScoringStream,
        keys: UInt32[np.ndarray, "B 2"],
        games: UInt32[np.ndarray, "N 2"],
    ) -> Conversations:
        """Returns episodes seeded by these keys; `games` seed what a group shares, whose rows are adjacent."""
        seeds, games = ([int(high) << 32 | int(low) for high, low in pairs] for pairs in (keys, games))
        return Conversations(self.env, self.tokenizer, self.layout, problems, task_ids, seeds, stream, games)

    def open(self, replies: Conversations, rows: range, num_samples: int) -> list[list[int]]:
        """Returns the prompts with what episodes say first: one for a group, or for each row where those differ."""
        problems = replies.open(rows)
        prompts = self.encode_prompts(replies.task_ids[rows.start : rows.stop], problems)
        shared = [prompt for prompt in prompts[::num_samples] for _ in range(num_samples)]
        return prompts[::num_samples] if prompts == shared else prompts

    def encode_prompts(self, task_ids: Sequence[int], problems: Sequence[Problem]) -> list[list[int]]:
        """Returns the prompts of problems with these numbers. Raises: UserError where one is too long."""
        limit = self.sampler.max_prompt_tokens
        prompts = [self.encode(problem) for problem in problems]
        for i, prompt in zip(task_ids, prompts, strict=True):
            if len(prompt) > limit:
                raise UserError(
                    f"the prompt of problem {i} of {self.name} has {len(prompt)} tokens, more than --prompt_length "
                    f"{limit}: raise it (and give --resume force where a run is to go on)"
                )
        return prompts

    def sample(
        self,
        weights: Weights,
        prompts: Sequence[list[int]],
        keys: UInt32[np.ndarray, "B 2"],
        replies: "Replies | Conversations",
        wait: Wait,
    ) -> Completions:
        """Draws a completion for each key, `rows_per_call` at a time."""
        num_samples = len(keys) // len(prompts)
        per_call = self.prompts_per_call(len(prompts), num_samples)
        parts = []
        for start in range(0, len(prompts), per_call):
            sampler = replies.listen(self.sampler, start * num_samples, wait)
            called = prompts[start : start + per_call]
            rows = range(start * num_samples, (start + len(called)) * num_samples)
            if self.env.opens:
                called = self.open(replies, rows, num_samples)
            with out_of_memory("inference_batch_per_device", self.rows_per_call // self.layout.row_shards):
                parts.append(sampler.draw(weights, called, keys[rows.start : rows.stop]))
        return concatenate(parts)


class Replies:
    """Texts of completions, taken as they end; this process's share of them is scored in the background."""

    def __init__(
        self,
        worker: RolloutWorker,
        problems: Sequence[Problem],
        task_ids: Int[np.ndarray, "N"],
        num_samples: int,
        stream: ScoringStream,
    ):
        self.worker, self.problems, self.task_ids = worker, problems, task_ids
        self.num_samples, self.stream = num_samples, stream
        self.num_rows = len(problems) * num_samples
        self.own_rows = worker.layout.process_share(self.num_rows)
        self.texts_by_row: dict[int, str] = {}
        self.lock = Lock()  # the chains of a sampler call from threads

    def listen(self, sampler: Sampler, first_row: int, wait: Wait) -> Sampler:
        """Returns a sampler that calls this object; `first_row`: number of the first row of its next call."""
        return replace(sampler, on_segment=partial(self.on_segment, wait, first_row))

    def on_segment(
        self,
        wait: Wait,
        call_offset: int,
        row_offset: int,
        tokens: Int[np.ndarray, "B A"],
        num_drawn: int,
        lengths: Int[np.ndarray, "B"],
    ) -> None:
        """Takes the rows of a call that have ended since the last segment."""
        offset = call_offset + row_offset
        with self.lock:
            wait.on_segment(call_offset, row_offset, tokens, num_drawn, lengths)
            ended = np.flatnonzero(lengths <= num_drawn).tolist()
            new = [b for b in ended if offset + b not in self.texts_by_row]
            jobs = {}
            for b in new:
                row = offset + b
                problem = row // self.num_samples
                completion = self.worker.tokenizer.decode(tokens[b, : lengths[b]])
                text = self.problems[problem].prefix + completion
                self.texts_by_row[row] = Text.of(text, tokens[b, : lengths[b]]) if self.worker.env.takes_ids else text
                if row in self.own_rows:
                    jobs[row] = (int(self.task_ids[problem]), self.texts_by_row[row])
            self.stream.add(jobs)

    def finish(self) -> tuple[list[Rewards | None], dict[str, int]]:
        """Waits for the scores of all processes; returns them by row, None where one failed, and counts of failures."""
        layout, failures = self.worker.layout, {}

        def own_rewards(rows: range) -> list[Rewards | None]:
            scored = self.stream.finish()
            jobs = [scored[row][0] for row in rows]
            outcomes = [scored[row][1] for row in rows]
            rewards, counts = self.worker.scorer.check_failures(jobs, outcomes)
            failures.update(counts)
            return rewards

        with waiting(f"scoring {self.num_rows:,} replies"):
            rewards = layout.share(own_rewards, self.num_rows)
        return rewards, {kind: layout.sum_over_processes(count) for kind, count in failures.items()}

    def records(self) -> tuple[()]:
        """Returns nothing: single replies have no conversation."""
        return ()

    def texts(self) -> list[str]:
        return [self.texts_by_row[row] for row in range(self.num_rows)]


def collect_scores(rewards: Sequence[Mapping[str, float] | None]) -> dict[str, np.ndarray]:
    """Returns arrays [B] of each part of the rewards, 0 where a row has none."""
    names = {"return", "correct_answer"}.union(*(reward or {} for reward in rewards))
    scores = {}
    for name in sorted(names):
        values = [(reward or {}).get(name, 0.0) for reward in rewards]
        scores[name] = np.array(values, np.float32)
    return scores


def with_length_reward(episodes: Episodes, limit: int, config: RewardConfig) -> Episodes:
    """Returns the episodes with --length_reward in their scores, 0 where the reward failed.

    `limit`: most tokens of a completion, or of an episode with what was said in it; one that it cut off counts as full.
    """
    completions = episodes.completions
    lengths = np.where(completions.finished, completions.lengths - completions.prompt_lengths, limit)
    scores = add_length_reward(episodes.scores, lengths, limit, config)
    scores = {name: np.where(episodes.failed, np.float32(0), x) for name, x in scores.items()}
    return replace(episodes, scores=scores)


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Returns the prompt of a problem, token ids."""
    return tokenizer.chat(problem.messages, problem.thinking, problem.prefix, problem.plain, problem.tools)


def make_worker(
    settings: RolloutSettings,
    sampling: SamplingConfig,
    rewards: RewardConfig,
    model: Decoder,
    tokenizer: Tokenizer,
    layout: Layout,
    failures_dir: str | Path = "",
) -> RolloutWorker:
    """Returns a worker for an environment; replies whose scoring failed are written to `failures_dir`, if any.

    Raises: UserError when no prompt is short enough.
    """
    env = settings.env
    prompt = tokenizer.decode(encode_prompt(tokenizer, env.problem(0)))
    answer = replace(settings.forced_answer, opening=reply_opening(env.problem(0), prompt))
    sampler = make_sampler(sampling, model, tokenizer, layout, settings.max_new_tokens)
    sampler = with_forced_answer(sampler, settings.force_answer_at, answer)
    sampler = with_speculation(sampler, sampling.num_speculative_tokens)
    if env.dialect:
        sampler = answering_calls(sampler, DIALECTS[env.dialect], tokenizer, env.problem(0))
    if env.max_turns > 1:
        check_conversations(settings, model, tokenizer, sampler.stop_strings, sampling.num_speculative_tokens)
    tasks, dropped = find_tasks(settings.name, env, partial(encode_prompt, tokenizer), sampling.prompt_length)
    scorer = Scorer(
        settings.name,
        settings.options,
        num_workers=rewards.num_score_workers,
        timeout=rewards.score_timeout,
        failures_dir=failures_dir,
    )
    warning = try_rewards(scorer, env)
    for line in (dropped, warning and f"warning: {settings.name}: {warning}"):
        if line and layout.is_main:
            print(line)
    rows_per_call = sampling.inference_batch_per_device * layout.row_shards
    return RolloutWorker(env, settings.name, tokenizer, sampler, scorer, layout, rows_per_call, tasks)
