"""Records that travel through the loop: completions, episodes, batch, progress; sums over a batch. A leaf.

Every [B, T] array speaks of the token in its own column. A rollout has a row, or several: conversations of a program.
E rollouts, B rows of their tokens, N groups, T row length, S ids of a truncated distribution, L layers, k experts of a
token: see the glossary in CONTRIBUTING.md.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from envs.base import Problem
from models.messages import Message
from models.names import Array, Extras
from utils.batching import concatenate
from utils.metrics.jsonl import JSON

# Arrays [B], [B, T] or [B, T, D]: what is put into `episodes.extras` travels as `batch.extras`; it is 1 in padding.
EXTRAS: dict[str, type] = {}  # their types, as {"weight": Float[Array, "B T"]}: known before step 1
TEACHER_COEFFICIENTS = "teacher_coefficients"  # in batch.extras, [B]: of the teacher's term in each row
NO_SIGNAL = 1e-6  # rewards of a group closer than this are equal: rounding alone gives them a deviation above zero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Completions:
    """Prompts with their completions, right-padded; rows of one prompt are adjacent."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]  # tokens that the policy chose: completion with its stop token, without forced tokens
    logprobs: Float[Array, "B T"]  # nats, of sampled tokens under the distribution that was sampled; 0: forced token
    lengths: Int[Array, "B"]  # tokens of prompt and completion
    prompt_lengths: Int[Array, "B"]
    finished: Bool[Array, "B"]  # False: truncated at the limit of tokens
    slot_steps: Float[Array, "B"]  # decode work charged to the row: slots x steps of each segment / its live rows
    num_observed: Int[Array, "B"]  # tokens of observations
    support: Int[Array, "B T S"] | None = None  # ids that could be sampled, padded with -1; None: all
    routes: Int[Array, "B T L k"] | None = None  # experts that computed the sample, from 1 on; 0: not recorded
    num_recomputed: Int[Array, "B"] | None = None  # tokens whose cache was lost and computed again; None: no pages
    extras: Extras = field(default_factory=dict)  # see EXTRAS


@dataclass(frozen=True)
class Episodes:
    """Rollouts of tasks with their completions and rewards; rollouts of one task are adjacent."""

    completions: Completions
    rollout: Int[np.ndarray, "B"]  # number of the rollout that a row belongs to, from 0 on; rows of one are adjacent
    task_ids: Int[np.ndarray, "E"]  # number of the problem in the environment
    texts: list[str]  # graded text: the assistant prefix and the completion; in a conversation, the last reply
    scores: dict[str, Float[np.ndarray, "E"]]  # "return" and its parts; 0 if the reward failed, NaN if there is none
    failed: Bool[np.ndarray, "E"]  # the reward timed out, raised or crashed
    failures: dict[str, int]  # number of failed rewards, by kind, over all processes
    times: dict[str, float]  # seconds
    load: dict[str, float] = field(default_factory=dict)  # use of the cache's pages: sums over segments
    problems: list[Problem] = field(default_factory=list)  # problem of each rollout, as its first prompt shows it
    stops: list[str] = field(default_factory=list)  # why conversations ended: max_tokens if truncated
    conversations: list[list[Message]] = field(default_factory=list)  # after the prompts: turns and observations
    turn_rewards: list[list[float]] = field(default_factory=list)  # reward of each turn of a conversation
    positions: Int[np.ndarray, "E"] = field(default_factory=lambda: np.zeros(0, int))  # numbers of groups in the run
    has_signal: Bool[np.ndarray, "N"] = field(default_factory=lambda: np.ones(0, bool))  # groups that can teach
    metrics: dict[str, float] = field(default_factory=dict)  # extra metrics, which override others of the same name
    memory: dict[str, JSON] = field(default_factory=dict)  # goes into Progress.memory
    batch_rollouts: Int[np.ndarray, "R"] = field(default_factory=lambda: np.zeros(0, int))  # those to learn from

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def extras(self) -> Extras:
        """Extra arrays of the completions; entries may be added."""
        return self.completions.extras

    @property
    def first_rows(self) -> Int[np.ndarray, "E"]:
        """Number of the first row of each rollout."""
        return first_rows(self.rollout)

    @property
    def finished(self) -> Bool[np.ndarray, "E"]:
        """False for a rollout with a row that was truncated at the limit of tokens."""
        return np.logical_and.reduceat(self.completions.finished, self.first_rows)

    @property
    def completion_lengths(self) -> Int[np.ndarray, "E"]:
        """Number of tokens of the policy in each rollout, with forced tokens."""
        completions = self.completions
        lengths = completions.lengths - completions.prompt_lengths - completions.num_observed
        return np.add.reduceat(lengths, self.first_rows)


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """Returns the rollouts of all parts in one record; counts and times are added up."""
    offsets = np.cumsum([0, *map(len, parts[:-1])])
    names = dict.fromkeys(name for part in parts for name in part.scores)
    scores = {}
    for name in names:
        scores[name] = np.concatenate([part.scores.get(name, np.zeros(len(part), np.float32)) for part in parts])
    arrays, lists = {}, {}
    for name in ("task_ids", "failed", "positions", "has_signal"):
        arrays[name] = np.concatenate([getattr(part, name) for part in parts])
    for name in ("texts", "problems", "stops", "conversations", "turn_rewards"):
        lists[name] = [x for part in parts for x in getattr(part, name)]
    return Episodes(
        completions=concatenate([part.completions for part in parts]),
        rollout=np.concatenate([part.rollout + offset for part, offset in zip(parts, offsets, strict=True)]),
        scores=scores,
        failures=add_up([part.failures for part in parts]),
        times=add_up([part.times for part in parts]),
        load=add_up([part.load for part in parts]),
        **arrays,
        **lists,
    )


