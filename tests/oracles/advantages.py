"""Advantages in float64, one row after the other, written from the papers' formulas."""

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import numpy as np
from jaxtyping import Float64

from core.records import Batch
from utils.settings.config import to_dict

NOT_RELATIVE = ("none", "reinforce", "batch_zscore", "gae")  # the others compare the rollouts of a group
TINY = 1e-6  # rewards that differ by less are equal

Table = list[list[float]]  # by row and column
Options = SimpleNamespace  # of an objective, by flat names


def flat(config: object) -> Options:
    """Returns all options of an objective, those of its groups included."""
    return Options(**to_dict(config))


def mean(x: Sequence[float]) -> float:
    return math.fsum(x) / len(x)


def deviation(x: Sequence[float]) -> float:
    mu = mean(x)
    return math.sqrt(mean([(v - mu) ** 2 for v in x]))


def standardized(table: Table, over: Sequence[float]) -> Table:
    """Returns each number less the mean of those in `over`, divided by their deviation unless that is 0."""
    mu = mean(over)
    sigma = deviation(over) or 1.0
    return [[(x - mu) / sigma for x in row] for row in table]


def tokens_of(batch: Batch, i: int) -> list[int]:
    """Returns the columns of a row that the policy chose."""
    return np.flatnonzero(batch.mask[i]).tolist()


def token_penalties(batch: Batch, config: Options) -> Float64[np.ndarray, "B T"]:
    """Returns what the KL takes off the reward of each token: kl_coef (log p_old - log p_ref)."""
    out = np.zeros(batch.mask.shape)
    if config.kl_in != "reward":
        return out
    for i, t in np.argwhere(batch.mask):
        out[i, t] = config.kl_coef * (float(batch.old_logprobs[i, t]) - float(batch.ref_logprobs[i, t]))
    return out


# Generalized advantages


def reward_of_token(batch: Batch, i: int, t: int) -> float:
    """Returns the reward of the token itself; a single reply earns its reward with its last token."""
    if batch.token_rewards is not None:
        return float(batch.token_rewards[i, t])
    return float(batch.rewards[i]) if t == tokens_of(batch, i)[-1] else 0.0


def gae(batch: Batch, config: Options) -> Float64[np.ndarray, "B T"]:
    """A_t = sum over l of (gamma lambda)^l delta_t+l, with delta_t = r_t + gamma V_t+1 - V_t; not whitened."""
    out = np.zeros(batch.mask.shape)
    penalty = token_penalties(batch, config)
    for i in range(len(out)):
        columns = tokens_of(batch, i)
        values = [float(batch.values[i, t]) for t in columns] + [0.0]
        rewards = [reward_of_token(batch, i, t) - penalty[i, t] for t in columns]
        deltas = [reward + config.gamma * values[n + 1] - values[n] for n, reward in enumerate(rewards)]
        for n, t in enumerate(columns):
            discounted = [(config.gamma * config.gae_lambda) ** m * delta for m, delta in enumerate(deltas[n:])]
            out[i, t] = math.fsum(discounted)
    return out


# Rewards of a group, compared


def less_the_mean(r: float, group: Sequence[float]) -> float:
    return r - mean(group)


def zscore(r: float, group: Sequence[float]) -> float:
    return (r - mean(group)) / deviation(group)


def less_the_others(r: float, group: Sequence[float]) -> float:
    """RLOO: the baseline is the mean of the other rollouts."""
    return r - (math.fsum(group) - r) / (len(group) - 1)


def relative_to_the_mean(r: float, group: Sequence[float]) -> float:
    """MaxRL."""
    mu = mean(group)
    return (r - mu) / mu if mu > 0 else 0.0


RELATIVE: dict[str, Callable[[float, Sequence[float]], float]] = {
    "group_mean": less_the_mean,
    "group_zscore": zscore,
    "rloo": less_the_others,
    "maxrl": relative_to_the_mean,
}


def of_row(config: Options, r: float, group: Sequence[float], rewards: Sequence[float]) -> float:
    """Returns the advantage of a rollout with signal. That of gae is by token."""
    match config.advantage:
        case "none" | "gae":
            return 0.0
        case "reinforce":
            return r
        case "best_k":
            return 1.0
        case "batch_zscore":
            return zscore(r, rewards)
        case "reinforce++_baseline":
            return less_the_mean(r, group)
        case name:
            return RELATIVE[name](r, group)


