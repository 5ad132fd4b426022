"""Distillation: divergences against float64, updates against whole logits, prompts of the teacher, its average, runs.

Letters: B rows, T row length, V vocabulary; p the policy, q the teacher.
"""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.advantages import compute_advantages
from core.config import Config
from core.extensions import teacher as teachers
from core.extensions.teacher import (
    SHOWN,
    Prefix,
    StateLearner,
    TaughtLearner,
    make_prefix,
    successful_siblings,
)
from core.learner import Learner, accumulate
from core.records import Batch, Episodes
from core.terms.distill import TEACHER_LOGPROBS, ComparedDistribution
from envs.base import Problem
from models import decoder
from models.names import EMBED, HEAD, TEACHER, Params
from models.speed import training_flops
from models.tokenizer import load_tokenizer
from tests.helpers import MODEL, Letters, assert_close, random_params, slow, train_here
from tests.kill_runs import FLAGS, ROOT, checksum, records
from tests.learning import SGD, assert_same_gradient, first_state, make_learner, random_batch
from tests.oracles.divergences import divergence64, log_softmax
from tests.processes import on_four_devices
from utils.devices.sharding import Layout, single_device
from utils.devices.startup import DeviceConfig, make_layout
from utils.settings.config import make_config, parse, with_options
from utils.settings.errors import UserError
from utils.settings.groups import BETAS, SAMPLED, SIBLING

FIXTURES = ROOT / "tests" / "fixtures"
OTHER = replace(MODEL, hidden_size=24, intermediate_size=40, num_hidden_layers=1, tie_word_embeddings=True)
CONFIG = make_config(
    Config,
    teacher="another",
    advantage="none",
    entropy_coef=0.0,
    temperature=0.8,
    groups_per_batch=2,
    group_size=4,
    ppo_minibatch=0,
    num_generation_tokens=50,
    do_group_filter=False,
)
scores_of = jax.jit(decoder.token_outputs, static_argnums=0)
KINDS = {"forward": 0.0, "reverse": 1.0, "jsd 0.1": 0.1, "jsd 0.5": 0.5, "jsd 0.9": 0.9}


# Formulas


def random_logits(V: int = 300) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(np.float32(rng.normal(0, 2, (5, V))) for _ in range(2))


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_and_gradients_equal_float64(kind):
    p, q = random_logits()
    distribution = ComparedDistribution(temperature=0.7, beta=KINDS[kind])
    tokens = np.arange(5, dtype=np.int32)

    def total(p):
        outputs = distribution.outputs(p, tokens, extras={TEACHER: q})
        return outputs.divergence.sum(), outputs

    (_, outputs), gradient = jax.value_and_grad(total, has_aux=True)(p)
    expected, slope = divergence64(p / 0.7, q / 0.7, KINDS[kind])
    np.testing.assert_allclose(outputs.divergence, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope / 0.7, atol=1e-5 * np.abs(slope).max())
    np.testing.assert_allclose(outputs.teacher_logprobs, log_softmax(q / 0.7)[tokens, tokens], rtol=1e-5)


# Updates


class Spelled(Letters):
    """Letters, with a system message between the ids 5, 6 and 7."""

    def chat(self, messages, *options) -> list[int]:
        start = [5, 6, *self.encode(messages[0]["content"]), 7] if len(messages) > 1 else []
        return start + self.encode(messages[-1]["content"])


def taught(layout: Layout | None = None, prefix: str = "", tokens: int = 128, **options) -> TaughtLearner:
    """A learner with a teacher of another shape, which reads a prefix."""
    config = with_options(CONFIG, teacher_prefix=prefix, **options)
    own = vars(make_learner(config, SGD, layout, tokens)) | {"config": config}
    is_sampled = config.distill.distill == SAMPLED
    teacher = (Learner if is_sampled else StateLearner)(**own | {"model": replace(OTHER, mesh=own["model"].mesh)})
    params = random_params(OTHER)
    beside = {} if is_sampled else {TEACHER: params[EMBED]}
    shown = Prefix(Spelled(), prefix)
    return TaughtLearner(**own | {"beside": beside}, teacher=teacher, policy_of_teacher=params, prefix=shown)


