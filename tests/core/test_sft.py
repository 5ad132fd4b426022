"""Supervised fine-tuning: what is trained, its loss and gradient, runs that resume, rows that are refused."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from core import eval, sft
from core.learner import Learner, make_learner
from core.objectives import set_loss_denominators
from core.records import Batch
from core.run.folder import settings_of_adapters, settings_of_model
from core.sampler import SamplingConfig
from core.sft import SFTConfig
from envs import make_env
from envs.own.written import DataConfig, read_written
from models import decoder
from models.architecture import Decoder
from models.checkpoint import load_policy
from models.conversations import describe_prompts, encode_conversation, encode_rows
from models.names import Params, make_policy
from models.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import ROOT, rounding, slow, train_here, write_jsonl
from tests.kill_runs import arguments, checksum, difference, records
from tests.processes import on_four_devices
from utils.devices.sharding import single_device
from utils.evaluation.losses import loss_metrics
from utils.settings.config import make_config, options_of, parse, to_dict
from utils.settings.errors import UserError, user_errors

TINY = ROOT / "models/tiny"
SYSTEM, ASK, AGAIN = (
    {"role": role, "content": text}
    for role, text in (
        ("system", "Be short."),
        ("user", "Use 3 4 to make 7."),
        ("user", "Once more, <|im_end|> please."),
    )
)
SUM, SWAPPED = ({"role": "assistant", "content": text} for text in ("3+4=7", "<think>4+3</think><answer>4+3</answer>"))
THREE_TURNS = [SYSTEM, ASK, SUM, AGAIN, SWAPPED, ASK, {"role": "assistant", "content": "7\n"}]
CLOSED = "<think>\n\n</think>\n\n"  # what models/tiny writes before a reply without thinking
MARKED = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% if '</think>' not in m.content %}CLOSED{% endif %}{% generation %}{{ m.content }}\
<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"""
MARKED = MARKED.replace("CLOSED", CLOSED)


def run(folder: Path, **flags) -> int:
    """Runs core/sft.py in this process; returns its exit status."""
    try:
        with user_errors():
            sft.main(parse(SFTConfig, arguments(**FLAGS | flags, save_dir=folder)))
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer(TINY)


# What is trained


def test_trained_are_the_tokens_that_transformers_marks(tiny, monkeypatch):
    """TRL's assistant_only_loss trains those between {% generation %} and {% endgeneration %} of a template."""
    messages = [{**message, "content": message["content"].replace("<|im_end|>", "and")} for message in THREE_TURNS]
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)  # marks
    marked = tiny.hf.apply_chat_template(
        messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    found = encode_conversation(tiny, messages)
    num_tokens = len(found)
    assert tiny.hf.decode(marked["input_ids"][num_tokens:]) == "\n", "a row ends with the last reply"
    assert found.tokens.tolist() == marked["input_ids"][:num_tokens]
    expected = np.array(marked["assistant_masks"][:num_tokens], bool)
    assert found.mask.tolist() == expected.tolist()
    assert found.tokens[found.mask][-1] == tiny.special_ids["<|im_end|>"]


def test_what_messages_spell_ends_no_reply(tiny):
    """Special tokens in a message are those of transformers; what is trained is the whole of each reply."""
    spelled = [ASK, {"role": "assistant", "content": "a<|im_end|>b"}, AGAIN, SUM]
    row = encode_conversation(tiny, spelled)
    end = tiny.special_ids["<|im_end|>"]
    assert row.tokens.tolist().count(end) == 6, "one for each message, and those that two of them spell"
    assert tiny.hf.decode(row.tokens[row.mask]) == "a<|im_end|>b<|im_end|>3+4=7<|im_end|>"


TEMPLATES = {  # of the tokenizer of models/tiny: what rows of three turns, or of one, are refused for
    "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}": (
        "row 1: the model's chat template begins a demonstration differently",
        "begins a demonstration differently",
    ),
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}": (
        "does not show messages of the role assistant",
        "does not show messages of the role assistant",
    ),
    "{{ raise_exception('no system') if messages[0].role == 'system' else messages[0].content }}": (
        "row 1: the model's chat template fails .TemplateError: no system",
        "does not show messages of the role assistant",
    ),
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}": (
        "begins replies with <think>: write </think>",
        "begins replies with <think>",
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_cannot_be_split_is_refused(tiny, template):
    hf = load_tokenizer(TINY).hf
    hf.chat_template = template
    for messages, words in zip((THREE_TURNS, [ASK, SUM]), TEMPLATES[template], strict=True):
        with pytest.raises(UserError, match=words):
            encode_rows(replace(tiny, hf=hf), "rows", [messages], 99, "error")