def group_has_signal(config: Options, group: Sequence[float]) -> bool:
    """Returns whether the rewards differ. best_k without the filter imitates equal ones, too.

    Raw rewards that are all 0 are all that reinforce cannot learn from.
    """
    spread = max(group) - min(group)
    if config.advantage == "best_k" and not config.do_group_filter:
        return True
    if config.advantage == "reinforce" and not config.do_global_normalization and config.kl_in != "reward":
        return max(map(abs, group)) > TINY
    return config.advantage in NOT_RELATIVE or spread > TINY


def is_among_best(config: Options, i: int, group: Sequence[float]) -> bool:
    """Returns whether rollout number i of a group is one of its best_k; the first ones win ties."""
    if config.advantage != "best_k":
        return True
    best = sorted(range(len(group)), key=lambda j: -group[j])[: config.best_k]
    return i in best


# The batch


def is_by_token(config: Options) -> bool:
    """Returns whether tokens of a row have advantages of their own, which are standardized over all tokens."""
    has_reward_to_go = config.advantage == "batch_zscore" and config.kl_in == "reward"
    return config.advantage in ("gae", "reinforce++_baseline") or has_reward_to_go


def oracle_advantages(
    batch: Batch, config: Options
) -> tuple[Float64[np.ndarray, "B T"], list[bool], list[bool]]:
    """Returns the advantage of each token, which rows stay in the batch, and which have a signal."""
    T, G = batch.mask.shape[1], batch.group_size
    owner = batch.rollout.tolist()  # rollout of each row
    rows = [[i for i in range(len(owner)) if owner[i] == e] for e in sorted({*owner})]  # of each rollout
    penalty = token_penalties(batch, config)
    rewards = [float(batch.rewards[own[0]]) - math.fsum(penalty[own].ravel()) for own in rows]
    groups = [rewards[e // G * G : e // G * G + G] for e in range(len(rows))]
    signal = [group_has_signal(config, group) for group in groups]
    keep = [
        stays(batch, config, rows[e], signal[e]) and is_among_best(config, e % G, groups[e]) for e in range(len(rows))
    ]
    table = [[of_row(config, rewards[e], groups[e], rewards) if signal[e] else 0.0] * T for e in range(len(rows))]
    if config.advantage == "reinforce++_baseline":  # also without signal, until it is standardized
        table = [[less_the_mean(r, group)] * T for r, group in zip(rewards, groups, strict=True)]
    table, keep, signal = ([x[e] for e in owner] for x in (table, keep, signal))
    if config.advantage == "gae":
        table = gae(batch, config).tolist()
    if config.advantage == "batch_zscore" and config.kl_in == "reward":
        table = [[float(batch.rewards[i]) - math.fsum(penalty[i, t:]) for t in range(T)] for i in range(len(owner))]
    if is_by_token(config):
        places = [(i, t) for i in range(len(owner)) if keep[i] for t in tokens_of(batch, i)]
    else:
        places = [(own[0], 0) for own in rows if keep[own[0]]]
    if is_by_token(config):
        table = standardized(table, [table[i][t] for i, t in places])
    table = without_signal_zero(table, signal)
    if config.do_global_normalization:
        table = standardized(table, [table[i][t] for i, t in places])
    table = [[weighted(a, config) for a in row] for row in table]
    return np.array(without_signal_zero(table, signal)) * batch.mask, keep, signal


def stays(batch: Batch, config: Options, rows: Sequence[int], has_signal: bool) -> bool:
    """Returns whether the filters of groups and of truncated completions leave a rollout in the batch."""
    if config.do_truncation_filter and not all(batch.finished[i] for i in rows):
        return False
    return has_signal or not config.do_group_filter


def without_signal_zero(table: Table, signal: Iterable[bool]) -> Table:
    return [row if is_on else [0.0] * len(row) for row, is_on in zip(table, signal, strict=True)]


def weighted(a: float, config: Options) -> float:
    """Returns an advantage with --negative_advantage_multiplier applied."""
    return a * config.negative_advantage_multiplier if a < 0 else a