def fresh_batch() -> Batch:
    return replace(random_batch(), old_logprobs=None, advantages=None, rollout=np.arange(8))


def episodes() -> SimpleNamespace:
    """What a teacher reads of the episodes of `fresh_batch`."""
    batch, letters = random_batch(), Letters()
    prompts = [letters.decode(row[:n]) for row, n in zip(batch.tokens, batch.prompt_lengths, strict=True)]
    texts = [letters.decode(row[mask]) for row, mask in zip(batch.tokens, batch.mask, strict=True)]
    problems = [Problem([{"role": "user", "content": prompt}]) for prompt in prompts]
    return SimpleNamespace(problems=problems, texts=texts)


def taught_gradient(learner: TaughtLearner) -> tuple[dict, dict]:
    """The gradient and the metrics of the one update of a step, by plain descent with rate 1."""
    state, batch = learner.add_logprobs(first_state(learner), fresh_batch(), episodes())
    batch = compute_advantages(batch, learner.config.objective)
    state, update = learner.update(state, batch, 0.0)
    return jax.tree.map(lambda old, new: old - np.asarray(new), random_params(), state.params), learner.read(update)


PROMPTS = [[5, 6, *map(ord, "rule"), 7]] * 8
SIBLINGS = 1, -1, 1, 1, 5, 4, 4, 4  # by the rewards 0, 1, 0.1, 0.1 and 1, 1, 0, 0


def sibling_prompts(batch: Batch) -> list[list[int]]:
    shown = [batch.tokens[row][batch.mask[row]].tolist() for row in SIBLINGS]
    texts = [[*map(ord, SHOWN)] + ids for ids in shown]
    return [[5, 6, *text, 7] if row >= 0 else [] for row, text in zip(SIBLINGS, texts, strict=True)]


def teacher_logprobs(batch: Batch, prefixes: list[list[int]]) -> np.ndarray:
    """Returns the teacher's log-probabilities [B, T - 1, V], each row read behind its prefix."""
    rows = [np.array([*prefix, *row]) for prefix, row in zip(prefixes, batch.tokens, strict=True)]
    width = max(map(len, rows))
    padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype(np.int32)
    logits = np.asarray(decoder.logits(OTHER, random_params(OTHER), padded))
    T = batch.tokens.shape[1]
    starts = [len(prefix) for prefix in prefixes]
    return np.stack([log_softmax(x[n : n + T - 1] / 0.8) for x, n in zip(logits, starts, strict=True)])


def distances(log_p: jax.Array, log_q: np.ndarray, beta: float) -> jax.Array:
    """Returns the divergence of each token by its definition: forward KL, reverse KL or that of Jensen and Shannon."""
    p, q = jnp.exp(log_p), np.exp(log_q)
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1)
    if beta == 1:
        return (p * (log_p - log_q)).sum(-1)
    log_m = jnp.log((1 - beta) * p + beta * q)
    return ((1 - beta) * p * (log_p - log_m) + beta * q * (log_q - log_m)).sum(-1)


def whole_gradient(kind: str, beta: float, prefixes: list[list[int]], is_taught: np.ndarray) -> tuple[dict, dict]:
    """From the logits of all tokens of both models, each row of the teacher's behind its prefix."""
    batch = fresh_batch()
    log_q = teacher_logprobs(batch, prefixes)
    tokens = batch.tokens[:, 1:, None]
    mask = batch.mask[:, 1:] & (is_taught[:, None] > 0)
    of_q = np.take_along_axis(log_q, tokens, axis=-1)[..., 0]

    def loss(params: Params) -> jax.Array:
        log_p = jax.nn.log_softmax(decoder.logits(MODEL, params, batch.tokens)[:, :-1] / 0.8)
        if kind == SAMPLED:
            of_p = jnp.take_along_axis(log_p, tokens, axis=-1)[..., 0]
            of_tokens = -(of_q - batch.sample_logprobs[:, 1:]) * of_p
        else:
            of_tokens = distances(log_p, log_q, beta)
        return (of_tokens * mask).sum() / batch.mask.sum()

    value, gradient = jax.value_and_grad(loss)(random_params())
    return gradient, {"distill/divergence": value, "distill/teacher_logprob": (of_q * mask).sum() / batch.mask.sum()}


