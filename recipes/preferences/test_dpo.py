"""Preferences: losses and gradient, pairs in all forms, stored rollouts, runs that resume, what is refused."""

import signal
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core import sft
from core.learner import make_learner
from core.objectives import set_loss_denominators
from core.records import Batch
from core.run.folder import settings_of_adapters
from core.sampler import SamplingConfig
from envs.data.messages import Messages
from envs.own.written import read_written
from models import decoder
from models.architecture import Decoder
from models.checkpoint import load_policy
from models.conversations import encode_rows
from models.names import Params, make_policy
from models.tokenizer import load_tokenizer
from recipes.preferences import dpo
from recipes.preferences.dpo import DPOConfig, PairConfig
from tests.helpers import ROOT, assert_leaves_close, depth, slow, train_here, write_jsonl
from tests.kill_runs import arguments, checksum, kill_at, records, start
from utils.devices.sharding import single_device
from utils.settings.config import make_config, parse
from utils.settings.errors import UserError, user_errors

FIXTURE = ROOT / "tests/fixtures/qwen3-tied"
FLAGS = {
    "model_dir": FIXTURE, "batch_size": 4, "num_epochs": 2, "lr": 1e-3, "lr_schedule": "constant", "adam_eps": 1e-2,
    "tokens_per_microbatch": 256, "test_interval": 2, "save_interval": 1, "num_score_workers": 1, "max_length": 64,
}  # fmt: skip
near = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def run(folder: Path, **flags) -> int:
    """Runs recipes/preferences/dpo.py in this process; returns its exit status."""
    try:
        with user_errors():
            sft.main(parse(DPOConfig, arguments(**FLAGS | flags, save_dir=folder)), dpo.Preferences)
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rows = [{"prompt": f"{i} + 1 = ", "chosen": f"{i + 1}", "rejected": f"{i + 2}, or not"} for i in range(12)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


# Loss and gradient


def test_slope_of_dpo_is_finite_for_any_margin():
    losses, slopes = dpo.dpo(np.array([[-1e4, 1e4], [1e4, -1e4]]), np.ones((2, 2)), 1.0)
    np.testing.assert_allclose(losses, [2e4, 0])
    np.testing.assert_allclose(slopes, [[-1, 1], [0, 0]])


PAIRS = [
    ("Use 3 4 to make 7.", "3+4=7", "no"),
    ("Use 9 2 to make 7.", "9-2", "9+2=11, so it is 9-2"),
    ("And 1 2?", "3", "21, or 12, or both"),
    ("And?", "yes", "x"),
]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def logprobs_of_all_logits(model: Decoder, policy: Params, batch: Batch) -> jax.Array:
    """Log-probabilities of the marked tokens of padded rows, without packing; 0 for others."""
    logits = decoder.logits(model, policy, batch.tokens)[:, :-1]
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(batch.mask[:, 1:], logprobs, 0)


def direct_loss(logprobs: jax.Array, reference: jax.Array, batch: Batch, name: str, beta: float) -> jax.Array:
    """The mean loss of pairs, as one expression that JAX differentiates."""
    ratios = (logprobs - reference).sum(axis=1)
    if name == "ipo":
        chosen, rejected = (ratios / batch.mask.sum(axis=1)).reshape(-1, 2).T
        return ((chosen - rejected - 1 / (2 * beta)) ** 2).mean()
    chosen, rejected = ratios.reshape(-1, 2).T
    return -jax.nn.log_sigmoid(beta * (chosen - rejected)).mean()


@pytest.mark.parametrize("case", [("dpo", 0, 1.0), ("ipo", 0, 1.0), *slow(("dpo", 0, 0.1), ("ipo", 2, 0.1))], ids=str)
def test_gradient_is_that_of_the_loss_of_all_logits(case):
    """In several micro-batches, of a policy that has moved away from the reference model."""
    name, rank, beta = case
    options = {"data": "-", "batch_size": len(PAIRS), "tokens_per_microbatch": 192, "remat": "none", "beta": beta}
    config = make_config(DPOConfig, **options, loss=name, lora_rank=rank)
    config = replace(config, sampling=SamplingConfig(prompt_length=1))
    layout = single_device()
    model, base, params, tokenizer = load_policy(FIXTURE, config.lora, 0, layout, "float32")
    rows = [[user(asked), said(reply)] for asked, *replies in PAIRS for reply in replies]
    batch = sft.make_batch(encode_rows(tokenizer, "rows", rows, 512, "error", group_size=2)[0])
    learner, state = make_learner(config, model, params, layout, batch.tokens.shape[1] - 1, base=base)
    reference = jax.jit(logprobs_of_all_logits, static_argnums=0)(model, make_policy(base, params), batch)
    moved = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(1), x.shape), params)
    state = replace(state, params=moved)

    oracle = jax.value_and_grad(
        lambda params: direct_loss(
            logprobs_of_all_logits(model, make_policy(base, params), batch), reference, batch, name, config.beta
        )
    )
    loss, gradient = jax.jit(oracle)(moved)
    weighed, losses, metrics = dpo.compare(learner, state, batch, name, config.beta)
    minibatch = set_loss_denominators(weighed, len(batch), batch.tokens.shape[1], config.objective.policy)
    chains = learner.chains(minibatch, learner.shapes)
    found = jax.tree.map(jnp.zeros_like, moved)
    for chain in chains:
        (sums, _), parts = learner.add_up(moved, chain)
        found = jax.tree.map(jnp.add, found, sums)
    near(losses.mean(), loss)
    assert_leaves_close(found, gradient, depth(model, batch.tokens.shape[1]))
    ratios = np.float64(logprobs_of_all_logits(model, make_policy(base, moved), batch) - reference).sum(axis=1)
    chosen, rejected = config.beta * ratios.reshape(-1, 2).T
    expected = [chosen.mean(), rejected.mean(), (chosen > rejected).mean(), (chosen - rejected).mean()]
    names = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
    near([metrics[name] for name in names], expected)


