"""Adapters: against transformers and PEFT, merged and not, over int8, in and out, in a run."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from safetensors.numpy import load_file, save_file

from core.config import Config
from core.grpo import main
from core.rollout import RolloutWorker
from core.run.folder import settings_of_model
from core.sampler import Sampler
from extras.replay import replay
from models import decoder, experts
from models.architecture import Decoder
from models.checkpoint import load_model, load_policy
from models.distribution import Distribution
from models.files import layer_tensor
from models.lora import adapted_layers, merge_stacked
from models.names import LAYERS, LORA_A, LORA_B, Params, make_policy
from models.peft import PREFIX, WEIGHTS, save_adapters
from tests.helpers import random_tokens, read_jsonl, train_here
from tests.kill_runs import FLAGS, records
from tests.processes import on_four_devices
from tests.references import fill_pages
from utils.devices.sharding import single_device
from utils.devices.startup import DeviceConfig, make_layout
from utils.settings.config import parse
from utils.settings.errors import UserError
from utils.settings.groups import LoraConfig

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIG = "adapter_config.json"
RANKS = {"lora-qwen2": 3, "lora-qwen3": 2, "lora-qwen3_5": 2}
near = partial(np.testing.assert_allclose, rtol=1e-5)
logits = jax.jit(decoder.logits, static_argnums=0)
outputs_of = jax.jit(decoder.token_outputs, static_argnums=0)


def load(name: str, layout=None, **options):
    """The model, its base, its adapters and its tokenizer."""
    config = LoraConfig(lora_rank=RANKS.get(name, 2), lora_alpha=6.0, **options)
    return load_policy(FIXTURES / name, config, 0, layout or single_device(), "float32")


def continued(folder: Path, rank: int = 2):
    """As `load`, for training that continues with the adapters of a folder."""
    return load_policy(folder, LoraConfig(lora_rank=rank), 0, single_device(), "float32")


def load_random(name: str, layout=None, **options) -> tuple:
    """The model, its base, random adapters that change what it computes, and their policy."""
    model, base, adapters, _ = load(name, layout, **options)
    rng = np.random.default_rng(1)
    for name, x in adapters.items():
        if name.endswith(LORA_B):
            adapters[name] = jax.device_put(np.float32(rng.normal(0, 0.1, x.shape)), x.sharding)
    return model, base, adapters, make_policy(base, adapters)


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "adapted.npz") as arrays:
        return dict(arrays)


def mean_loss(model: Decoder, base: Params, tokens: np.ndarray, trained: Params) -> jax.Array:
    return -decoder.token_outputs(model, make_policy(base, trained), tokens).logprobs[:, 1:].mean()


def gradient_of(model: Decoder, base: Params, tokens: np.ndarray, trained: Params) -> Params:
    return jax.jit(jax.grad(partial(mean_loss, model, base, tokens)))(trained)


def read_config(folder: Path) -> dict:
    return json.loads((folder / CONFIG).read_text())


@pytest.mark.parametrize("name", RANKS)
def test_logits_and_gradients_equal_those_of_peft(name):
    model, base, adapters, _ = load(name)
    arrays = expected(name)
    tokens = arrays["tokens"]
    near(logits(model, make_policy(base, adapters), tokens), arrays["logits"], atol=1e-4)
    for array, gradient in gradient_of(model, base, tokens, adapters).items():
        names = [PREFIX + layer_tensor(i, array) for i in range(model.num_hidden_layers)]
        reference = np.stack([arrays[name] for name in names if name in arrays])
        rounding = 1e-4 if model.delta else 1e-5  # recurrences are computed in another order
        near(gradient, reference, atol=rounding * np.abs(reference).max(), err_msg=array)


@pytest.mark.parametrize("name", RANKS)
def test_merged_equals_unmerged(name):
    tokens = expected(name)["tokens"]
    policies = {}
    for merge in ("always", "never"):
        model, base, adapters, _ = load(name, lora_merge=merge)
        policy = make_policy(base, adapters)
        policies[merge] = Sampler(model, 8, (0,)).load_weights(policy)
    merged, params, _ = load_model(FIXTURES / name)
    near(logits(merged, params, tokens), logits(model, policy, tokens), atol=1e-4)
    caches = [fill_pages(model, weights, tokens, 0)[0] for weights in policies.values()]
    assert_trees_all_close(*caches, rtol=1e-4, atol=1e-4)
    sizes = [sum(x.size for x in jax.tree.leaves(weights)) for weights in policies.values()]
    assert sizes[0] < sizes[1]


def test_new_adapters_leave_the_policy_as_it_is():
    model, base, adapters, _ = load("qwen3-tied")
    tokens = expected("lora-qwen3")["tokens"]
    assert_trees_all_equal(logits(model, make_policy(base, adapters), tokens), logits(model, base, tokens))
    assert all(np.any(x) != name.endswith(LORA_B) for name, x in adapters.items())
    other = load_policy(FIXTURES / "qwen3-tied", LoraConfig(lora_rank=2), 1, single_device(), "float32")[2]
    assert np.any(other["mlp.up_proj.lora_A.weight"] != adapters["mlp.up_proj.lora_A.weight"]), "of another seed"


def assert_sampled_as_trained(model: Decoder, policy: Params, prompts: list[list[int]], group_size: int) -> None:
    sampler = Sampler(model, 10, (), segment=4)
    weights, numbers = sampler.load_weights(policy), np.arange(len(prompts))
    completions = sampler.generate(weights, prompts, numbers, group_size, jax.random.key(0))
    outputs = outputs_of(model, policy, completions.tokens, routes=completions.routes)
    mask = completions.mask
    near(np.asarray(outputs.logprobs)[mask], completions.logprobs[mask], atol=1e-4)


@pytest.mark.parametrize("name", RANKS)
def test_sampling_and_training_agree_over_int8(name):
    model, base, adapters, _ = load(name, base_dtype="int8")
    assert {x.dtype for x in jax.tree.leaves(base[LAYERS]) if x.ndim == 2} == {jnp.dtype("int8")}
    tokens = expected(name)["tokens"]
    policy = make_policy(base, adapters)
    difference = logits(model, policy, tokens) - logits(model, make_policy(load(name)[1], adapters), tokens)
    assert 1e-4 < np.abs(difference).mean() < 0.2, "as far as 8 bits reach, with random weights"
    assert_sampled_as_trained(model, policy, [[1, 2, 3], [4, 5, 6, 7, 8]], 3)


@pytest.mark.parametrize("merge", ["always", "never"])
def test_sampling_from_experts_with_adapters(merge):
    model, _, _, policy = load_random("qwen3moe-untied", lora_merge=merge)
    assert_sampled_as_trained(model, policy, [[1, 2, 3], [4, 5, 6, 7, 8]], 1)


@pytest.mark.parametrize("name", RANKS)
def test_saved_adapters_are_those_of_peft(name, tmp_path):
    model, _, adapters, tokenizer = load(name)
    save_adapters(tmp_path / "new", model, adapters, tokenizer, "a/base")
    assert_trees_all_equal(*(load_file(folder / WEIGHTS) for folder in (FIXTURES / name, tmp_path / "new")))
    free = {"base_model_name_or_path": "", "target_modules": []}  # names there, or ends of names
    config, found = (read_config(folder) | free for folder in (FIXTURES / name, tmp_path / "new"))
    assert config | found == config


WRAPPED = {  # base: modules of its text and of its images in the classes that transformers 5.24 makes of it
    "gemma3-wrapped": (
        ["model.language_model.layers.3.self_attn.q_proj"],
        ["model.vision_tower.encoder.layers.0.self_attn.q_proj"],
    ),
    "qwen3_5-images": (
        ["model.language_model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.q_proj"],
        ["model.visual.blocks.0.attn.qkv"],
    ),
}


@pytest.mark.parametrize("base", WRAPPED)
@pytest.mark.parametrize("part", ["", "q_proj"], ids=["all matrices", "some of them"])
def test_adapters_of_a_model_with_images_have_names_of_peft(base, part, tmp_path, capsys):
    """Names of adapters as peft and we write them."""
    texts, images = WRAPPED[base]
    model, _, adapters, tokenizer = load(base)
    kept = {name: np.full(x.shape, 0.1 if part in name else 0, np.float32) for name, x in adapters.items()}
    save_adapters(tmp_path / "new", model, kept, tokenizer, str(FIXTURES / base))
    stored = load_file(tmp_path / "new" / WEIGHTS)
    assert {f"{PREFIX}{module}{end}" for module in texts for end in (LORA_A, LORA_B)} <= stored.keys()
    modules = {name.removeprefix(PREFIX).rpartition(".lora")[0] for name in stored}
    starts = {module.partition("layers.")[0] for module in modules}
    assert starts == {module.partition("layers.")[0] for module in texts}
    pattern = read_config(tmp_path / "new")["target_modules"]
    assert all(re.fullmatch(pattern, module) for module in modules)
    assert not any(re.fullmatch(pattern, module) for module in images)
    own_start = texts[0].partition("layers.")[0]
    of_images = {f"{PREFIX}{images[0]}{end}": np.ones((2, 2), np.float32) for end in (LORA_A, LORA_B)}
    for start in (own_start, "language_model.model."):  # of peft now, and with transformers 4
        of_text = {name.replace(own_start, start): x for name, x in stored.items() if PREFIX + own_start in name}
        save_file(of_text | of_images, tmp_path / "new" / WEIGHTS)
        assert_trees_all_equal(dict(continued(tmp_path / "new")[2]), kept)
        assert capsys.readouterr().out.count("adapters of images are neither read nor saved again") == 1


def test_no_gradient_of_the_base_is_computed():
    """A product for each matrix in the backward pass in place of two."""
    model, base, adapters, _ = load_policy("models/tiny", LoraConfig(lora_rank=1), 0, single_device(), "float32")
    unrolled, params, _ = load_model("models/tiny", unroll=True)  # a loop would be counted once

    def flops(model, base, trained) -> float:
        loss = partial(mean_loss, model, base, np.ones((4, 64), np.int32))
        return jax.jit(jax.grad(loss)).lower(trained).compile().cost_analysis()["flops"]

    assert flops(model, base, adapters) < 0.8 * flops(unrolled, {}, params)


@pytest.mark.parametrize("product", ["dense", "ragged"])
def test_adapters_of_experts_equal_merged_matrices(product, monkeypatch):
    """Logits, and gradients by the chain rule from those of the matrices."""
    # Few tokens would have another product.
    monkeypatch.setattr(experts, "FEW_TOKENS", 0)
    monkeypatch.setattr(Decoder, "expert_product", product)
    model, base, adapters, policy = load_random("qwen3moe-untied")
    scale = model.lora_alpha / 2
    merged = merge_stacked(model, load_model(FIXTURES / "qwen3moe-untied")[1], adapters)
    tokens = random_tokens(64, 4, 9)
    near(logits(model, policy, tokens), logits(model, merged, tokens), atol=1e-5)
    found, of_matrices = gradient_of(model, base, tokens, adapters), gradient_of(model, {}, tokens, merged)
    for name in adapted_layers(model):
        A, B = adapters[name + LORA_A], adapters[name + LORA_B]
        dW = of_matrices[LAYERS][f"{name}.weight"]
        for part, reference in {LORA_A: B.swapaxes(-1, -2) @ dW, LORA_B: dW @ A.swapaxes(-1, -2)}.items():
            near(found[name + part], scale * reference, atol=1e-5 * scale * np.abs(reference).max(), err_msg=name)


def test_adapters_of_experts_are_saved_one_by_one(tmp_path):
    model, _, adapters, _ = load_random("qwen3moe-untied")
    save_adapters(tmp_path / "a", model, adapters, load("qwen3moe-untied")[3], str(FIXTURES / "qwen3moe-untied"))
    of_expert = load_file(tmp_path / "a" / WEIGHTS)[f"{PREFIX}model.layers.1.mlp.experts.2.down_proj.lora_A.weight"]
    np.testing.assert_array_equal(of_expert, adapters["mlp.experts.*.down_proj.lora_A.weight"][1, 2])
    assert_trees_all_equal(continued(tmp_path / "a")[2], adapters)


ON_MESHES = {
    "lora-qwen3": {"fsdp=4": "never", "tp=4": "always"},
    "lora-qwen3_5": {"fsdp=2,tp=2": "never"},
    "qwen3moe-untied": {"fsdp=2,tp=2": "never"},
}


def same_on_meshes() -> None:
    """Asserts that greedy completions, logits and gradients of adapted models are the same on meshes."""
    tokens = random_tokens(64, 4, 9)
    for name, meshes in ON_MESHES.items():
        _, drawn, *reference = on_mesh(name, tokens, single_device(), "never")
        for mesh, merge in meshes.items():
            model, *found = on_mesh(name, tokens, make_layout(DeviceConfig(mesh=mesh)), merge)
            np.testing.assert_array_equal(found[0], drawn)
            rounding = 1e-4 if model.delta else 1e-5
            for one, other in zip(*map(jax.tree.leaves, (found[1:], reference)), strict=True):
                near(one, other, atol=rounding * np.abs(other).max(), err_msg=mesh)


def on_mesh(name: str, tokens: np.ndarray, layout, merge: str) -> tuple:
    """The model; greedy completions, logits, and the gradient of a loss."""
    model, base, adapters, policy = load_random(name, layout, lora_merge=merge)
    prompts = [[int(i) for i in row[:5]] for row in tokens]
    sampler = Sampler(model, 6, (), Distribution(0.0), layout=layout)
    weights = sampler.load_weights(policy)
    completions = sampler.generate(weights, prompts, np.arange(len(prompts)), 1, jax.random.key(0))
    rows = layout.put(tokens)
    return model, completions.tokens, logits(model, policy, rows), gradient_of(model, base, rows, adapters)


@pytest.mark.slow
def test_adapters_are_the_same_on_meshes():
    on_four_devices(__file__, "same_on_meshes()")


ATTENTION = r".*self_attn\.[qkvo]_proj"
PARTS = {  # of the matrices, by a pattern; fields of adapter_config.json; rank and alpha that training goes on with
    "a layer": (r".*\.1\..*", {"layers_to_transform": [1]}, 2, 6),
    "attention": (ATTENTION, {"target_modules": ATTENTION, "exclude_modules": ["mlp"], "lora_dropout": 0.1}, 2, 6),
    "all": (
        ATTENTION,
        {"use_rslora": True, "rank_pattern": {"q_proj": 8, r"layers.1.self_attn\.k_proj": 1}}
        | {"alpha_pattern": {"^model.layers.0.self_attn.v_proj": 3, r"attn\.(o|k)_pro.+": 2}},
        8,
        24 * 2**0.5,
    ),
}


def peft_deltas(folder: Path) -> dict[str, np.ndarray]:
    """What peft adds to each matrix of these names, in float64."""
    config, tensors = read_config(folder), load_file(folder / WEIGHTS)
    targets = config["target_modules"]
    deltas = {}
    for name in tensors:
        module, is_A, _ = name.removeprefix(PREFIX).partition(".lora_A")
        rank, alpha = (
            next((x for key, x in config[field].items() if re.match(rf"(.*\.)?({key})$", module)), config[default])
            for field, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        is_target = isinstance(targets, str) or any(f".{module}".endswith(f".{target}") for target in targets)
        if is_A and is_target:
            A, B = (np.float64(tensors[name.replace("lora_A", part)]) for part in ("lora_A", "lora_B"))
            assert A.shape[0] == rank
            deltas[module] = alpha / (rank**0.5 if config["use_rslora"] else rank) * B @ A
    return deltas


def added(model, params, base) -> dict[str, np.ndarray]:
    """What these parameters have more than a base, by matrix, where they have."""
    found = {}
    for name, layers in adapted_layers(model).items():
        for place, layer in enumerate(layers):
            x, y = (np.float64(tree[LAYERS][f"{name}.weight"][place]) for tree in (params, base))
            found |= {f"model.layers.{layer}.{name}": x - y} if np.any(x != y) else {}
    return found


def write_adapters_of_peft(folder: Path, base: str, pattern: str, fields: dict) -> None:
    """Writes random adapters of the modules that match, with the ranks of the config."""
    model, _, adapters, tokenizer = load(base)
    rng = np.random.default_rng(0)
    config = read_config(FIXTURES / "lora-qwen3")
    config |= {"target_modules": "all-linear", "base_model_name_or_path": str(FIXTURES / base)} | fields
    save_adapters(folder, model, adapters, tokenizer, "")
    tensors = {}
    for name, x in load_file(folder / WEIGHTS).items():
        module = name.removeprefix(PREFIX).rpartition(".lora")[0]
        if re.fullmatch(pattern, module):
            own = [r for key, r in config["rank_pattern"].items() if re.match(rf"(.*\.)?({key})$", module)] or [2]
            shape = (own[0], x.shape[1]) if "lora_A" in name else (x.shape[0], own[0])
            tensors[name] = np.float32(rng.normal(0, 0.2, shape))
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize("part", PARTS)
def test_adapters_of_some_matrices_keep_own_ranks_and_scales(part, tmp_path):
    pattern, fields, rank, alpha = PARTS[part]
    base = "qwen3moe-untied" if part == "attention" else "qwen3-tied"
    folder, other = tmp_path / "a", tmp_path / "b"
    write_adapters_of_peft(folder, base, pattern, fields)
    deltas = peft_deltas(folder)
    found, params, _ = load_model(folder)
    assert_trees_all_close(added(found, params, load_model(FIXTURES / base)[1]), deltas, atol=1e-6)
    model, _, adapters, tokenizer = continued(folder, rank)
    assert (model.lora_rank, model.lora_alpha) == (rank, pytest.approx(alpha))
    save_adapters(other, model, adapters, tokenizer, str(FIXTURES / base))
    assert_trees_all_close(peft_deltas(other), deltas, atol=1e-6)
    for wrong in (LoraConfig(rank + 1), LoraConfig(rank, alpha + 1)):
        with pytest.raises(UserError, match="holds adapters of --lora_.*: give the value of the adapters"):
            load_policy(folder, wrong, 0, single_device(), "float32")


def test_adapters_that_a_folder_lacks_are_not_trained(tmp_path):
    model, base, adapters, tokenizer = load("qwen3-tied")
    kept = {name: np.full(x.shape, 0.1 if "v_proj" in name else 0, np.float32) for name, x in adapters.items()}
    save_adapters(tmp_path / "a", model, kept, tokenizer, str(FIXTURES / "qwen3-tied"))
    model, base, adapters, _ = continued(tmp_path / "a")
    for name, gradient in gradient_of(model, base, np.ones((2, 9), np.int32), adapters).items():
        assert np.any(gradient) == ("v_proj" in name), name


def test_training_goes_on_with_the_adapters_of_a_folder(tmp_path):
    model, base, adapters, tokenizer = load("qwen3-tied", base_dtype="int8")
    adapters = {name: np.full(x.shape, 0.1, np.float32) for name, x in adapters.items()}
    save_adapters(tmp_path / "step3", model, adapters, tokenizer, str(FIXTURES / "qwen3-tied"))
    tokens = expected("lora-qwen3")["tokens"]
    reference = logits(model, make_policy(base, adapters), tokens)
    found, params, _ = load_model(tmp_path / "step3")  # as evaluation, chat and export do
    near(logits(found, params, tokens), reference, atol=1e-4)

    read = partial(parse, Config, implied=settings_of_model)
    for name in ("step3", ""):  # a folder of adapters, a run folder
        lora = read(["--model_dir", str(tmp_path / name)]).lora
        assert (lora.lora_rank, lora.lora_alpha, lora.base_dtype) == (2, 6.0, "int8")
    model, base, adapters, _ = load_policy(tmp_path / "step3", lora, 0, single_device(), "float32")
    near(logits(model, make_policy(base, adapters), tokens), reference, atol=1e-4)
    flags = ["--model_dir", str(tmp_path / "step3")]
    merged = read([*flags, "--lora_merge", "always", "--lora_rank", "0"])
    assert merged.lora.lora_alpha == 32, "all parameters of the merged model"
    for wrong in ("--lora_rank 4", "--lora_alpha 32", "--lora_merge always"):  # 32 is the default
        with pytest.raises(SystemExit):
            read([*flags, *wrong.split()])


def test_resumed_run_ends_as_one_that_never_stopped(tmp_path):
    """And its KL is that to the first adapters of the run, when the saved ones are others."""
    flags = FLAGS | {"model_dir": FIXTURES / "lora-qwen3", "kl_coef": 0.1, "ppo_minibatch": 0, "test_env_name": ""}
    flags |= settings_of_model({"model_dir": str(flags["model_dir"])}) | {"save_interval": 1}
    for name, stops in {"whole": [2], "stopped": [1, 2]}.items():
        for num_steps in stops:
            assert train_here(tmp_path / name, **flags | {"max_steps": num_steps}) == 0
    whole, stopped = ([row["kl"] for row in records(tmp_path / name)] for name in ("whole", "stopped"))
    assert whole == stopped
    assert whole[0] == pytest.approx(0, abs=1e-6)
    assert whole[1] > 1e-5
    assert_trees_all_equal(*(load_file(tmp_path / name / "step2" / WEIGHTS) for name in ("whole", "stopped")))


DAMAGES = {
    "shape": (lambda config, tensors: tensors.update({min(tensors): np.ones((2, 3), np.float32)}), "the base makes it"),
    "base": (lambda config, tensors: config.update(base_model_name_or_path="/no/a"), "of their base there is no"),
    "no base": (lambda config, tensors: config.pop("base_model_name_or_path"), "lacks peft_type, base"),
    "tensor": (lambda config, tensors: tensors.popitem(), "lacks tensor"),
    "none": (lambda config, tensors: tensors.clear(), "has no tensor that ends in .lora_A.weight"),
    "head": (lambda config, tensors: tensors.update(x=np.zeros(3, np.float32)), "has the unknown tensor x"),
    "number": (lambda config, tensors: next(iter(tensors.values())).fill(np.nan), "NaN or infinity"),
}
REFUSED = {
    "peft_type": "IA3", "use_dora": True, "modules_to_save": ["lm_head"], "bias": "all", "field_of_2027": 0.5,
    "init_lora_weights": "pissa_niter_2",
}  # fmt: skip
for field, value in REFUSED.items():
    change = partial(lambda new, config, tensors: config.update(new), {field: value})
    DAMAGES[f"{field} {value!r}"] = (change, f"{field} {value!r} is not supported")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_damaged_or_not_supported_is_named(damage, tmp_path):
    folder = shutil.copytree(FIXTURES / "lora-qwen3", tmp_path / "a")
    config, tensors = read_config(folder), load_file(folder / WEIGHTS)
    change, message = DAMAGES[damage]
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=re.escape(message)):
        load_model(folder)


def test_files_that_a_folder_lacks(tmp_path):
    folder = shutil.copytree(FIXTURES / "lora-qwen3", tmp_path / "a")
    (folder / "tokenizer.json").unlink()
    assert load_model(folder)[2].encode("12"), "by the tokenizer of the base: peft saves none"
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match="adapter_model.safetensors cannot be read .*: copy it again"):
        load_model(folder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora_rank 2 --advantage gae", "--lora_rank does not support"),
        ("--base_dtype int8", "give --lora_rank"),
        ("--lora_rank 2 --base_dtype int8 --lora_merge always", "leave one of the two out"),
        ("--lora_rank -1", "must not be negative"),
    ],
)
def test_wrong_settings_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(Config, flags.split(), "")
    assert message in capsys.readouterr().err


RUN = (
    "--config configs/demo.py --max_steps 2 --groups_per_batch 4 --group_size 4 --num_generation_tokens 64 "
    "--num_eval_tasks 4 --num_eval_samples 1 --test_interval 0 --lora_rank 2 "
    "--max_resampling 2 --do_group_filter 0 --ppo_minibatch 0 --tokens_per_microbatch 0 --kl_coef 0.1 --lr 0.01 "
    "--save_dir"
)


@pytest.mark.slow
def test_a_run_saves_adapters_that_are_trained_on(tmp_path, capsys, monkeypatch):
    main(parse(Config, [*RUN.split(), str(tmp_path / "a")], ""))
    folder = tmp_path / "a" / "step2"
    assert not (folder / "model.safetensors").exists()
    params, base = (load_model(name)[1][LAYERS] for name in (folder, "models/tiny"))
    assert not np.array_equal(params["mlp.up_proj.weight"], base["mlp.up_proj.weight"])
    flags = [str(tmp_path / "b"), "--model_dir", str(folder), *"--base_dtype int8 --save_rollouts all".split()]
    main(parse(Config, [*RUN.split(), *flags], ""))
    config = read_config(tmp_path / "b" / "step2")
    assert config["base_model_name_or_path"] == str(FIXTURES.parents[1] / "models" / "tiny"), "nor relative"
    assert config["base_dtype"] == "int8"
    assert read_jsonl(tmp_path / "b" / "metrics.jsonl")[-1]["kl"] > 0, "to the base without adapters"

    read = []
    load = RolloutWorker.load_weights
    # Keeps the weights that the sampler reads.
    monkeypatch.setattr(RolloutWorker, "load_weights", lambda *given: read.append(load(*given)) or read[-1])
    replay(str(tmp_path / "b" / "rollouts" / "step_1"), 5, single_device())
    assert "tokens are those of the run" in capsys.readouterr().out
    assert read[0][LAYERS][0]["mlp.up_proj.weight.T"].dtype == jnp.int8
