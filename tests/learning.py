"""A small learner, a batch for it, its updates and steps. Letters: G rollouts of a prompt, B rows, T their length."""

from dataclasses import replace

import jax
import numpy as np
import optax
from chex import assert_trees_all_close

from core.advantages import compute_advantages
from core.config import Config
from core.learner import Learner, Update, split_minibatches
from core.records import Batch
from core.run.metrics import batch_metrics
from models import decoder
from models.state import TrainState, init_state
from tests.helpers import MODEL, depth, gradient_depth, on_layout, random_params, rounding
from utils.devices.sharding import Layout, single_device
from utils.settings.config import make_config, with_options

G = 4
BATCH = {"groups_per_batch": 2, "group_size": G, "ppo_minibatch": 4, "ppo_epochs": 2, "max_resampling": 3.0}
CONFIG = make_config(
    Config, advantage="group_mean", entropy_coef=0.02, temperature=0.8, num_generation_tokens=50, **BATCH
)
DISTRIBUTION = CONFIG.sampling.distribution
SGD = optax.sgd(1.0)
NO_STEPS = optax.sgd(0.0)
SCORES = depth(MODEL, 64)  # operations of a log-probability
GRADIENT = gradient_depth(MODEL, 64, 8 * 64)
SURPRISE = 20.0  # nats of an unlikely token
teacher_forced = jax.jit(decoder.token_outputs, static_argnums=(0, 3))


def random_batch() -> Batch:
    """Ragged rows off the policy, of two prompts: many of their ratios are clipped."""
    rng = np.random.default_rng(0)
    B, T = 2 * G, 60
    prompts = np.repeat([6, 7], G)
    # In micro-batches of 128 tokens: two rows of up to 64 at a time, or four of up to 32, the last ones filled up.
    lengths = prompts + np.array([1, 50, 12, 47, 49, 5, 44, 48])
    columns = np.arange(T)
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None])
    mask[1, 20:23] = False  # forced tokens
    tokens = np.where(columns < lengths[:, None], rng.integers(0, MODEL.vocab_size, (B, T)), 0).astype(np.int32)
    tokens = np.where(columns < prompts[:, None], tokens[np.arange(B) // G * G], tokens)
    true = np.asarray(teacher_forced(MODEL, random_params(), tokens, DISTRIBUTION)[0])
    old = np.where(mask, true + rng.normal(0, 0.31, (B, T)), 0).astype(np.float32)
    rewards = np.float32([0, 1, 0.1, 0.1, 1, 1, 0, 0])
    batch = Batch(
        tokens=tokens,
        mask=mask,
        sample_logprobs=np.where(mask, true, 0),
        rewards=rewards,
        lengths=lengths,
        prompt_lengths=prompts,
        old_logprobs=old,
        group_size=G,
    )
    return compute_advantages(batch, CONFIG.objective)


def make_learner(
    config: Config = CONFIG, optimizer=SGD, layout: Layout | None = None, tokens_per_microbatch: int = 128, **options
) -> Learner:
    layout = layout or single_device()
    config = with_options(config, **options)
    num_tokens = config.sampling.num_generation_tokens
    return Learner(replace(MODEL, mesh=layout.mesh), optimizer, layout, config, num_tokens, tokens_per_microbatch)


def first_state(learner: Learner) -> TrainState:
    return init_state(on_layout(learner.layout), learner.optimizer)


def update(batch: Batch, **options) -> tuple[dict, dict]:
    """The gradient and the metrics of one update, by plain descent with rate 1."""
    learner = make_learner(**options)
    state, update = learner.update(first_state(learner), batch, fraction_done=0.0)
    return jax.tree.map(lambda old, new: old - np.asarray(new), random_params(), state.params), learner.read(update)


def train_step(
    learner: Learner, state: TrainState, batch: Batch, step: int = 1, progress: float = 0.0
) -> tuple[TrainState, dict, list[Update]]:
    """A step of training after its rollouts, as in core/grpo.py."""
    config, updates = learner.config, []
    batch = compute_advantages(learner.add_logprobs(state, batch)[1], config.objective)
    for epoch in range(config.update.ppo_epochs):
        for minibatch in split_minibatches(batch, config, step, epoch):
            state, update = learner.update(state, minibatch, progress)
            updates.append(update)
    return state, learner.metrics(updates) | batch_metrics(batch), updates


def assert_same_gradient(found, expected) -> None:
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    assert largest > 0.1
    assert_trees_all_close(found, expected, rtol=0, atol=rounding(GRADIENT, largest))


def with_reference(batch: Batch) -> Batch:
    rng = np.random.default_rng(2)
    noise = [np.where(batch.mask, rng.normal(0, 0.2, batch.mask.shape), 0).astype(np.float32) for _ in range(2)]
    return replace(batch, ref_logprobs=batch.old_logprobs + noise[0], sample_logprobs=batch.old_logprobs + noise[1])