def test_thinking_is_opened_once_if_the_template_opens_it(tiny):
    hf = load_tokenizer(TINY).hf
    hf.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}" + (
        "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    for reply in ("<think>\nno</think>7", "no</think>7"):
        row = encode_conversation(replace(tiny, hf=hf), [ASK, {"role": "assistant", "content": reply}])
        assert tiny.hf.decode(row.tokens) == "Use 3 4 to make 7.<|im_end|><think>\nno</think>7<|im_end|>"
        assert tiny.hf.decode(row.tokens[row.mask]) == "no</think>7<|im_end|>"


def test_an_environment_with_other_prompts_is_named(tiny):
    (warning,) = describe_prompts(tiny, False, True)
    assert CLOSED in warning.encode().decode("unicode_escape")
    assert "--env_options thinking=off" in warning
    assert describe_prompts(tiny, True, True) == describe_prompts(replace(tiny), False, False) == []


def test_long_rows_are_refused_cut_or_dropped_and_counted(tiny):
    rows = [[ASK, SUM], THREE_TURNS, [{"role": "user", "content": "x" * 400}, SUM]]
    lengths = [len(encode_conversation(tiny, row)) for row in rows]
    most = lengths[0] + 20
    with pytest.raises(UserError, match=f"2 of 3 rows have more than --max_length {most} .* {max(lengths)}: raise"):
        encode_rows(tiny, "rows", rows, most, "error")
    cut = ([lengths[0], most], "1 cut and 1")
    dropped = (lengths[:1], "0 cut and 2")
    for long_rows, (expected, words) in {"cut": cut, "drop": dropped}.items():
        kept, note = encode_rows(tiny, "rows", rows, most, long_rows)
        assert list(map(len, kept)) == expected
        assert f"{words} dropped at {most} tokens" in note
    with pytest.raises(UserError, match="no row has a reply within --max_length 5 tokens"):
        encode_rows(tiny, "rows", rows, 5, "cut")


# Loss and gradient


near = partial(np.testing.assert_allclose, atol=1e-5)
CONVERSATIONS = [
    [ASK, SUM, ASK, SWAPPED],
    [ASK, SWAPPED, ASK, SUM],
    [ASK, SUM, ASK, SWAPPED, ASK, SUM],
]
SMALL = {"data": "-", "batch_size": 3, "tokens_per_microbatch": 192, "remat": "none"}
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def batch_of_conversations(tokenizer: Tokenizer) -> Batch:
    tokenizer.hf.chat_template = PLAIN_TEMPLATE
    rows, _ = encode_rows(tokenizer, "rows", CONVERSATIONS, 512, "error")
    return sft.make_batch(rows)


