"""core/minimal.py against transformers' outputs and against core/grpo.py's own functions, and alone in a folder."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from functools import cache, reduce
from pathlib import Path
from runpy import run_path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import minimal
from core.advantages import compute_advantages
from core.config import Config
from core.learner import Learner, add_sums, apply_gradients, make_learner
from core.objectives import set_loss_denominators
from core.records import Batch
from core.terms.ratios import reduce_metrics
from envs import make_env, parse_options
from models.checkpoint import load_model, short_folder
from models.names import Params
from models.state import init_state
from tests.helpers import ROOT
from tests.processes import on_four_devices
from tests.references import DATA, FIXTURES, expected_of
from utils.devices.sharding import single_device
from utils.settings.config import make_config

TINY = ROOT / "models/tiny"
SETTINGS = minimal.Settings(groups_per_batch=4, group_size=4, ppo_minibatch=16, num_generation_tokens=40)
P, A = 16, SETTINGS.num_generation_tokens
DEMO = run_path(str(ROOT / "configs/demo.py"))["get_config"]()["env_options"]


def on_all_devices() -> AbstractContextManager:
    """The mesh that `main` sets."""
    return jax.set_mesh(jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,)))


def load(folder: Path) -> tuple[minimal.Model, minimal.Params]:
    """A model and its parameters on all devices."""
    with on_all_devices():
        model = minimal.read_model(folder, "float32")
        return model, minimal.load_params(folder, model)


@cache
def rollouts() -> tuple[minimal.Batch, np.ndarray]:
    """Rows of ragged prompts and completions, 16 of four groups, one of which has no signal; and their rewards."""
    rng = np.random.default_rng(0)
    starts = np.repeat(rng.integers(0, P - 2, 4), 4).astype(np.int32)
    prompts = np.repeat(rng.integers(10, 500, (4, P)), 4, axis=0)
    tokens = np.concatenate([prompts, rng.integers(10, 500, (16, A))], axis=1).astype(np.int32)
    rewards = np.float32([0, 1, 0.1, 0.1, 1, 1, 1, 1, 0, 0, 0, 1, 0.1, 0.1, 1, 0])
    advantages, has_signal = minimal.group_advantages(rewards.reshape(4, 4))
    mask = (np.arange(A) < rng.integers(1, A + 1, 16)[:, None]) & has_signal.repeat(4)[:, None]
    old = np.float32(rng.normal(-3, 1, (16, A)))
    return minimal.Batch(tokens, starts, mask, old, advantages.ravel()), rewards


def in_core() -> tuple[Batch, Learner, Params]:
    """The same rows padded on the right, with advantages by core/advantages.py, and a learner with parameters."""
    batch, rewards = rollouts()
    width = P + A
    lengths = np.where(batch.mask.any(axis=1), batch.mask.sum(axis=1), 1)
    tokens, mask, old = np.zeros((16, width), np.int32), np.zeros((16, width), bool), np.zeros((16, width), np.float32)
    for row, start in enumerate(batch.starts):
        tokens[row, : width - start] = batch.tokens[row, start:]
        mask[row, P - start : P - start + lengths[row]] = True
        old[row, P - start : width - start] = batch.logprobs[row]
    rows = Batch(
        tokens=tokens, mask=mask, sample_logprobs=old, rewards=rewards, lengths=P - batch.starts + lengths,
        prompt_lengths=P - batch.starts, finished=np.ones(16, bool), old_logprobs=old, rollout=np.arange(16),
        group_size=4,
    )  # fmt: skip
    flags = {"groups_per_batch": 4, "group_size": 4, "ppo_minibatch": 16, "num_generation_tokens": A}
    config = make_config(Config, prompt_length=P, entropy_coef=0.0, max_grad_norm=1e9, **flags)
    layout = single_device()
    model, params, _ = load_model(TINY, layout)
    learner, _ = make_learner(config, model, params, layout, A)
    return compute_advantages(rows, config.objective), learner, params


@cache
def gradient(num_devices: int = 1) -> tuple[np.ndarray, minimal.Params, np.ndarray]:
    """Log-probabilities, gradient and metrics of the rows, summed over micro-batches."""
    model, params = load(TINY)
    batch, _ = rollouts()
    settings = SETTINGS._replace(prompt_length=P, rows_per_microbatch=8 // num_devices)
    grads, metrics = jax.tree.map(jnp.zeros_like, params), np.zeros(3)
    logprobs, num_tokens = np.zeros((16, A), np.float32), int(batch.mask.sum())
    with on_all_devices():
        for rows, part in minimal.split_microbatches(settings, batch, np.arange(16)):
            found = minimal.token_logprobs(settings, model, params, part)
            logprobs[rows, : found.shape[1]] = found
            grads, new = minimal.add_gradients(settings, model, params, grads, part, num_tokens)
            metrics += new
    return logprobs, jax.tree.map(np.asarray, grads), metrics


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-wide-heads", "qwen2-untied", "llama-untied"])
def test_logits_and_greedy_completions_are_those_of_transformers(name):
    model, params = load(FIXTURES / name)
    expected = expected_of(name)
    tokens = expected["tokens"]
    completions = expected["completions"]
    settings = SETTINGS._replace(num_generation_tokens=completions.shape[1], temperature=0.0)
    rows = expected["prompts"], np.int32(expected["starts"])
    with on_all_devices():
        hidden, _ = jax.jit(minimal.forward, static_argnums=0)(model, params, tokens, np.zeros(len(tokens), np.int32))
        np.testing.assert_allclose(minimal.logits(model, params, hidden), expected["logits"], atol=1e-4)
        model = model._replace(stop_ids=(-1,))
        found, *_ = minimal.sample(settings, model, params, *rows, jax.random.key(0))
    np.testing.assert_array_equal(found, completions)


def test_a_step_is_that_of_the_loop():
    """Advantages, log-probabilities, loss and gradient of the same rows; one group has no signal and leaves."""
    expected, learner, params = in_core()
    batch, _ = rollouts()
    kept = batch.mask.any(axis=1)
    found_logprobs, found, (loss_sum, _, clip_fraction) = gradient()
    outputs = learner.compute_outputs(params, expected)
    for row, number in enumerate(np.flatnonzero(kept)):
        mask = expected.mask[row]
        np.testing.assert_allclose(expected.advantages[row, mask], batch.advantages[number], rtol=1e-6)
        np.testing.assert_allclose(found_logprobs[number][batch.mask[number]], outputs.logprobs[row, mask], atol=1e-5)
    whole = set_loss_denominators(expected, 16, A, learner.config.objective.policy)
    chains = learner.chains(whole, learner.shapes)
    summed, parts = zip(*[learner.add_up(params, chain) for chain in chains], strict=True)
    gradients, loss = reduce(add_sums, summed)
    metrics = reduce_metrics([part for chain in parts for part, _ in chain])
    assert loss_sum == pytest.approx(float(loss), rel=1e-6)
    assert clip_fraction == pytest.approx(metrics["clip_fraction"], rel=1e-6)
    of_layers, layers = gradients.pop("model.layers"), found["layers"]
    pairs = [(found[name], x) for name, x in gradients.items()]
    pairs += [(layers[name], x) for name, x in of_layers.items()]
    assert len(pairs) == len(jax.tree.leaves(found))
    for own, other in pairs:
        assert np.linalg.norm(own - other) < 1e-5 * np.linalg.norm(other)


def test_an_optimizer_step_is_that_of_the_loop():
    _, params = load(TINY)
    _, grads, _ = gradient()
    config = make_config(Config, lr=1e-3, weight_decay=0.0)
    learner, _ = make_learner(config, load_model(TINY)[0], {"x": params["model.norm.weight"]}, single_device(), A)
    theirs = {"x": params["model.norm.weight"]}, {"x": grads["model.norm.weight"]}
    state = init_state(jax.tree.map(jnp.copy, theirs[0]), learner.optimizer)
    expected, _ = apply_gradients(learner.optimizer, 0, state, theirs[1])
    optimizer = minimal.make_optimizer(SETTINGS._replace(lr=1e-3))
    found, *_ = minimal.apply_gradients(optimizer, theirs[0], optimizer.init(theirs[0]), theirs[1])
    np.testing.assert_allclose(found["x"], expected.params["x"], atol=1e-6)


def test_problems_are_those_of_the_demo():
    for split, number in (("train", 300), ("test", 512)):
        env = make_env(f"countdown-{split}" if split == "test" else "countdown", **parse_options(DEMO))
        found = minimal.countdown_problems(SETTINGS, split, range(number))
        assert [text for text, _ in found] == [env.problem(i).messages[0]["content"] for i in range(number)]
        for text, answer in found[:20]:
            reply = f"<think>Hm.</think><answer>-(0-{answer[0][0]}) + {answer[0][1]}*{answer[0][2]}</answer>"
            expected = env.score(env.problem([x for x, _ in found].index(text)), reply)["return"]
            assert minimal.countdown_score(answer, reply) == expected


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>(2+3)*4</answer>", 1.0),
        ("<answer>4*(3+2) = 20</answer>", 1.0),
        ("<answer>2+3+4</answer>", 0.1),
        ("<answer>20</answer>", 0.0),
        ("<answer>2**3**4</answer>", 0.0),
        ("<answer>9**9**9**9</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>" + "(" * 90 + "</answer>", 0.0),
        ("(2+3)*4", 0.0),
        ("<answer>2/(3-3)*4</answer>", 0.0),
    ],
)
def test_replies_of_countdown_are_scored_without_running_them(reply, reward):
    assert minimal.countdown_score(((2, 3, 4), 20), reply) == reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [(r"So \boxed{1,234}.", 1.0), (r"\boxed{\$1234.00}", 1.0), (r"\boxed{1} or \boxed{5}", 0.0), ("1234", 0.0)],
)
def test_replies_of_gsm8k_are_right_in_a_box(reply, reward, tmp_path):
    row = {"question": "How many?", "answer": "So many.\u2028 #### 1,234"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    ((text, answer),) = minimal.gsm8k_problems(SETTINGS._replace(data_dir=str(tmp_path)), "test", range(8))
    assert text.startswith("How many?\n")
    assert minimal.gsm8k_score(answer, reply) == reward


@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3-bfloat16"])
def test_a_saved_folder_is_the_model(name, tmp_path):
    """In float32, also by its config.json, and without the copy of a tied head that some files have."""
    source = shutil.copytree(FIXTURES / name, tmp_path / "source")
    before = load_file(source / "model.safetensors")
    head = before.get("lm_head.weight", before["model.embed_tokens.weight"])
    save_file(before | {"lm_head.weight": head}, source / "model.safetensors")
    _, params = load(source)
    minimal.save_params(params, source, tmp_path / "saved")
    after = load_file(tmp_path / "saved/model.safetensors")
    assert before.keys() == after.keys()
    for tensor, x in before.items():
        np.testing.assert_array_equal(after[tensor], np.float32(x))
    assert json.loads((tmp_path / "saved/config.json").read_text())["torch_dtype"] == "float32"
    assert (tmp_path / "saved/tokenizer.json").is_file()


@pytest.mark.slow
def test_a_real_model_is_that_of_transformers(tmp_path):
    """Greedy replies to 16 questions, logits of four of them, and those of the folder that is saved."""
    torch = pytest.importorskip("torch", reason="torch is needed by this test")
    folder, data = short_folder("coder-0.5b"), DATA / "gsm8k"
    if not (folder.is_dir() and data.is_dir()):
        pytest.skip("it needs GSM8K, and the model that `python runs/real_model.py coder-0.5b` writes")
    settings = SETTINGS._replace(data_dir=str(data), num_generation_tokens=64, temperature=0.0)
    chats = [[{"role": "user", "content": text}] for text, _ in minimal.gsm8k_problems(settings, "test", range(16))]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    starts = (prompts.attention_mask == 0).sum(dim=1).int().numpy()
    width = prompts.input_ids.shape[1]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        whole = theirs.generate(**prompts, max_new_tokens=64, do_sample=False)
        expected = [theirs(row[None, start:]).logits.numpy() for row, start in zip(whole[:4], starts, strict=False)]
    model, params = load(folder)
    with on_all_devices():
        rows = prompts.input_ids.int().numpy(), starts
        found, _, lengths = minimal.sample(settings, model, params, *rows, jax.random.key(0))
        completions = np.where(np.arange(64) < lengths[:, None], found, tokenizer.pad_token_id)
        np.testing.assert_array_equal(completions, whole[:, width:].numpy())
        forward = jax.jit(minimal.forward, static_argnums=0)
        for row, logits in enumerate(expected):
            hidden, _ = forward(model, params, whole[row : row + 1].int().numpy(), starts[row : row + 1])
            found = minimal.logits(model, params, hidden[:, starts[row] :])
            assert np.abs(found - logits).max() < 1e-4 * np.abs(logits).max()
    minimal.save_params(params, folder, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_array_equal(saved(whole[:1, starts[0] :]).logits.numpy(), expected[0])


def check_four_devices(file: str) -> None:
    """Log-probabilities and gradient of one device; parameters and the optimizer's state are cut."""
    with on_all_devices():
        compare_four_devices(file)


