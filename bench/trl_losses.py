"""Compares TRL's losses and advantages with ours, on the same log-probs: values, gradients, differences of definition.

    pip install trl torch
    python bench/trl_losses.py

TRL's trainers are made as its users make them, for models/tiny, and given our completions, rewards and log-probs;
advantages, masks, denominators and losses are TRL's own code. Exit status 1: something that should agree does not.
Letters: N prompts, G rollouts of each, B = N G rows, T tokens of the longest completion.
"""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TRL_EXPERIMENTAL_SILENCE="1")

import jax
import jax.numpy as jnp
import numpy as np
import transformers

from core.advantages import ObjectiveConfig, compute_advantages
from core.objectives import policy_loss, set_loss_denominators
from core.records import Batch
from models.distribution import TokenOutputs
from utils.settings.config import make_config

try:
    import datasets
    import torch
    import trl
except ImportError:
    torch = trl = None  # `main` says what to install

objective_of = partial(make_config, ObjectiveConfig)  # settings of flat options
MODEL = Path(__file__).resolve().parent.parent / "models/tiny"
N, G, LIMIT = 4, 6, 24  # LIMIT: completion tokens
B = N * G
SEEDS, BETA, TOLERANCE = range(4), 0.04, 1e-5  # BETA: weight of the KL
ABSENT = -np.inf  # marks values that are not compared
SHARED = {"entropy_coef": 0.0}  # settings of ours
SEQUENCES = {"loss_normalization": "sequence_mean"}
WIDE = {"clip_epsilon": 0.2, "clip_epsilon_high": 0.5}  # some completions within, some out on either side
LUSPO = {"objective": "gspo", "loss_normalization": "constant"}
UP_TO_5 = {"clip_epsilon": 1.0, "clip_epsilon_high": 4.0}
PARTS = {"right": 1.0, "form": 0.5, "length": -0.25}  # of the reward, with their weights
THEIR_GDPO = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [*PARTS.values()]}
OUR_GDPO = {"advantage": "gdpo", "reward_parts": ",".join(f"{name}={weight}" for name, weight in PARTS.items())}
THEIR_GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.2, "epsilon_high": 0.5}
LOSSES = {  # method: settings of TRL, and ours
    "GRPO": ({"loss_type": "grpo"}, SEQUENCES),
    "GRPO, dual clip": ({"loss_type": "grpo", "delta": 3.0}, {"dual_clip": 3.0} | SEQUENCES),
    "GRPO, OPSM": ({"loss_type": "grpo", "off_policy_mask_threshold": 0.05}, {"off_policy_mask": 0.05} | SEQUENCES),
    "Dr. GRPO": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"loss_normalization": "constant"}),
    "DAPO": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_epsilon_high": 0.28}),
    "GSPO": ({"loss_type": "grpo"} | THEIR_GSPO, {"objective": "gspo"} | SEQUENCES | WIDE),
    "GSPO, token mean": ({"loss_type": "dapo"} | THEIR_GSPO, {"objective": "gspo"} | WIDE),
    "LUSPO": ({"loss_type": "luspo"} | THEIR_GSPO, LUSPO | WIDE | {"scale": LIMIT}),  # TRL sums over a completion
    "CISPO": ({"loss_type": "cispo", "epsilon_high": 5.0}, {"objective": "cispo"} | UP_TO_5),
    "SAPO": ({"loss_type": "sapo"}, {"objective": "sapo"} | SEQUENCES),
}


