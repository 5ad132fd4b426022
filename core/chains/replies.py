"""Replies of a rollout: the texts of completions, graded in the background while others are sampled.

Replies of several turns: `Conversations` in core/chains/turns.py. B rows, N problems, A completion columns.
"""

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from core.records import Completions
from core.sampler import Sampler, Segment
from envs.base import Env, Problem, Text
from envs.scoring.scorer import GradedReplies, ScoringStream
from envs.scoring.worker import Rewards
from models.names import Weights
from models.tokenizer import Tokenizer
from utils.devices.sharding import Layout
from utils.metrics.terminal import Wait, waiting


class Replies:
    """Single replies, graded as they end: each process grades its share. Rows of a problem are adjacent."""

    def __init__(
        self,
        env: Env,
        tokenizer: Tokenizer,
        layout: Layout,
        problems: Sequence[Problem],
        task_ids: Int[np.ndarray, "N"],
        keys: UInt32[np.ndarray, "B 2"],
        stream: ScoringStream,
    ):
        self.env, self.tokenizer, self.layout, self.stream, self.keys = env, tokenizer, layout, stream, keys
        self.num_samples = len(keys) // len(problems)
        self.problems = [problem for problem in problems for _ in range(self.num_samples)]  # one for each row
        self.task_ids = np.repeat(task_ids, self.num_samples).tolist()
        self.own_rows = layout.process_share(len(keys), self.num_samples)
        self.texts: dict[int, str] = {}  # by row
        self.lock, self.wait = Lock(), Wait("")  # a sampler may call from several threads

    def prompts(self) -> list[tuple[int, Problem]]:
        """Returns task number and problem of each prompt: single replies have one prompt a group."""
        firsts = range(0, len(self.problems), self.num_samples)
        return [(self.task_ids[row], self.problems[row]) for row in firsts]

    def sample(
        self,
        sampler: Sampler,
        weights: Weights,
        prompts: Sequence[list[int]],
        keys: UInt32[np.ndarray, "B 2"],
        wait: Wait,
    ) -> Completions:
        """Samples the rows that begin with these prompts; takes replies as they end."""
        self.wait = wait
        return self.listening(sampler).draw(weights, prompts, keys)

    def listening(self, sampler: Sampler) -> Sampler:
        """Returns a sampler that calls this object's functions."""
        return replace(sampler, on_segment=self.on_segment)

    def on_segment(self, segment: Segment) -> None:
        """Takes the rows that have ended since the last segment, and queues this process's rows for the graders."""
        with self.lock:
            self.wait.count_rows(segment.first_row, segment.num_sampled, segment.lengths)
            jobs = {}
            for i in np.flatnonzero(segment.lengths <= segment.num_sampled).tolist():
                row, tokens = segment.first_row + i, segment.tokens[i, : segment.lengths[i]]
                if row not in self.texts:
                    self.texts[row] = self.text_of(row, tokens)
                    if row in self.own_rows:
                        jobs[row] = self.task_ids[row], self.texts[row]
            self.stream.add(jobs)

    def text_of(self, row: int, tokens: Int[np.ndarray, "A"]) -> str:
        """Returns the text of a reply, with the prefix of its prompt."""
        text = self.problems[row].prefix + self.tokenizer.decode(tokens)
        return Text.of(text, tokens) if self.env.takes_ids else text

    def finish(self) -> GradedReplies:
        """Waits for all processes; returns rewards by row, None if the grader failed, and counts of failures."""
        layout, failures = self.layout, {}

        def own_rewards(rows: range) -> list[Rewards | None]:
            graded = self.stream.finish()
            jobs = [graded[row][0] for row in rows]
            outcomes = [graded[row][1] for row in rows]
            rewards, counts = self.stream.scorer.check_failures(jobs, outcomes)
            failures.update(counts)
            return rewards

        with waiting(f"grading {len(self.problems):,} replies"):
            rewards = layout.share(own_rewards, len(self.problems), self.num_samples)
        return rewards, {kind: sum(layout.gather_values(count)) for kind, count in failures.items()}

    def records(self, completions: Completions) -> dict[str, Any]:
        """Returns the fields of Episodes that replies fill; `completions`: the first row of each rollout."""
        rollouts = np.arange(len(self.problems))
        return {
            "completions": completions,
            "rollout": rollouts,
            "texts": [self.texts[rollout] for rollout in rollouts.tolist()],
            "problems": self.problems,
        }