def compare_four_devices(file: str) -> None:
    logprobs, grads, _ = gradient(num_devices=4)
    expected = np.load(file)
    np.testing.assert_allclose(logprobs, expected["logprobs"], atol=2e-5)
    for i, x in enumerate(jax.tree.leaves(grads)):
        assert np.linalg.norm(x - expected[f"grad{i}"]) < 1e-5 * np.linalg.norm(expected[f"grad{i}"])
    model, params = load(TINY)
    optimizer = minimal.make_optimizer(SETTINGS)
    _, grads, _ = gradient(num_devices=4)
    params, state, _ = minimal.apply_gradients(optimizer, params, optimizer.init(params), grads)
    for x in jax.tree.leaves((params, state)):
        if x.size > 1000:
            assert x.addressable_shards[0].data.size == x.size // 4
    batch, _ = rollouts()
    settings, model = SETTINGS._replace(prompt_length=P), model._replace(stop_ids=tuple(range(0, 512, 24)))
    rows = jax.device_put((batch.tokens[:, :P], batch.starts), PartitionSpec("devices"))
    tokens, logprobs, lengths = minimal.sample(settings, model, params, *rows, jax.random.key(0))
    assert tokens.addressable_shards[0].data.shape == (4, A)  # each device samples its own rows
    mask = np.arange(A) < np.asarray(lengths)[:, None]
    sampled = batch._replace(tokens=np.concatenate([rows[0], tokens], axis=1), mask=mask)
    sampled = jax.device_put(sampled, PartitionSpec("devices"))
    found = np.asarray(minimal.token_logprobs(settings, model, params, sampled))
    assert not mask.all()
    np.testing.assert_allclose(found[mask], np.asarray(logprobs)[mask], atol=5e-5)


