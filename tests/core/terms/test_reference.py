"""--kl_every: k3 of the stored rows in float64, without a second copy below adapters, and resumed to the bit."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from core import grpo
from core.records import Batch
from core.terms.reference import KLConfig, copy_policy, sampled_kl
from models.checkpoint import load_model
from tests.helpers import ROOT, slow, train_here
from tests.kill_runs import FLAGS, checksum, records
from tests.learning import make_learner, random_batch
from tests.oracles.stored import stored_logprobs
from utils.devices.sharding import single_device
from utils.settings.errors import UserError

STEPS = 4
RUN = FLAGS | {"max_steps": STEPS, "lr": 3e-2, "kl_every": 2, "test_env_name": "", "save_interval": 1}
CASES = {
    "all parameters": {},
    "adapters": {"lora_rank": 2},
    "tempered": {"temperature": 0.7},
    "ahead": {"ahead": 1},
}


@pytest.mark.parametrize("case", ["adapters", *slow("all parameters", "tempered", "ahead")])
def test_kl_is_k3_of_the_stored_rows_and_resumes_to_the_bit(case, tmp_path, monkeypatch):
    flags = RUN | CASES[case] | {"save_rollouts": "all"}
    whole, stopped, train, references = tmp_path / "whole", tmp_path / "stopped", grpo.train, []

    def seen(config, run, workers, rollouts, learner, *others):
        references.append((learner.reference, learner.base))
        train(config, run, workers, rollouts, learner, *others)

    # The learner of the run.
    monkeypatch.setattr(grpo, "train", seen)
    assert train_here(whole, **flags) == 0
    for steps in (3, STEPS):
        assert train_here(stopped, **flags | {"max_steps": steps}) == 0
    metrics = records(whole)
    assert records(stopped) == metrics
    assert checksum(stopped, STEPS) == checksum(whole, STEPS)
    assert [record["global_step"] for record in metrics if "kl" in record] == [2, 4]
    for step in (2, 4):
        arrays = dict(np.load(whole / "rollouts" / f"step_{step}.npz"))
        reference = stored_logprobs(arrays, FLAGS["model_dir"], flags.get("temperature", 1.0))
        x = (arrays["logprobs"] - reference)[arrays["mask"]]
        expected = np.mean(np.exp(-x) + x - 1)
        assert metrics[step - 1]["kl"] == pytest.approx(expected, rel=1e-4, abs=1e-8)
    assert metrics[3]["kl"] > 1e-3, "the policy has moved"
    for reference, base in references:
        assert (reference is base) == (case == "adapters"), "adapters are switched off, without a copy"


def test_measuring_changes_nothing_else(tmp_path):
    assert train_here(tmp_path / "with", **RUN) == train_here(tmp_path / "without", **RUN | {"kl_every": 0}) == 0
    found = [{name: x for name, x in record.items() if name != "kl"} for record in records(tmp_path / "with")]
    assert found == records(tmp_path / "without")
    assert checksum(tmp_path / "with", STEPS) == checksum(tmp_path / "without", STEPS)


def test_the_estimate_is_of_the_tokens_that_the_policy_sampled():
    rng = np.random.default_rng(0)
    mask = rng.random((4, 6)) < 0.5
    sampled, reference = (np.where(mask, -rng.exponential(1, mask.shape), np.nan) for _ in range(2))
    lengths = np.full(4, 6)
    batch = Batch(
        tokens=np.zeros(mask.shape, int),
        mask=mask,
        sample_logprobs=np.float32(sampled),
        rewards=np.full(4, np.nan, np.float32),
        lengths=lengths,
        prompt_lengths=0 * lengths,
    )
    found = sampled_kl(batch, np.float32(reference))
    pairs = [(float(np.float32(sampled[i, t])), float(np.float32(reference[i, t]))) for i, t in np.argwhere(mask)]
    terms = [np.exp(ref - p) - 1 - (ref - p) for p, ref in pairs]
    assert found == pytest.approx(sum(terms) / len(terms), rel=1e-6)
    batch.mask[:] = False
    assert sampled_kl(batch, np.float32(reference)) == 0


@pytest.mark.parametrize("name", ["qwen3_5-tied", *slow("qwen2-tied", "qwen3moe-tied")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_has_no_kl_from_its_copies_before_an_update(name, dtype):
    """From the reference, and from a teacher of the same file, whose matrices are held in the dtype of products."""
    folder = ROOT / "tests" / "fixtures" / name
    model, params, _ = load_model(folder, single_device(), dtype=dtype)
    _, teacher, _ = load_model(folder, single_device(), dtype=dtype, param_dtype=dtype)
    batch = random_batch()
    batch = replace(batch, tokens=batch.tokens % model.vocab_size)
    for copy in (copy_policy({}, params, dtype), teacher):
        learner = replace(make_learner(kl_coef=0.1), model=model, reference=copy)
        _, found = learner.add_logprobs(SimpleNamespace(params=params), batch)
        assert np.ptp(found.old_logprobs[found.mask]) > 1
        np.testing.assert_array_equal(found.ref_logprobs, found.old_logprobs)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"kl_every": -1}, "--kl_every -1 must not be negative"),
        ({"kl_every": 2, "kl_coef": 0.1}, "leave out --kl_every"),
    ],
)
def test_bad_settings_are_refused_by_name(flags, said):
    with pytest.raises(UserError, match=said):
        KLConfig(**flags)