CASES = ["reverse", *slow("forward", "jsd", SAMPLED)]


@pytest.mark.parametrize("kind", CASES)
def test_an_update_is_that_of_whole_logits(kind, monkeypatch):
    """Through micro-batches, packing and chunks of the head, with prompts of the teacher that differ by row."""
    # The head computes a few tokens at a time.
    monkeypatch.setattr("models.logits.LOGIT_ELEMENTS", 30 * MODEL.vocab_size)
    prefix = "rule" if kind in ("forward", SAMPLED) else SIBLING
    coef = 20.0 if kind == "jsd" else 0.5  # far apart, models have a JSD of nearly its maximum: small gradients
    learner = taught(prefix=prefix, distill=kind, distill_coef=coef)
    gradient, metrics = taught_gradient(learner)
    is_taught = np.array(SIBLINGS) >= 0 if prefix == SIBLING else np.ones(8)
    prefixes = sibling_prompts(fresh_batch()) if prefix == SIBLING else PROMPTS
    expected, told = whole_gradient(kind, BETAS.get(kind, 1.0), prefixes, is_taught)
    assert_same_gradient(gradient, jax.tree.map(lambda x: coef * x, expected))
    if kind != SAMPLED:
        assert_close(metrics["distill/divergence"], told["distill/divergence"], 2000, 20)
        assert metrics["loss"] == pytest.approx(coef * metrics["distill/divergence"], rel=1e-5), "and nothing else"
    assert_close(metrics["distill/teacher_logprob"], told["distill/teacher_logprob"], 2000, 20)
    batch = fresh_batch()
    num_tokens = sum(packing.num_tokens for chain in learner.chains(batch, learner.shapes) for *_, packing in chain)
    of_teacher = 0 if kind == SAMPLED else 2 * OTHER.vocab_size * OTHER.hidden_size * batch.mask.sum()
    expected = training_flops(MODEL, batch.lengths, num_tokens, batch.mask.sum()) + of_teacher
    assert metrics["speed/flops"] == pytest.approx(expected), "with the teacher's logits"


def test_the_sampled_term_is_added_behind_what_rewards_become(monkeypatch):
    """Equal rewards teach, and neither whitening nor the z-score of a group or a batch can erase the teacher."""
    learner = taught(distill=SAMPLED, distill_coef=0.5)
    found = []
    # Keeps the batch that an update would get.
    monkeypatch.setattr(Learner, "update", lambda self, state, minibatch, done: found.append(minibatch))
    state = first_state(learner)
    _, batch = learner.add_logprobs(state, replace(fresh_batch(), rewards=np.ones(8, np.float32)))
    gain = np.where(batch.mask, 0.5 * (batch.extras[TEACHER_LOGPROBS] - batch.sample_logprobs), 0)
    for name in ("none", "group_zscore", "group_mean", "batch_zscore", "reinforce++_baseline"):
        for other in ({}, {"do_global_normalization": True}, {"negative_advantage_multiplier": 0.0}):
            objective = with_options(CONFIG.objective, advantage=name, **other)
            learner.update(state, compute_advantages(batch, objective), 0.0)
            np.testing.assert_array_equal(found[-1].advantages, np.float32(gain))
    assert np.abs(gain).max() > 1
    objective = replace(CONFIG.objective, advantage="reinforce")
    learner.update(state, compute_advantages(batch, objective), 0.0)
    np.testing.assert_allclose(found[-1].advantages, np.where(batch.mask, 1 + gain, 0), rtol=1e-6)
    _, batch = learner.add_logprobs(state, replace(fresh_batch(), rewards=np.full(8, np.nan, np.float32)))
    assert len(compute_advantages(batch, CONFIG.objective)) == 8, "where rewards are not needed, they may fail"