# Pairs


def pairs_of(file: Path, **options) -> tuple[list[Messages], list[Messages]]:
    data, tests = read_written(PairConfig(str(file), **options))
    return data.env.conversations, tests


def test_all_forms_of_a_pair_are_the_same_conversations(tmp_path):
    """TRL's explicit prompt as texts and as messages, its implicit prompt, and a prompt that both also begin with."""
    texts = [(f"Say {i}.", f"<b>{i}</b>", "no") for i in range(9)]
    forms = {
        "texts": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in texts],
        "explicit": [{"prompt": [user(p)], "chosen": [said(c)], "rejected": [said(r)]} for p, c, r in texts],
        "implicit": [{"chosen": [user(p), said(c)], "rejected": [user(p), said(r)]} for p, c, r in texts],
        "both": [
            {"prompt": p, "chosen": [user(p), said(c)], "rejected": [user(p), said(r)], "messages": [user(p), said(c)]}
            for p, c, r in texts
        ],
    }
    expected = [[user(p), said(reply)] for p, *replies in texts for reply in replies]
    for name, rows in forms.items():
        found, _ = pairs_of(write_jsonl(tmp_path / f"{name}.jsonl", rows), test_fraction=0.0)
        assert found == expected, name
    named = [{"x": {"q": p}, "good": c, "bad": r} for p, c, r in texts]
    columns = "prompt=x.q,chosen=good,rejected=bad"
    assert pairs_of(write_jsonl(tmp_path / "named.jsonl", named), test_fraction=0.0, columns=columns)[0] == expected


