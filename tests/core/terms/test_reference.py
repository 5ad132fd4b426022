"""The reference model of --kl_coef is the policy that the run began with, to the bit."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from core.terms.reference import copy_policy
from models.checkpoint import load_model
from tests.helpers import ROOT, slow
from tests.learning import make_learner, random_batch
from utils.devices.sharding import single_device


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