def nats_of_all_logits(model: Decoder, policy: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the mean of -log softmax over the marked tokens of padded rows, without packing, and all logits."""
    logits = decoder.logits(model, policy, batch.tokens)[:, :-1]
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.tokens[:, 1:, None], axis=-1)[..., 0]
    return -(logprobs * batch.mask[:, 1:]).sum() / batch.mask.sum(), logits


def nats_in_float64(logits: jax.Array, batch: Batch) -> float:
    whole = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(whole, batch.tokens[:, 1:, None], axis=-1)[..., 0]
    return -chosen[batch.mask[:, 1:]].mean()


def sums_of_microbatches(learner: Learner, params: Params, batch: Batch) -> tuple[Params, float]:
    """Returns the gradient and the loss that several micro-batches add up to."""
    chains = [list(chain) for chain in learner.chains(batch, learner.shapes)]
    assert sum(map(len, chains)) > 1, "several micro-batches"
    gradient = jax.tree.map(jnp.zeros_like, params)
    loss = 0.0
    for chain in chains:
        (sums, part), _ = learner.add_up(params, iter(chain))
        gradient = jax.tree.map(jnp.add, gradient, sums)
        loss += float(part)
    return gradient, loss


@pytest.mark.parametrize("rank", [0, *slow(2)])
def test_loss_and_gradient_are_those_of_all_logits(rank):
    config = replace(make_config(SFTConfig, **SMALL, lora_rank=rank), sampling=SamplingConfig(prompt_length=1))
    layout = single_device()
    model, base, params, tokenizer = load_policy(FLAGS["model_dir"], config.lora, 0, layout, "float32")
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(1), x.shape), params)
    batch = batch_of_conversations(tokenizer)
    T = batch.tokens.shape[1]
    oracle = jax.value_and_grad(
        lambda params: nats_of_all_logits(model, make_policy(base, params), batch), has_aux=True
    )
    (_, logits), gradient = jax.jit(oracle)(params)
    expected = nats_in_float64(logits, batch)
    learner, state = make_learner(config, model, params, layout, T - 1, base=base)
    minibatch = set_loss_denominators(batch, 3, T, config.objective.policy)
    found, loss = sums_of_microbatches(learner, state.params, minibatch)
    held_out = loss_metrics(learner.compute_outputs(learner.policy(params), batch).logprobs, batch.mask)
    near(loss, expected)
    near(held_out["test_data/loss"], expected)
    assert_trees_all_close(found, gradient, rtol=1e-5, atol=1e-5)


def test_interval_of_held_out_loss_holds_the_loss_of_all():
    """In 95 of 100 samples of 60 rows, whose lengths and losses go together."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 4000)
    mask = np.arange(40) < lengths[:, None]
    logprobs = -rng.exponential(1 + lengths[:, None] / 20, mask.shape)
    truth = -logprobs[mask].mean()
    samples = [rng.choice(len(mask), 60, replace=False) for _ in range(400)]
    found = [loss_metrics(logprobs[rows], mask[rows]) for rows in samples]
    hits = [abs(x["test_data/loss"] - truth) < x["test_data/loss_ci"] for x in found]
    assert 0.91 < np.mean(hits) < 0.98


# Rows


@pytest.mark.parametrize("fraction", [0.05, 0.15, 0.35, 0.5, 0.7, 0.95])
def test_share_of_prompts_that_is_held_out_is_as_given(tmp_path, fraction):
    rows = [{"prompt": f"Say {i}.", "completion": f"{i} {k}"} for i in range(100) for k in range(1 + i % 3)]
    data, tests = read_written(DataConfig(str(write_jsonl(tmp_path / "rows.jsonl", rows)), test_fraction=fraction))
    trained, held_out = ({messages[0]["content"] for messages in part} for part in (data.env.conversations, tests))
    assert len(held_out) == round(100 * fraction)
    assert len(trained | held_out) == 100
    assert not trained & held_out
    assert len(tests) + data.env.num_tasks == len(rows)


def test_sft_and_dataset_hold_out_the_same_rows(tmp_path):
    rows = [{"prompt": f"Say {i}.", "completion": str(i), "answer": str(i)} for i in range(60)]
    more = [{**row, "completion": f"another {k}"} for i, row in enumerate(rows) for k in range(i % 5)]
    file = write_jsonl(tmp_path / "rows.jsonl", [*rows, *more])
    data, tests = read_written(DataConfig(str(file)))
    of_env = make_env("dataset-test", path=str(file))
    prompts = {of_env.problem(i).messages[0]["content"] for i in range(of_env.num_tasks)}
    held_out = {messages[0]["content"] for messages in tests}
    assert held_out == prompts
    assert len(held_out) == 6
    assert not held_out & {messages[0]["content"] for messages in data.env.conversations}
    other = write_jsonl(tmp_path / "tests.jsonl", rows[:3])
    data, tests = read_written(DataConfig(str(file), test_data=str(other)))
    assert len(tests) == 3
    assert data.env.num_tasks == len(rows + more) - 3 - (0 + 1 + 2), "with their other replies"
    data, tests = read_written(DataConfig(str(file), test_fraction=0.0))
    assert (tests, data.env.num_tasks) == ([], len(rows + more)), "a prompt may have several replies"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "name the replies to train on"),
        ({"data": "rows.jsonl", "test_fraction": 1.0}, "--test_fraction from 0 to below 1"),
        ({"data": "no.jsonl"}, "there is no file no.jsonl"),
        ({"data": "x", "num_epochs": 0}, "give --num_epochs or --max_steps"),
        ({"data": "x", "batch_size": 0}, "--batch_size must be at least 1"),
        ({"data": "x", "save_best": True}, "--save_best chooses by a held-out score: give --env_name"),
        ({"data": "x", "long_rows": "pad"}, "must be one of error, cut, drop"),
    ],
)
def test_a_wrong_option_is_refused_in_a_sentence(options, words):
    with pytest.raises(UserError, match=words):
        read_written(make_config(SFTConfig, **options).data)


# Runs