def test_siblings_that_succeeded():
    rewards = np.float32([0, 1, 0.1, 0.1, 1, 1, 0, np.nan])
    assert successful_siblings(rewards, 4).tolist() == [*SIBLINGS]
    assert successful_siblings(rewards, 2).tolist() == [1, -1, -1, -1, 5, 4, -1, -1]


@pytest.mark.slow
def test_logits_of_no_model_are_whole(optimized, monkeypatch):
    """Neither in an update nor of the teacher, which has no logits before."""
    # The head computes a few tokens at a time.
    monkeypatch.setattr("models.logits.LOGIT_ELEMENTS", 2 * 8 * MODEL.vocab_size)
    learner = taught(tokens=512)
    state, batch = learner.add_logprobs(first_state(learner), fresh_batch())
    batch = replace(compute_advantages(batch, CONFIG.objective), entropies=None, rollout=None)
    batch = replace(batch, denominator=np.ones(8, np.float32), num_tokens=np.ones(8, np.float32))
    ((_, *arrays),) = list(learner.chains(batch, learner.shapes)[0])
    microbatch, packing = learner.layout.put(arrays)
    sums = jax.tree.map(jnp.zeros_like, state.params), np.float32(0)
    settings = learner.model, CONFIG.objective.loss, learner.distribution, state.params, sums, microbatch, packing
    text = accumulate.lower(*settings, {}, learner.beside).compile().as_text()
    text += teachers.hidden_states.lower(OTHER, random_params(OTHER), microbatch.tokens, packing).compile().as_text()
    assert most_columns(text) == MODEL.hidden_size < microbatch.mask.sum() / 2, "heads and chunks of 8, no [B, T, V]"


def most_columns(program: str) -> int:
    """Returns how many columns the largest array of a program has that is as wide as the vocabulary."""
    shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"f32\[([\d,]+)\]", program)]
    return max(math.prod(dims) // MODEL.vocab_size for dims in shapes if MODEL.vocab_size in dims)


def gradient_on_four_devices(file: str, mesh: str) -> None:
    gradient, _ = taught_gradient(taught(make_layout(DeviceConfig(mesh=mesh)), SIBLING, tokens=256))
    np.savez(file, *jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", "data=2,fsdp=2"])
def test_an_update_does_not_depend_on_the_devices(mesh, tmp_path):
    on_four_devices(__file__, f"gradient_on_four_devices({str(tmp_path / 'gradient.npz')!r}, {mesh!r})")
    with np.load(tmp_path / "gradient.npz") as arrays:
        found = list(arrays.values())
    assert_same_gradient(found, jax.tree.leaves(taught_gradient(taught(prefix=SIBLING, tokens=256))[0]))


# Runs


RUN = FLAGS | {
    "ppo_minibatch": 0,
    "num_generation_tokens": 8,
    "test_env_name": "",
    "max_steps": 2,
    "do_group_filter": 1,
    "prompt_length": 64,
}
AVERAGE = {"teacher": "self", "teacher_decay": 0.5, "teacher_prefix": "ab", "advantage": "none", "group_size": 1}


@pytest.mark.parametrize("flags", [{"lora_rank": 2}, *slow({}, {"ahead": 1}, {"teacher_decay": 0.0})], ids=str)
def test_a_resumed_run_equals_one_that_was_not_stopped(flags, tmp_path):
    """With an average of policies as the teacher, of adapters or of all parameters, and groups of one."""
    for name, stops in {"whole": [2], "stopped": [1, 2]}.items():
        for num_steps in stops:
            assert train_here(tmp_path / name, **RUN | AVERAGE | flags | {"max_steps": num_steps}) == 0
    assert len({checksum(tmp_path / name, 2) for name in ("whole", "stopped")}) == 1
    metrics = records(tmp_path / "whole")[-1]
    assert metrics["distill/divergence"] > 0
    assert metrics["num_rows"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"teacher": FIXTURES / "qwen3-wide-heads"},  # beside the rewards, which are often equal
        {"teacher": FIXTURES / "qwen3-wide-heads", "distill": SAMPLED, "advantage": "batch_zscore"},
        {"teacher": FIXTURES / "qwen3-tied", "advantage": "gae", "distill": "jsd"},
        {"teacher": FIXTURES / "lora-qwen3", "lora_rank": 2, "kl_coef": 0.1, "ppo_epochs": 2},
        {"teacher": "self", "teacher_prefix": SIBLING, "num_generation_tokens": 4},
        {"teacher": "self", "teacher_decay": 0.5, "distill": SAMPLED},
        {"teacher": "self", "teacher_prefix": "ab", "distill": SAMPLED, "ppo_minibatch": 4},
    ],
    ids=str,
)
def test_what_distillation_goes_with(flags, tmp_path, capsys):
    assert train_here(tmp_path / "run", **RUN | flags) == 0
    last = records(tmp_path / "run")[-1]
    assert last["num_rows"] == 8
    assert last["grad_norm"] > 0
    assert last["distill/rows_not_taught"] == 0
    assert "teacher q: " in capsys.readouterr().out