@pytest.mark.slow
def test_four_devices_compute_what_one_does(tmp_path):
    logprobs, grads, _ = gradient()
    arrays = {f"grad{i}": x for i, x in enumerate(jax.tree.leaves(grads))}
    np.savez(tmp_path / "one.npz", logprobs=logprobs, **arrays)
    on_four_devices(__file__, f"check_four_devices({str(tmp_path / 'one.npz')!r})")


def run_alone(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Runs a copy of the file in a folder that holds nothing else but a model."""
    shutil.copy(minimal.__file__, folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "minimal.py", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_it_runs_alone_in_a_folder(tmp_path):
    shutil.copytree(TINY, tmp_path / "models/tiny")
    sizes = "--groups_per_batch 2 --group_size 4 --ppo_minibatch 8 --num_generation_tokens 32 --num_eval_tasks 4"
    done = run_alone(tmp_path, *sizes.split(), "--max_steps", "1", "--save_dir", "trained")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        ["step", "0", "held-out"],
        ["step", "1", "reward"],
        ["step", "1", "held-out"],
    ]
    assert (tmp_path / "trained/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "config", "sentence"),
    [
        (["--model_dir", "nowhere"], {}, "nowhere is no Hugging Face folder"),
        (["--env_name", "chess"], {}, "--env_name chess: give countdown or gsm8k"),
        (["--ppo_minibatch", "60"], {}, "--ppo_minibatch: 60 does not divide the 256 rows"),
        (["--prompt_length", "4"], {}, "more tokens than --prompt_length 4: raise it"),
        (["--env_name", "gsm8k"], {}, "there is no test.jsonl"),
        ([], {"model_type": "mamba"}, "mamba is none of llama, qwen2 and qwen3"),
        ([], {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling (yarn) is not computed here"),
        ([], {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized weights are not computed here"),
    ],
)
def test_a_mistake_is_one_sentence(options, config, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # paths of the defaults are relative
    shutil.copytree(TINY, tmp_path / "models/tiny")
    file = tmp_path / "models/tiny/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    given = dict(zip([name[2:] for name in options[::2]], options[1::2], strict=True))
    defaults = minimal.Settings._field_defaults
    with pytest.raises(SystemExit, match="^error: ") as error:
        minimal.main(minimal.Settings(**{name: type(defaults[name])(value) for name, value in given.items()}))
    assert sentence in str(error.value)