def test_replies_of_the_prompt_are_not_trained_and_both_sides_are_held_out(tmp_path):
    tokenizer = load_tokenizer(ROOT / "models/tiny")
    prompts = [[user(f"{i}"), said("3"), user("More.")] for i in range(20)]
    rows = [{"chosen": [*prompt, said("4+3")], "rejected": [*prompt, said("9")]} for prompt in prompts]
    trained, tests = pairs_of(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert (len(trained), len(tests)) == (36, 4)
    assert [row[:-1] for row in tests[::2]] == [row[:-1] for row in tests[1::2]]
    encoded, _ = encode_rows(tokenizer, "rows", trained, **PairConfig("x").encoding)
    assert {tokenizer.hf.decode(row.tokens[row.mask]) for row in encoded} == {"4+3<|im_end|>", "9<|im_end|>"}


def test_equal_replies_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": f"{i}", "chosen": "1", "rejected": "12"[i == 3]} for i in range(8)]
    data, _ = read_written(PairConfig(str(write_jsonl(tmp_path / "rows.jsonl", rows)), test_fraction=0.0))
    assert "1 pair of 8 rows (left out: 7 with equal replies)" in data.env.note


REFUSED = {
    "it has no prompt: write a column prompt": {"chosen": "a", "rejected": "b"},
    "no column 'chosen', only 'prompt', 'good': name the columns by --columns prompt=COLUMN,chosen=": {
        "prompt": "a", "good": "b"
    },
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_a_row_that_is_no_pair_is_refused_by_file_and_line(tmp_path, words):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}, REFUSED[words]])
    with pytest.raises(UserError, match=f"rows.jsonl:2 is malformed: .*{words}.* Correct it, or remove it"):
        pairs_of(file)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "from --data or from --pairs_from: give one of the two"),
        ({"data": "x", "beta": 0.0}, "--beta 0.0 must be above 0: raise it"),
        ({"data": "x", "columns": "completion=y"}, "--columns completion=y: write prompt=COLUMN,chosen=COLUMN"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(options, words):
    with pytest.raises(UserError, match=words):
        make_config(DPOConfig, **options)


# Stored rollouts

ROLLOUTS = {  # with so many tokens some completions end before
    "env_name": "poem", "groups_per_batch": 3, "group_size": 4, "ppo_minibatch": 12, "num_generation_tokens": 64,
    "do_group_filter": 0, "num_score_workers": 1, "max_steps": 2, "model_dir": FIXTURE, "save_rollouts": "all",
}  # fmt: skip


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts") / "run"
    assert train_here(folder, **ROLLOUTS) == 0
    return folder


def test_pairs_from_a_run_are_the_best_and_the_worst_of_each_group(rollouts):
    expected = []
    for step in (1, 2):
        arrays = np.load(rollouts / f"rollouts/step_{step}.npz")
        for group in range(3):
            rows = range(4 * group, 4 * group + 4)
            best, worst = (pick(rows, key=lambda row: arrays["returns"][row]) for pick in (max, min))
            if arrays["returns"][best] > arrays["returns"][worst]:
                ids = [arrays["tokens"][row, : arrays["lengths"][row]] for row in (best, worst)]
                expected.append([(row.tolist(), arrays["prompt_lengths"][best]) for row in ids])
    found = dpo.stored_pairs(str(rollouts))
    rows = [[messages.encoded for messages in row.answer] for row in found]
    assert [[(row.tokens.tolist(), row.mask.argmax()) for row in pair] for pair in rows] == expected
    assert len(expected) >= 3


def changed(rollouts: Path, folder: Path, **arrays: np.ndarray) -> str:
    """Returns a run folder with the first step of `rollouts`, some of whose arrays are others."""
    (folder / "rollouts").mkdir(parents=True)
    for file in ("step2", "config.json", "rollouts/step_1.jsonl"):
        (folder / file).symlink_to(rollouts / file)
    stored = dict(np.load(rollouts / "rollouts/step_1.npz"))
    np.savez(folder / "rollouts/step_1.npz", **stored | arrays)
    return str(folder)


def test_a_failed_grader_is_neither_best_nor_worst(rollouts, tmp_path):
    failed = np.array([True, False, False, True] * 3)
    folder = changed(rollouts, tmp_path / "run", returns=np.float32([9, 2, 1, 0] * 3), failed=failed)
    rows = [messages.encoded.tokens.tolist() for row in dpo.stored_pairs(folder) for messages in row.answer]
    arrays = np.load(rollouts / "rollouts/step_1.npz")
    assert rows == [arrays["tokens"][i, : arrays["lengths"][i]].tolist() for i in np.flatnonzero(~failed)]


def test_a_run_on_stored_pairs_raises_their_margin(rollouts, tmp_path):
    assert run(tmp_path / "run", pairs_from=rollouts, loss="ipo", num_epochs=8, batch_size=2, max_length=256) == 0
    first, *_, last = [record for record in records(tmp_path / "run") if "test_data/loss" in record]
    logged = [record["data/loss"] for record in records(tmp_path / "run") if "data/loss" in record]
    assert first["test_data/rewards/margins"] == 0
    assert np.mean(logged[-3:]) < np.mean(logged[:3]) == pytest.approx(25, rel=0.2)
    assert last["test_data/rewards/accuracies"] in (0.0, 1.0), "one pair is held out"
    card = next((tmp_path / "run").glob("step*/README.md")).read_text()
    assert "by preferences, step" in card
    assert "| loss of held-out pairs | " in card
    assert "python recipes/preferences/dpo.py" in card


def test_a_run_without_pairs_is_refused_before_the_first_step(rollouts, tmp_path, capsys):
    assert run(tmp_path / "run", pairs_from=tmp_path / "none") == 2
    assert "has no rollouts/step_N.npz: name a run of core/grpo.py with --save_rollouts all" in capsys.readouterr().err
    changed(rollouts, tmp_path / "flat", returns=np.zeros(12, np.float32))
    assert run(tmp_path / "run", pairs_from=tmp_path / "flat") == 2
    assert "has no group whose returns differ" in capsys.readouterr().err
    assert run(tmp_path / "run", pairs_from=rollouts, model_dir=ROOT / "models/tiny", max_length=512) == 2
    assert "has another vocabulary than --model_dir: name a run of this model" in capsys.readouterr().err
    assert not (tmp_path / "run/metrics.jsonl").exists()


# Runs


@pytest.mark.parametrize("flags", [{"loss": "ipo"}, *slow({"lora_rank": 2})], ids=["full", "lora"])
def test_a_resumed_run_is_the_one_that_never_stopped(data, tmp_path, flags):
    """To the bit: one is ended by --max_steps, then killed, then goes on."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, data=data, **flags) == 0
    assert run(parts, data=data, **flags, max_steps=2) == 0
    argv = arguments(**FLAGS | flags, data=data, save_dir=parts)
    process = start(argv, script="recipes/preferences/dpo.py", stdout=subprocess.DEVNULL)
    kill_at(process, parts, "step", 1, 0, signal.SIGKILL)
    assert run(parts, data=data, **flags) == 0
    assert records(whole) == records(parts)
    assert len(records(whole)) == 7
    assert checksum(whole, 6) == checksum(parts, 6)
    losses = [record["test_data/loss"] for record in records(whole) if "test_data/loss" in record]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_folder_of_a_run_is_where_rl_starts(data, tmp_path):
    assert run(tmp_path / "dpo", data=data, lora_rank=2, max_steps=1, test_fraction=0.0) == 0
    implied = settings_of_adapters({"model_dir": str(tmp_path / "dpo")})
    assert train_here(tmp_path / "rl", **ROLLOUTS | implied | {"model_dir": tmp_path / "dpo", "max_steps": 1}) == 0
