"""core/minimal.py against the real thing: its sampler's greedy tokens and the gradient of one of its steps."""

import runpy

import jax
import numpy as np
import optax
import pytest

from core import minimal
from core.advantages import compute_advantages
from core.config import Config
from core.learner import Learner, Update
from core.records import Batch
from core.sampler import Sampler
from envs.countdown import Countdown
from models.distribution import Distribution
from models.names import Params
from models.state import init_state
from tests.helpers import MODEL, assert_close, assert_leaves_close, gradient_depth, on_layout, random_params
from utils.devices.sharding import single_device
from utils.settings.config import make_config

LENGTHS = 3, 5, 4, 6  # of prompts
STOP_IDS = (7, 11)
NUM_PROMPTS, GROUP_SIZE = len(LENGTHS), 4
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 6, 12
WIDTH = MAX_PROMPT_TOKENS + MAX_NEW_TOKENS


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    sizes = {
        "GROUP_SIZE": GROUP_SIZE,
        "MAX_PROMPT_TOKENS": MAX_PROMPT_TOKENS,
        "MAX_NEW_TOKENS": MAX_NEW_TOKENS,
    }
    for name, size in sizes.items():
        # The page has constants instead of options.
        monkeypatch.setattr(minimal, name, size)


def random_prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, MODEL.vocab_size, length).tolist() for length in LENGTHS]


def repeat(prompts: list[list[int]]) -> list[list[int]]:
    return [prompt for prompt in prompts for _ in range(GROUP_SIZE)]


def sample(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens, prompt lengths and lengths of the minimal sampler."""
    padded, prompt_lengths = minimal.pad_prompts(prompts)
    tokens, lengths = minimal.sample(MODEL, random_params(), padded, prompt_lengths, STOP_IDS, jax.random.key(0))
    return tokens, prompt_lengths, lengths


def test_greedy_tokens_are_those_of_the_sampler(monkeypatch):
    # Greedy tokens do not depend on how random numbers are made.
    monkeypatch.setattr(jax.random, "categorical", lambda key, logits: logits.argmax(-1))
    tokens, prompt_lengths, lengths = sample(repeat(random_prompts()))
    sampler = Sampler(MODEL, MAX_NEW_TOKENS, STOP_IDS, Distribution(temperature=0.0))
    weights = sampler.load_weights(random_params())
    expected = sampler.generate(weights, random_prompts(), np.arange(NUM_PROMPTS), GROUP_SIZE, jax.random.key(0))
    width = expected.tokens.shape[1]
    np.testing.assert_array_equal(lengths, expected.lengths)
    np.testing.assert_array_equal(tokens[:, :width], expected.tokens)
    mask = minimal.completion_mask(tokens, prompt_lengths, lengths)
    np.testing.assert_array_equal(mask[:, :width], expected.mask)
    assert not tokens[:, width:].any()


def batch_of(tokens: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray, rewards: np.ndarray) -> Batch:
    columns = np.arange(WIDTH)
    mask = (columns >= prompt_lengths[:, None]) & (columns < lengths[:, None])
    return Batch(
        tokens=tokens,
        mask=mask,
        sample_logprobs=np.zeros(mask.shape, np.float32),
        rewards=rewards,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        group_size=GROUP_SIZE,
    )


def learner_gradient(config: Config, batch: Batch) -> tuple[Params, Update]:
    """Returns the gradient of an update in several micro-batches, by plain descent with rate 1, and the update."""
    layout = single_device()
    learner = Learner(
        model=MODEL,
        optimizer=optax.sgd(1.0),
        layout=layout,
        config=config,
        num_generation_tokens=MAX_NEW_TOKENS,
        tokens_per_microbatch=128,
    )
    before = init_state(on_layout(layout), learner.optimizer)
    after, update = learner.update(before, batch, fraction_done=0.0)
    assert len(update.parts) > 1
    return jax.tree.map(lambda old, new: old - np.asarray(new), random_params(), after.params), update


def test_a_step_has_the_gradient_of_the_learner():
    """On the same rollouts, in micro-batches; one group has no signal and leaves the batch."""
    prompts = repeat(random_prompts())
    tokens, prompt_lengths, lengths = sample(prompts)
    rewards = np.random.default_rng(1).choice([0.0, 0.1, 1.0], len(prompts)).astype(np.float32)
    rewards[:GROUP_SIZE] = 0.1
    advantages, has_signal = minimal.group_advantages(rewards)
    mask = minimal.completion_mask(tokens, prompt_lengths, lengths) & has_signal[:, None]
    gradient, entropy = minimal.policy_gradient(MODEL, random_params(), tokens, mask, advantages)

    config = make_config(
        Config,
        advantage="group_zscore",
        objective="ppo",
        clip_epsilon=minimal.CLIP_EPSILON,
        entropy_coef=0.0,
        groups_per_batch=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        ppo_minibatch=0,
    )
    batch = compute_advantages(batch_of(tokens, prompt_lengths, lengths, rewards), config.objective)
    assert len(batch) < len(prompts)
    assert batch.advantages.any()
    expected, update = learner_gradient(config, batch)
    size = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    assert size > 0.01
    num_operations = gradient_depth(MODEL, WIDTH, batch.mask.sum())
    assert_leaves_close(gradient, expected, num_operations, size)
    assert_close(entropy, sum(np.asarray(part["entropy"]) for part in update.parts), num_operations, 1)


def test_a_step_in_which_no_group_has_signal_updates_nothing(monkeypatch, capsys):
    # Every reward is 0, two steps suffice.
    monkeypatch.setattr(Countdown, "score", lambda *_: {"return": 0.0})
    for name, value in {"NUM_STEPS": 2, "NUM_PROMPTS": 2, "MAX_PROMPT_TOKENS": 24}.items():
        # The page has constants instead of options.
        monkeypatch.setattr(minimal, name, value)
    minimal.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.endswith("no update: the rewards of each group are equal") for line in lines)


def test_a_page_without_options_has_a_help(monkeypatch, capsys):
    # The command line.
    monkeypatch.setattr("sys.argv", ["core/minimal.py", "--help"])
    runpy.run_path(minimal.__file__, run_name="__main__")
    assert capsys.readouterr().out.startswith("GRPO on one page")
    # The command line.
    monkeypatch.setattr("sys.argv", ["core/minimal.py", "--lr"])
    with pytest.raises(SystemExit, match="has no options"):
        runpy.run_path(minimal.__file__, run_name="__main__")
