"""The table of sampler against trainer: both sides against others, and what the command prints."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from bench.bitwise import CACHES, Command, main, make_sampler, sample, trainer_logprobs
from bench.common import ROOT, make_prompts
from models.checkpoint import load_model
from models.decoder import token_outputs
from utils.settings.errors import UserError

FOLDER = str(ROOT / "tests/fixtures/qwen3-tied")


@pytest.fixture(scope="module")
def sampled():
    """A sampler in float32, parameters, and 16 completions that were sampled in one call."""
    model, params, _ = load_model(FOLDER, dtype="float32")
    sampler = make_sampler(model, next(iter(CACHES)), num_tokens=12)
    prompts = make_prompts(model.vocab_size, 2, 9)
    return sampler, params, prompts, sample(sampler, sampler.load_weights(params), prompts, 8, num_rows=16)


def test_the_trainer_is_a_plain_forward_pass_over_whole_rows(sampled):
    sampler, params, _, completions = sampled
    plain = jax.device_get(token_outputs(sampler.model, params, completions.tokens).logprobs)
    for num_rows in (16, 2):
        found = trainer_logprobs(sampler, params, completions, num_rows)
        np.testing.assert_allclose(found[completions.mask], plain[completions.mask], atol=3e-5)
        assert not np.array_equal(found, plain), "another order of sums"


def test_another_sampler_is_seen(sampled):
    sampler, params, prompts, completions = sampled
    found = trainer_logprobs(sampler, params, completions, 16)
    assert np.abs(completions.logprobs - found)[completions.mask].max() < 3e-5
    half = replace(sampler, model=replace(sampler.model, dtype="bfloat16"))
    others = sample(half, half.load_weights(params), prompts, 8, num_rows=16)
    found = trainer_logprobs(sampler, params, others, 16)
    assert np.abs(others.logprobs - found)[others.mask].max() > 1e-3


def test_trainer_is_equal_to_itself_in_the_same_microbatches(capsys, tmp_path):
    options = {"dtypes": "float32", "caches": "none", "rows": "64", "num_generation_tokens": 4}
    main(Command(FOLDER, json=str(tmp_path / "out.json"), **options))
    row = capsys.readouterr().out.splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:5]] == ["qwen3-tied", "float32", "none", "64"]
    assert [cell.strip() for cell in row.split("|")[6:11]] == ["all", *3 * ["0.0e+00"], "0.00%"]
    assert '"equal": "all"' in (tmp_path / "out.json").read_text()


@pytest.mark.parametrize(("name", "value"), [("rows", "7"), ("rows", "x"), ("caches", "big")])
def test_bad_options_are_refused(name, value):
    with pytest.raises(UserError, match=f"--{name} {value}: give"):
        main(Command(FOLDER, **{name: value}))