def add_up(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the sums by name."""
    total = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows to train on; arrays that are None are not computed yet, or not needed by these settings."""

    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]  # tokens that the policy chose and that count in the loss
    sample_logprobs: Float[Array, "B T"]  # nats, under the distribution that was sampled
    rewards: Float[Array, "B"]  # of the row's rollout; NaN: the grader failed
    lengths: Int[Array, "B"]  # tokens of prompt and completion
    prompt_lengths: Int[Array, "B"]
    finished: Bool[Array, "B"] | None = None  # False: truncated at the limit of tokens
    support: Int[Array, "B T S"] | None = None  # ids that could be sampled, padded with -1; None: all
    routes: Int[Array, "B T L k"] | None = None  # experts that computed the sample, from 1 on; 0, None: not recorded
    rollout: Int[Array, "B"] | None = None  # number of the row's rollout in the step's episodes; None: a row each
    token_rewards: Float[Array, "B T"] | None = None  # reward of a turn at its last token; None: single replies
    reward_parts: dict[str, Float[Array, "B"]] = field(default_factory=dict)  # for --advantage gdpo, by name
    old_logprobs: Float[Array, "B T"] | None = None  # None: the step makes a single update, so old = new
    ref_logprobs: Float[Array, "B T"] | None = None  # nats, under the reference model
    values: Float[Array, "B T"] | None = None  # the critic's, for the state in which the token was chosen
    advantages: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None  # targets of the critic
    entropies: Float[Array, "B T"] | None = None  # nats, of the old policy; logged, read by no loss
    denominator: Float[Array, "B"] | None = None  # divides the loss of a row: see set_loss_denominators
    num_tokens: Float[Array, "B"] | None = None  # unmasked tokens of the whole optimizer batch
    extras: Extras = field(default_factory=dict)  # see EXTRAS; advantages, losses and Distribution.outputs read them
    # Rollouts of a group, which are adjacent until compute_advantages drops rows: a loss must not reshape by it.
    group_size: int = field(default=1, metadata={"static": True})

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def first_rows(self) -> Int[np.ndarray, "E"]:
        """Number of the first row of each rollout."""
        return np.arange(len(self)) if self.rollout is None else first_rows(self.rollout)

    def of_rows(self, x: Shaped[np.ndarray, "E ..."]) -> Shaped[np.ndarray, "B ..."]:
        """Returns the values of rollouts for each of their rows."""
        return np.repeat(x, np.diff(self.first_rows, append=len(self)), axis=0)


