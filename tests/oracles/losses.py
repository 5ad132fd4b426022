"""Policy losses in float64, one token after the other, written from the papers' formulas."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64

from core.records import Batch
from tests.oracles.advantages import Options, mean, tokens_of

LIMIT = 16  # num_generation_tokens
ROLLOUTS = 16  # of a full optimizer batch

Tokens = Float[np.ndarray, "B T"]


class Token(NamedTuple):
    """The advantage of a token, and its log-probabilities."""

    advantage: float
    new: float
    frozen: float  # new as seen through stop_gradient: it stays if new is moved
    old: float
    sampled: float

    @property
    def ratio(self) -> float:
        return math.exp(self.new - self.old)

    @property
    def frozen_ratio(self) -> float:
        return math.exp(self.frozen - self.old)


Row = Sequence[Token]


def clip_range(config: Options) -> tuple[float, float]:
    high = config.clip_epsilon if config.clip_epsilon_high < 0 else config.clip_epsilon_high
    return 1 - config.clip_epsilon, 1 + high


def clip(x: float, config: Options) -> float:
    low, high = clip_range(config)
    return min(max(x, low), high)


def ppo(x: Token, row: Row, config: Options) -> float:
    loss = max(-x.ratio * x.advantage, -clip(x.ratio, config) * x.advantage)
    if config.dual_clip and x.advantage < 0:
        return min(loss, -config.dual_clip * x.advantage)
    return loss


def ppo_all_clip(x: Token, row: Row, config: Options) -> float:
    return -clip(x.ratio, config) * x.advantage


def reinforce(x: Token, row: Row, config: Options) -> float:
    return -x.advantage * x.new


def cispo(x: Token, row: Row, config: Options) -> float:
    return -clip(x.frozen_ratio, config) * x.advantage * x.new


def gspo(x: Token, row: Row, config: Options) -> float:
    ratio_of_row = math.exp(mean([y.frozen - y.old for y in row]))
    s = ratio_of_row * math.exp(x.new) / math.exp(x.frozen)
    return max(-s * x.advantage, -clip(s, config) * x.advantage)


def dppo(x: Token, row: Row, config: Options) -> float:
    low, high = clip_range(config)
    moved = math.exp(x.frozen) - math.exp(x.sampled)
    is_inside = moved <= high - 1 if x.advantage > 0 else moved >= low - 1
    return -math.exp(x.new - x.sampled) * x.advantage if is_inside else 0.0


def sapo(x: Token, row: Row, config: Options) -> float:
    tau = 1.0 if x.advantage > 0 else 1.05
    return -(4 / tau) * x.advantage / (1 + math.exp(-tau * (x.ratio - 1)))


POLICY: dict[str, Callable[[Token, Row, Options], float]] = {
    "ppo": ppo,
    "ppo_all_clip": ppo_all_clip,
    "reinforce": reinforce,
    "cispo": cispo,
    "gspo": gspo,
    "dppo": dppo,
    "sapo": sapo,
}


def importance(x: Token, row: Row, config: Options) -> float:
    """w = p_old / p_sample of a token or of its completion, cut at the cap, or 0 outside floor and cap."""
    some = [x] if config.importance_level == "token" else row
    w = math.exp(math.fsum(y.old - y.sampled for y in some))
    if config.importance_correction == "none":
        return 1.0
    if config.importance_correction == "truncate":
        return min(w, config.importance_cap)
    return w if config.importance_floor <= w <= config.importance_cap else 0.0


def is_masked(x: Token, row: Row, config: Options) -> bool:
    """Returns whether a mask leaves the policy loss of a token out."""
    if config.do_mask_importance_ratio and x.frozen_ratio > 2:
        return True
    if config.do_mask_inference_ratio and math.exp(x.sampled - x.old) >= 2:
        return True
    drift = mean([y.sampled - y.frozen for y in row])
    return bool(config.off_policy_mask) and x.advantage < 0 and drift > config.off_policy_mask


def oracle_policy(
    new: Tokens, frozen: Tokens, a: Tokens, batch: Batch, config: Options
) -> Float64[np.ndarray, "B T"]:
    """Returns the policy loss of each token. `frozen` is `new` as seen through stop_gradient."""
    out = np.zeros(batch.mask.shape)
    arrays = (a, new, frozen, batch.old_logprobs, batch.sample_logprobs)
    for i in range(len(out)):
        columns = tokens_of(batch, i)
        row = [Token(*(float(array[i, t]) for array in arrays)) for t in columns]
        for t, x in zip(columns, row, strict=True):
            loss = POLICY[config.objective](x, row, config) * importance(x, row, config)
            out[i, t] = 0.0 if is_masked(x, row, config) else loss
    return out


def divergence(x: float, config: Options) -> float:
    """Returns the estimate of the KL from x = log p - log p_ref."""
    return math.exp(-x) + x - 1


def oracle_loss(
    new: Tokens, frozen: Tokens, entropy: Tokens, a: Tokens, batch: Batch, config: Options
) -> Float64[np.ndarray, "B T"]:
    """Returns what each token adds to the loss of a whole optimizer batch."""
    num_tokens = int(batch.mask.sum())
    out = oracle_policy(new, frozen, a, batch, config)
    for i, t in np.argwhere(batch.mask):
        if config.kl_coef and config.kl_in == "loss":
            x = float(new[i, t]) - float(batch.ref_logprobs[i, t])
            out[i, t] += config.kl_coef * divergence(x, config)
        out[i, t] /= {
            "token_mean": num_tokens,
            "sequence_mean": len(new) * int(batch.mask[i].sum()),
            "constant": ROLLOUTS * LIMIT,
        }[config.loss_normalization]
        out[i, t] -= config.entropy_coef * float(entropy[i, t]) / num_tokens
    return out


def slopes(oracle: Callable[..., Tokens], new: Tokens, *rest: object) -> Float64[np.ndarray, "B T"]:
    """Returns central differences of each token's own loss.

    No other token's loss depends on its log-probability, except through stop_gradient.
    """
    new = np.float64(new)
    return (oracle(new + 1e-4, new, *rest) - oracle(new - 1e-4, new, *rest)) / 2e-4