DIFFERENCES = """\
z-score: TRL divides by std' + 1e-4, std' over G - 1 (normalize_advantages of RLOO: B - 1); ours by std, over G (B).
GDPO: TRL divides by deviations over G - 1 and B - 1, each + 1e-4; ours by those over G and over the rows that stay.
equal rewards: TRL keeps such groups, rounding errors / 1e-4 included; ours are 0, and dropped by default: the means
  are then over the rest (TRL's times the shares of rows or tokens), while "constant" stays TRL's "dr_grpo".
scale_rewards="batch": TRL divides r - mean of the group by the std of all rewards; ours has no such estimator.
truncated completions: TRL masks them and counts their rows; do_truncation_filter drops the rows ("constant" as above).
default aggregation: "dapo" is TRL's, token_mean ours: the same. "bnpo" is the token mean of a micro-batch; not in ours.
"dapo", "cispo": TRL's denominator is the generation batch's mean over optimizer steps; ours the optimizer batch's own.
CISPO: TRL caps the ratio at epsilon_high, with no lower bound; ours at 1 + clip_epsilon_high, from 1 - clip_epsilon.
delta: TRL caps the ratio, dual_clip the loss where A < 0: the same above 1 + epsilon_high. Below, TRL caps A > 0 too.
GSPO: TRL has one ratio a completion, ours its value for each token (GSPO-token): the same for one A a completion.
KL in the loss: TRL multiplies k3 by the ratio by default (use_bias_correction_kl; off here); ours never does.
RLOO: TRL clips the completion's product of ratios, a mean over rows; ours those of tokens: the same for one token.
RLOO at ratio 1: TRL's gradient is our reinforce + constant, times the limit; the value is -A, ours -A log p.
RLOO's KL: both take k1 off the reward; 0.05 by default in TRL, 0 in ours.
entropy bonus: 0 by default in TRL, 0.001 in ours; a mean over the micro-batch in TRL, over the optimizer batch in ours.
GSPO with token_truncate or token_mask: TRL's loss is the ratio of the completion times its mean weight, so each token's
  gradient has that mean; ours has the token's own weight, as verl's: the same value, another gradient (2e-2 of 7e-2).
other sampler (vLLM): TRL masks by sequence above 3 by default; importance_correction is none by default, its cap 2.
"""


class Trl:
    """One of TRL's trainers; `rollouts` and `new` are what it generates and what its model says of that."""

    def __init__(self, method: str, folder: str, **settings):
        config = getattr(trl, f"{method}Config")(
            output_dir=folder, report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=B,
            num_generations=G, max_completion_length=LIMIT, num_iterations=2, **settings,
        )  # fmt: skip
        hook = {"rollout_func": self.generate} if method == "GRPO" else {}  # the other trainer has none
        problems = datasets.Dataset.from_list([{"prompt": "?"}])
        names = list(PARTS) if "reward_weights" in settings else [""]
        self.trainer = getattr(trl, f"{method}Trainer")(
            str(MODEL), [self.reward(name) for name in names], config, problems, **hook
        )
        self.trainer._generate_single_turn = lambda *_: self.generate()["completion_ids"]
        self.trainer._get_per_token_logps_and_entropies = self.logprobs
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()

    def reward(self, part: str) -> Callable[..., list[float]]:
        """A reward function of the rollouts' rewards, or of a part of them."""
        return lambda **_: (self.rollouts.reward_parts[part] if part else self.rollouts.rewards).tolist()

    def generate(self, *_) -> dict:
        completions, chosen = [[1] * n for n in self.rollouts.lengths], self.rollouts.mask.tolist()
        return {"prompt_ids": [[1]] * B, "completion_ids": completions, "logprobs": None, "env_mask": chosen}

    def logprobs(self, model, *_, **__) -> tuple:
        if torch.is_grad_enabled():
            return self.new, torch.zeros_like(self.new), None
        frozen = self.rollouts.ref_logprobs if model is self.trainer.ref_model else self.rollouts.old_logprobs
        return torch.tensor(frozen), None, None

    def __call__(self, rollouts: Batch, new: np.ndarray) -> tuple[float, np.ndarray]:
        """Loss and gradient [B, T]; `advantages` [B] are then what it has made of the rewards."""
        self.rollouts, self.new = rollouts, torch.tensor(new, requires_grad=True)
        inputs = self.trainer._generate_and_score_completions([{"prompt": "?"}] * B)
        self.advantages = inputs["advantages"].numpy()
        loss = self.trainer._compute_loss(self.trainer.model, inputs)
        loss.backward()
        return loss.item(), self.new.grad.numpy()