def first_rows(rollout: Int[np.ndarray, "B"]) -> Int[np.ndarray, "E"]:
    """Returns the first of the adjacent rows of each rollout."""
    return np.flatnonzero(np.diff(rollout, prepend=-1))


def zero_outside_mask(x: Float[Array, "B T"] | Bool[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    """Returns x with 0 for masked tokens, whose numbers could overflow in exp."""
    return jnp.where(batch.mask, x, 0.0)


def sum_over_rows(
    x: Float[Array, "B T"] | Bool[Array, "B T"], batch: Batch, denominator: Float[Array, "B"]
) -> Float[Array, ""]:
    """Sum over unmasked tokens, each row divided by its denominator."""
    return (zero_outside_mask(x, batch).sum(axis=1) / denominator).sum()


def token_mean(x: Float[Array, "B T"] | Bool[Array, "B T"], batch: Batch) -> Float[Array, ""]:
    """Share of this micro-batch in the mean over the tokens of the optimizer batch."""
    return sum_over_rows(x, batch, batch.num_tokens)


def row_mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Mean over those tokens of each row whose mask is True; 0 for a row without such tokens."""
    num_tokens = mask.sum(axis=1, keepdims=True)
    return x.sum(axis=1, keepdims=True, where=mask) / jnp.maximum(num_tokens, 1)


def differs(rewards: Float[np.ndarray, "*R G"]) -> Bool[np.ndarray, "*R"]:
    """True for groups whose rewards are not all equal; NaN (the grader failed) is ignored."""
    is_graded = ~np.isnan(rewards)
    highest = rewards.max(axis=-1, where=is_graded, initial=-np.inf)
    lowest = rewards.min(axis=-1, where=is_graded, initial=np.inf)
    return highest - lowest > NO_SIGNAL


def graded_mean(x: Float[np.ndarray, "N G"]) -> Float[np.ndarray, "N 1"]:
    """Mean over the numbers of each group that are not NaN; 0 if all are NaN (np.nanmean would warn)."""
    is_graded = ~np.isnan(x)
    num_graded = np.float32(is_graded.sum(axis=1, keepdims=True))
    total = np.where(is_graded, x, 0).sum(axis=1, keepdims=True)
    return total / np.maximum(num_graded, 1)


def masked_whiten(x: Float[np.ndarray, "R C"], where: Bool[np.ndarray, "R D"]) -> Float[np.ndarray, "R E"]:
    """Returns (x - mean) / std, with mean and std over `where`; 0 if all numbers there are equal."""
    x, where = np.broadcast_arrays(x, where)
    if not where.any():
        return np.zeros_like(x)
    counted = x[where]
    if np.ptp(counted) <= NO_SIGNAL:
        return np.zeros_like(x)
    return (x - counted.mean()) / np.maximum(counted.std(), NO_SIGNAL / 2)


@dataclass(frozen=True)
class Progress:
    """Position from which a resumed run continues."""

    step: int = 0
    cursor: int = 0  # number of the next problem, counted over all epochs
    num_rollouts: int = 0  # completions sampled so far
    best: float | None = None  # best held-out return so far
    memory: dict[str, JSON] = field(default_factory=dict)  # numbers and text kept across steps; saved as JSON

    def after_step(self, cursor: int, num_rollouts: int, memory: dict[str, JSON] | None = None) -> Self:
        num_rollouts += self.num_rollouts
        memory = self.memory | (memory or {})
        return replace(self, step=self.step + 1, cursor=cursor, num_rollouts=num_rollouts, memory=memory)