FLAGS = {
    "model_dir": ROOT / "tests/fixtures/qwen3-tied",
    "batch_size": 4,
    "num_epochs": 1,
    "lr": 1e-3,
    "adam_eps": 1e-2,
    "tokens_per_microbatch": 256,
    "test_interval": 2,
    "save_interval": 0,
    "lr_schedule": "constant",
    "num_eval_tasks": 3,
    "num_generation_tokens": 8,
    "num_score_workers": 1,
    "max_length": 64,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rows = [{"prompt": f"{i} + 1 = ", "completion": f"{i + 1}"} for i in range(12)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


@pytest.mark.parametrize("flags", [{"env_name": "poem"}, *slow({"lora_rank": 2})], ids=["full", "lora"])
def test_a_resumed_run_is_the_one_that_never_stopped(data, tmp_path, flags):
    """To the bit."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert run(whole, data=data, **flags) == 0
    assert run(parts, data=data, **flags, max_steps=2) == 0
    assert run(parts, data=data, **flags, max_steps=3) == 0
    assert records(whole) == records(parts)
    assert len(records(whole)) == 4
    assert checksum(whole, 3) == checksum(parts, 3)
    losses = [record["test_data/loss"] for record in records(whole) if "test_data/loss" in record]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert ("test_env/return" in records(whole)[-1]) == ("env_name" in flags)
    card = (whole / "step3/README.md").read_text()
    assert "# sums by supervised fine-tuning, step 3" in card
    assert "- sft" in card
    assert "| loss of held-out replies, nats a token | " in card
    (command,) = (line for line in card.splitlines() if line.startswith("python core/sft.py "))
    again = to_dict(parse(SFTConfig, shlex.split(command)[2:], implied=settings_of_adapters))
    logged = json.loads((whole / "config.json").read_text())
    known = {name for name, option in options_of(SFTConfig).items() if not option.resumable}
    assert {name: again[name] for name in known} == {name: logged[name] for name in known}
    assert "Loss of demonstrations" in (whole / "report.html").read_text()
    played = eval.settings_of_run({"model_dir": str(whole)})  # what core/eval.py plays
    assert played.get("env_name") == flags.get("env_name")


@pytest.mark.parametrize("flags", [{}, *slow({"lora_rank": 2})], ids=["full", "lora"])
def test_its_folder_is_where_rl_starts(data, tmp_path, flags):
    assert run(tmp_path / "sft", data=data, **flags, max_steps=1, test_fraction=0.0) == 0
    rl = {"groups_per_batch": 1, "group_size": 2, "ppo_minibatch": 2, "max_steps": 1, "max_resampling": 1}
    rl |= {"model_dir": tmp_path / "sft", "env_name": "poem", "num_generation_tokens": 8, "num_score_workers": 1}
    implied = settings_of_model({"model_dir": str(tmp_path / "sft")})  # of core/grpo.py: adapters are trained on
    assert implied.get("lora_rank", 0) == flags.get("lora_rank", 0)
    assert train_here(tmp_path / "rl", **rl | implied, do_group_filter=0) == 0
    found = json.loads((tmp_path / "rl/config.json").read_text())["model_dir"]
    assert found == str(tmp_path / "sft/step1")


@pytest.mark.parametrize(("name", "words"), [("data", "own is"), ("test_data", "held-out data is 5 conversations")])
def test_other_rows_do_not_resume_a_run(name, words, data, tmp_path, capsys):
    rows = [{"prompt": f"{i}, ", "completion": f"{i + 1}"} for i in range(5)]
    files = {"data": data} | {name: write_jsonl(tmp_path / "own.jsonl", rows)}
    assert run(tmp_path / "run", **files, max_steps=1) == 0
    write_jsonl(files[name], [row | {"completion": "no"} for row in rows])
    assert run(tmp_path / "run", **files, max_steps=2) == 2
    assert f"other data, {words}" in capsys.readouterr().err


def runs_on_a_mesh(folder: str, data: str) -> None:
    for mesh in ("data=4", "fsdp=2,tp=2"):
        found = run(Path(folder) / mesh, data=data, mesh=mesh, model_dir=ROOT / "tests/fixtures/qwen3-sharded")
        assert found == 0


@pytest.mark.slow
def test_a_mesh_changes_rounding_only(data, tmp_path):
    assert run(tmp_path / "one", data=data, model_dir=ROOT / "tests/fixtures/qwen3-sharded") == 0
    on_four_devices(__file__, f"runs_on_a_mesh({str(tmp_path)!r}, {str(data)!r})")
    for mesh in ("data=4", "fsdp=2,tp=2"):
        assert difference(tmp_path / mesh, tmp_path / "one", 3) < 20 * rounding(1000)


@pytest.mark.slow
def test_example_of_the_docs_ends_in_what_they_say(tmp_path):
    """Its last lines, not only its exit status; two runs of under a minute."""
    page = (ROOT / "docs/tasks.md").read_text()
    (block,) = (block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "make_replies.py" in block)
    for name in ("core", "models", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = "set -e\n" + block.replace("python ", f"{sys.executable} ")
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    verdict = r"^Learned: held-out correct answers went from ([\d.]+)% .* to ([\d.]+)%"
    verdicts = re.findall(verdict, done.stdout, re.MULTILINE)
    (before, after), (start, end) = [tuple(map(float, pair)) for pair in verdicts]
    assert before == 0
    assert 5 < after < 20
    assert start == after
    assert end > start + 2
    assert "warning" not in done.stdout + done.stderr