REFUSED = {
    "--distill sampled": "has no effect without --teacher",
    "--advantage none": "learns nothing without --teacher",
    "--teacher self": "is the policy itself",
    "--teacher x --teacher_decay 0.9": "give --teacher self",
    "--teacher x --distill_coef 0": "must be above 0",
    "--teacher x --top_k 5": "compares whole distributions",
    "--teacher x --advantage best_k": "drops the other completions",
    "--teacher self --teacher_prefix sibling --group_size 1 --advantage none": "raise --group_size above 1",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_options_that_do_not_fit_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        parse(Config, flags.split())
    assert REFUSED[flags] in capsys.readouterr().err


REFUSED_AT_START = {
    "models/tiny": ({}, "has another vocabulary than the policy"),
    FIXTURES / "nothing": ({}, "there is no folder"),
    "self": ({"teacher_prefix": "ab " * 2000}, "more than the 4096 of the teacher's context"),
    FIXTURES / "qwen3-tied": ({"teacher_prefix": "@nothing.txt"}, "there is no such file"),
}


@pytest.mark.parametrize("teacher", REFUSED_AT_START, ids=str)
def test_a_teacher_that_does_not_fit_is_refused_before_training(teacher, tmp_path, capsys):
    flags, message = REFUSED_AT_START[teacher]
    assert train_here(tmp_path / "run", **RUN | flags | {"teacher": teacher, "lora_rank": 2}) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ("device_memory", "qwen3-wide-heads needs .* GB on each device, and only 0 GB are free"),
        (
            "host_memory",
            "its states of a batch need 0.000147 GB of the host's memory, which has 9e-06 GB: lower --groups_per_batch",
        ),
    ],
)
def test_memory_of_a_teacher_is_checked_before_training(memory, words, tmp_path, capsys, monkeypatch):
    # A device with enough memory, and then one of both with too little.
    monkeypatch.setattr(Layout, "device_memory", 1 << 30)
    monkeypatch.setattr(Layout, memory, 10_000)
    assert train_here(tmp_path / "run", **RUN | {"teacher": FIXTURES / "qwen3-wide-heads"}) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