def random_rollouts(seed: int, limit: int = LIMIT, forced: bool = False) -> tuple[Batch, np.ndarray]:
    """Ragged rows, and new log-probs at ratios from 0.3 to 7.4; `forced`: masked tokens within completions."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, limit + 1, B)
    lengths[1] = limit  # TRL's arrays are as wide as the longest completion
    mask = np.arange(limit) < lengths[:, None]
    if forced:
        mask &= rng.random(mask.shape) < 0.9
        mask[0] = False  # a row of forced tokens only
    old = rng.normal(-2, 1, mask.shape).astype(np.float32)
    ref = old + rng.normal(0, 0.4, mask.shape).astype(np.float32)
    rewards = rng.uniform(0, 1, B).astype(np.float32)
    rewards[-G:] = 0.5  # a group without signal
    parts = {name: rng.integers(0, 3, B).astype(np.float32) for name in PARTS}
    parts["form"][:G] = 0.1
    for part in parts.values():
        part[-G:] = 0.7
    rollouts = Batch(
        tokens=np.ones(mask.shape, int), mask=mask, sample_logprobs=old, rewards=rewards, lengths=lengths,
        prompt_lengths=np.zeros(B, int), rollout=np.arange(B), old_logprobs=old, ref_logprobs=ref, group_size=G,
        reward_parts=parts,
    )  # fmt: skip
    return rollouts, old + rng.uniform(-1.2, 2, mask.shape).astype(np.float32)


def apart(trainer: Trl, rollouts: Batch, new: np.ndarray, scale: float = 1.0, **settings) -> tuple[float, float, float]:
    """|Difference| of TRL's loss and `scale` times ours, the largest of gradients, and the largest gradient.

    With the group filter, of the rows that stay, and of losses that the others add nothing to.
    """
    value, gradient = trainer(rollouts, new)
    config = objective_of(**SHARED, **settings)
    batch = compute_advantages(rollouts, config)
    rows = batch.rollout
    share = {
        "constant": 1.0,
        "sequence_mean": len(rows) / B,
        "token_mean": rollouts.mask[rows].sum() / rollouts.mask.sum(),
    }[config.policy.loss_normalization]
    value, gradient = value / share, gradient[rows] / share
    batch = replace(batch, advantages=np.where(batch.mask, trainer.advantages[rows, None], 0.0))
    batch = set_loss_denominators(batch, B, LIMIT, config.policy)

    def loss(x: np.ndarray) -> jax.Array:
        return scale * policy_loss(TokenOutputs(x, jnp.zeros_like(x)), batch, config.loss)[0]

    ours = jax.value_and_grad(loss)(new[rows])
    has_all = len(rows) == B or not config.kl.kl_coef
    return abs(value - ours[0]) if has_all else ABSENT, np.abs(gradient - ours[1]).max(), np.abs(gradient).max()


def losses(folder: str):
    """(method, what is compared, `apart` for each batch)."""
    for name, (theirs, ours) in LOSSES.items():
        for beta in (0.0, BETA):
            trainer = Trl("GRPO", folder, beta=beta, use_bias_correction_kl=False, **theirs)
            for do_group_filter in (False, True):
                settings = ours | {"kl_coef": beta, "do_group_filter": do_group_filter}
                found = [apart(trainer, *random_rollouts(seed, forced=True), **settings) for seed in SEEDS]
                what = f"loss + {beta} k3" if beta else "loss"
                yield name, what + ", group filter" * do_group_filter, found
    trainer = Trl("RLOO", folder, beta=0.0)
    settings = {"do_group_filter": False} | SEQUENCES
    found = [apart(trainer, *random_rollouts(seed, limit=1), **settings) for seed in SEEDS]
    yield "RLOO", "loss, completions of one token", found
    settings = {"scale": LIMIT, "objective": "reinforce", "loss_normalization": "constant", "do_group_filter": False}
    batches = [random_rollouts(seed)[0] for seed in SEEDS]
    found = [(ABSENT, *apart(trainer, batch, batch.old_logprobs, **settings)[1:]) for batch in batches]
    yield "RLOO", f"loss at ratio 1, ours x {LIMIT}", found


@contextlib.contextmanager
def deviation_of_ours() -> Iterator[None]:
    """Makes TRL divide by the deviation over all numbers, without its 1e-4; by 1 if all are equal."""
    module, theirs = trl.trainer.grpo_trainer, trl.trainer.grpo_trainer.nanstd

    def nanstd(x: "torch.Tensor", **options) -> "torch.Tensor":
        deviation = x.std(correction=0, **options)
        return torch.where(deviation > 1e-6, deviation, 1.0) - 1e-4

    module.nanstd = nanstd
    try:
        yield
    finally:
        module.nanstd = theirs


def advantages_alone(folder: str):
    """(method, what is compared, |difference| for each batch); a z-score of ours is turned into one of TRL's."""
    for name, what, theirs, ours in (
        ("GRPO", "advantages, ours x std / (std' + 1e-4)", {}, {}),
        ("GDPO", "advantages, TRL's deviation as ours", THEIR_GDPO, OUR_GDPO),
        ("Dr. GRPO", "advantages", {"scale_rewards": "none"}, {"advantage": "group_mean"}),
        ("RLOO", "advantages", {"beta": 0.0}, {"advantage": "rloo"}),
        ("RLOO", f"advantages, {BETA} k1", {"beta": BETA}, {"advantage": "rloo", "kl_coef": BETA, "kl_in": "reward"}),
    ):
        trainer, found = Trl("RLOO" if name == "RLOO" else "GRPO", folder, **theirs), []
        for rollouts, new in map(random_rollouts, SEEDS):
            with deviation_of_ours() if theirs == THEIR_GDPO else contextlib.nullcontext():
                trainer(rollouts, new)
            expected = compute_advantages(rollouts, objective_of(do_group_filter=False, **SHARED, **ours)).advantages
            if not ours:
                groups = rollouts.rewards.reshape(N, G)
                expected *= np.repeat(groups.std(axis=1) / (groups.std(axis=1, ddof=1) + 1e-4), G)[:, None]
            error = expected - trainer.advantages[:, None]
            found.append((np.abs(error)[rollouts.mask].max(), ABSENT, ABSENT))
        yield name, what, found


def main() -> int:
    """Prints the table and the differences; 1 if anything does not agree."""
    if not trl:
        print("This comparison needs PyTorch and TRL: pip install torch trl")
        return 0
    status = 0
    logging.captureWarnings(True)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    print(f"trl {trl.__version__}, torch {torch.__version__}; {len(SEEDS)} batches of {B} rows; largest |difference|\n")
    print(f"{'method':<18}{'compared':<39}{'value':>7}{'gradient':>10}{'of up to':>10}  agree")
    with tempfile.TemporaryDirectory() as folder:
        for name, what, found in (*advantages_alone(folder), *losses(folder)):
            cells = np.max(found, axis=0)
            agree = cells[:2].max() <= TOLERANCE  # not so for nan
            status |= not agree
            value, gradient, size = ("-" if x == ABSENT else f"{x:.0e}" for x in cells)
            print(f"{name:<18}{what:<39}{value:>7}{gradient:>10}{size:>10}  {'yes' if agree else 'NO'}")
    print(f"\nDifferences of definition\n\n{DIFFERENCES}", end="")
    return status


if __name__ == "__main__":
    sys.exit(main())