DEFAULTS = """<|endoftext|>{% if messages[0].role != "system" %}<|im_start|>system
You help.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # of a template that writes a first token, a message of its own, and trims
LAST = """{% for message in messages %}{% if message.role == "system" %}{% set text = message.content %}{% endif %}
{% endfor %}{{ text }}{{ messages[-1].content }}"""  # of one that drops system messages
SUM = {"role": "user", "content": "1 + 1 "}


def worker_of(problem: Problem) -> SimpleNamespace:
    return SimpleNamespace(env=SimpleNamespace(problem=lambda i: problem, has_turns=False), max_new_tokens=9, name="x")


@pytest.mark.parametrize("template", [None, DEFAULTS], ids=["own", "defaults"])
@pytest.mark.parametrize("text", ["Be brief. ", "1+<|im_end|>"])
def test_teacher_reads_what_the_template_renders(template, text):
    tokenizer = load_tokenizer(ROOT / "models" / "tiny")
    tokenizer.hf.chat_template = template or tokenizer.hf.chat_template
    problem = Problem([SUM], thinking=True)
    prefix = make_prefix(text, tokenizer, worker_of(problem))
    messages = [{"role": "system", "content": text}, SUM]
    settings = {"add_generation_prompt": True, "enable_thinking": True, "tokenize": False}
    rendered = tokenizer.hf.apply_chat_template(messages, **settings)
    ids = prefix.prompt(problem, text)
    assert ids == tokenizer.hf.encode(rendered, add_special_tokens=False)
    assert prefix.longest == max(0, len(ids) - len(tokenizer.chat([SUM], True)))


def test_system_message_that_the_template_drops_is_refused():
    tokenizer = load_tokenizer(ROOT / "models" / "tiny")
    tokenizer.hf.chat_template = LAST
    with pytest.raises(UserError, match="does not show messages of the role system"):
        make_prefix("Be brief.", tokenizer, worker_of(Problem([SUM])))


def test_text_precedes_the_prompt_if_there_is_no_template():
    tokenizer = load_tokenizer(ROOT / "models" / "tiny")
    problem = Problem([SUM], plain=True)
    prefix = make_prefix("1+1", tokenizer, worker_of(problem))
    assert tokenizer.hf.decode(prefix.prompt(problem, "1+1")) == "1+1\n1 + 1 "
    assert make_prefix(SIBLING, tokenizer, worker_of(problem)).longest == 9 + len(tokenizer.encode(SHOWN + "\n"))


def test_sibling_is_shown_with_its_prefix_and_forced_answer(tmp_path, monkeypatch):
    """The text that was scored, not the tokens that are trained on."""
    seen = []
    original = Prefix.of_rows

    def of_rows(self, batch: Batch, episodes: Episodes) -> list[list[int]]:
        seen.append((self, batch, episodes, original(self, batch, episodes)))
        return seen[-1][-1]

    # Keeps the prefixes that a run shows the teacher.
    monkeypatch.setattr(Prefix, "of_rows", of_rows)
    monkeypatch.setattr(teachers, "SUCCESS", 0.1)  # what a wrong answer in the right form earns
    options = "numbers=3,min_number=1,max_number=15,max_target=30,prompt=bare,prefix=<think>"
    flags = {"env_name": "countdown", "env_options": options, "num_generation_tokens": 112, "force_answer_at": 88}
    flags |= {"model_dir": "models/tiny", "teacher": "self", "teacher_prefix": SIBLING, "groups_per_batch": 4}
    flags |= {"group_size": 8, "max_steps": 1, "advantage": "none", "max_resampling": 1, "prompt_length": 200}
    assert train_here(tmp_path / "run", **RUN | flags) == 0
    ((prefix, batch, episodes, prompts),) = seen
    siblings = successful_siblings(batch.rewards, 8)
    num_forced = 0
    for prompt, sibling in zip(prompts, siblings, strict=True):
        assert bool(prompt) == (sibling >= 0)
        if prompt:
            text = episodes.texts[sibling]
            assert text.startswith("<think>")
            assert SHOWN + text in prefix.tokenizer.decode(prompt)
            num_forced += bool((~batch.mask[sibling])[batch.prompt_lengths[sibling] : batch.lengths[sibling]].any())
    assert num_forced


def test_ids_that_only_pad_the_teacher_get_no_probability():
    """For whole distributions and for sampled tokens alike, for tied heads and others."""
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12) + 10
    for model in (MODEL, replace(MODEL, tie_word_embeddings=True)):
        params = random_params(model)
        layout = single_device()
        heads = {name: params[name] for name in (EMBED, HEAD) if name in params}
        padded = params | {name: np.pad(x, [(0, 8), (0, 0)], constant_values=9) for name, x in heads.items()}
        found = teachers.without_padding(replace(model, vocab_size=208), padded, 200, layout)
        assert found[0] == model
        np.testing.assert_array_equal(scores_of(*found, tokens).logprobs, scores_of(model, params, tokens).logprobs)
