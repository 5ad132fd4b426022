"""The model, its checkpoints and its tokenizer against transformers; reference outputs come from make_fixtures.py."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_equal
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig
from transformers.pipelines.text_generation import Chat, TextGenerationPipeline

from core.run.card import generation_settings
from models import architecture, attention, checkpoint, decoder, families
from models.checkpoint import load_model, save_model
from models.distribution import Distribution
from models.families import FAMILIES, read_config, text_config
from models.names import EMBED, HEAD
from models.pages import new_state
from models.tokenizer import Tokenizer, load_tokenizer, with_generation, with_training_prompts
from tests.helpers import MODEL, assert_close, depth, gradient_depth, random_params, slow
from tests.references import (
    DATA,
    FIXTURES,
    decode_one,
    expected_of,
    fill_pages,
    load,
    logits,
    needs_data,
    rows,
    select_tensor,
)
from utils.devices.sharding import MESH_AXES, single_device

NAMES = sorted(file.parent.name for file in FIXTURES.glob("*/expected.npz"))

decode_weights = jax.jit(decoder.decode_weights, static_argnums=0)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
    model, params, _ = load(FIXTURES / name)
    reference = expected_of(name)
    tokens = reference["tokens"]
    # The norm of a Gated DeltaNet multiplies the error of an output near 0, as HYBRID in helpers.py says.
    size = np.abs(reference["logits"]).max() * (2 if model.delta else 1)
    assert_close(logits(model, params, tokens), reference["logits"], depth(model, tokens.shape[1]), size)


FEW = "qwen3-tied", "qwen2-untied", "gemma3-rest", "qwen3moe-untied", "qwen3_5-rest"
DECODED = [*FEW, *slow(*(name for name in NAMES if name not in FEW))]


@pytest.mark.parametrize("name", DECODED)
def test_gradients_equal_those_of_transformers(name):
    """Value and direction, of each tensor in the file."""
    model, params, _ = load(FIXTURES / name)
    reference = expected_of(name)
    tokens = reference["tokens"]

    def loss(params):
        return -decoder.token_outputs(model, params, tokens).logprobs[:, 1:].mean()

    gradient = jax.jit(jax.grad(loss))(params)
    layers_with = model.layers_with()
    shapes = checkpoint.tensor_shapes(model)
    operations = gradient_depth(model, tokens.shape[1], tokens.size)
    for i, tensor in enumerate(sorted(shapes)):
        found = np.float64(select_tensor(layers_with, gradient, tensor))
        norm = np.linalg.norm(found)
        direction = np.random.default_rng(i).standard_normal(found.shape)
        assert_close(norm, reference["gradient_norms"][i], operations, size=10 * norm, err_msg=tensor)
        product = (found * direction).sum()
        assert_close(product, reference["gradient_products"][i], operations, size=10 * norm, err_msg=tensor)


@pytest.mark.parametrize("name", DECODED)
def test_greedy_decoding_gives_the_tokens_of_transformers(name):
    model, params, _ = load(FIXTURES / name)
    reference = expected_of(name)
    num_tokens = reference["completions"].shape[1]
    prompts = [prompt[start:] for prompt, start in zip(reference["prompts"], reference["starts"], strict=True)]
    weights = decode_weights(model, params)
    state, pages = fill_pages(model, weights, prompts, num_tokens)
    tokens = [np.array([prompt[-1] for prompt in prompts], np.int32)]
    for i in range(num_tokens):  # the first step reads the last prompt token
        step = pages._replace(columns=pages.columns + i)
        row, state = decode_one(model, weights, state, step, jnp.asarray(tokens[-1]))
        tokens.append(np.asarray(row.argmax(-1), np.int32))
    np.testing.assert_array_equal(np.stack(tokens[1:], axis=1), reference["completions"])


@pytest.mark.parametrize("name", ["qwen2-tied", "gemma3-tied", "qwen3_5-tied"])
def test_the_training_pass_rounds_weights_as_sampling_does(name):
    model, params, _ = load(FIXTURES / name)
    model = replace(model, dtype="bfloat16")

    def rounded(path, x):
        is_rate = path[-1].key in ("linear_attn.A_log", "linear_attn.dt_bias")
        return x if is_rate else x.astype(model.dtype).astype(x.dtype)

    tokens = expected_of(name)["tokens"]
    found = logits(model, jax.tree.map_with_path(rounded, params), tokens)
    np.testing.assert_array_equal(found, logits(model, params, tokens))


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3_5-tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["", "int8"])
def test_a_cache_has_as_many_bytes_as_is_estimated(name, dtype, kv_dtype):
    model, params, _ = load(FIXTURES / name)
    model = replace(model, dtype=dtype, kv_dtype=kv_dtype)
    state = jax.eval_shape(partial(new_state, model, single_device(), 3, 5, 2))
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert num_bytes == 3 * 5 * model.cache_bytes + 2 * model.state_bytes


@pytest.mark.parametrize("setting", [(1.0,), (0.0,), (0.6, 0, 0.8), (1.3, 12, 0.9, 0.03)], ids=str)
def test_tokens_are_scored_under_the_distribution_that_drew_them(setting):
    distribution = Distribution(*setting)
    logits = jnp.float32(2 * np.random.default_rng(5).standard_normal((50, 300)))
    tokens, drawn, support = distribution.draw(logits, jax.random.uniform(jax.random.key(1), (50, 2)))
    outputs = distribution.outputs(logits, tokens, support if support.size else None)
    assert_close(outputs.logprobs, drawn, logits.shape[1], np.abs(logits).max())
    assert np.isfinite(outputs.entropy).all()


@pytest.mark.parametrize("columns", [100, 4])  # that get logits at a time, of 16
def test_logprobs_are_those_of_the_full_softmax(columns, monkeypatch):
    model, params, _ = load(FIXTURES / "qwen3-tied")
    tokens = expected_of("qwen3-tied")["tokens"]
    scaled = expected_of("qwen3-tied")["logits"][:, :-1] / 0.7
    operations = depth(model, tokens.shape[1])
    size = np.abs(scaled).max()
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    reference = np.take_along_axis(scaled, tokens[:, 1:, None], axis=-1)[..., 0]
    # The head computes so many columns at a time.
    monkeypatch.setattr("models.logits.LOGIT_ELEMENTS", columns * len(tokens) * model.vocab_size)
    score = partial(decoder.token_outputs, model, distribution=Distribution(0.7))
    logprobs, entropy, *_ = jax.jit(score)(params, tokens)
    assert_close(logprobs[:, 1:], reference, operations, size)
    assert_close(entropy[:, 1:], -(np.exp(scaled) * scaled).sum(-1), operations, size)
    assert not logprobs[:, 0].any()
    assert not entropy[:, 0].any()


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_the_backward_pass_reads_the_parameters_themselves(remat):
    """A layer that is selected outside of what is rematerialized would be kept: a copy of all parameters."""
    model = replace(MODEL, remat=remat)
    params = random_params(model)
    tokens = np.ones((3, 48), np.int32)  # not as many rows as layers

    def loss(params):
        return decoder.token_outputs(model, params, tokens).logprobs.sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params)
    forward = next(equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    kept = [x.aval.shape for x in forward.outvars if x.aval.shape[:1] == (model.num_hidden_layers,)]  # of each layer
    weights = {x.shape[1:] for x in jax.tree.leaves(params["model.layers"]) if x.ndim == 3}
    assert any(shape[-2:] == (48, model.hidden_size) for shape in kept), "the input of each layer"
    assert not [shape for shape in kept if shape[-2:] in weights]


def test_a_critic_s_values_are_products_in_float32():
    model = replace(MODEL, dtype="bfloat16")
    critic = decoder.make_critic(model, jax.tree.map(jnp.asarray, random_params(model)))
    tokens = np.ones((2, 8), np.int32)
    jaxpr = jax.make_jaxpr(lambda critic: decoder.state_values(model, critic, tokens))(critic)
    products = [equation.params["precision"] for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
    assert products == [(jax.lax.Precision.HIGHEST,) * 2], "the layers' are inside of a scan"


def heads(T: int, C: int) -> list[jax.Array]:
    """Queries, keys, values, and a direction."""
    rng = np.random.default_rng(0)
    return [jnp.float32(rng.standard_normal((2, T, num, C))) for num in (4, 2, 2, 4)]


@pytest.mark.parametrize("case", [(150, 0), *slow((150, 40), (256, 0), (300, 0))], ids=str)  # blocks of 128, 256, 384
def test_splash_attention_is_the_plain_one(case):
    """Pallas' interpreter in the place of a TPU: results and gradients."""
    T, window = case
    *qkv, direction = heads(T, 128)
    view = attention.View(0.1, window)

    def plain(q, k, v):
        return attention.masked_attention(q, k, v, attention.causal_mask(T, window), view.scale).reshape(q.shape)

    @partial(jax.jit, static_argnums=0)
    def result_and_gradients(f, *qkv):
        result, pull_back = jax.vjp(f, *qkv)
        return result, *pull_back(direction)

    both = (result_and_gradients(f, *qkv) for f in (partial(attention.splash, view=view, interpret=True), plain))
    for result, expected in zip(*both, strict=True):
        assert_close(result, expected, 3 * (128 + 2 * T))  # forward and twice backward: channels, softmax, values


@pytest.mark.parametrize("window", [0, 40])
def test_attention_in_blocks_is_that_of_the_whole_row(window):
    q, k, v, _ = heads(150, 32)
    whole = attention.masked_attention(q, k, v, attention.causal_mask(150, window), 0.1)
    found = attention.plain_attention(q, k, v, attention.View(0.1, window))
    np.testing.assert_allclose(found, whole, atol=1e-6)


def test_scores_in_bfloat16_are_not_rounded():
    """Rounded to bfloat16, scores near 40 would be off by up to 0.1."""
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in heads(64, 32))
    view = attention.View(2.0)
    found = attention.plain_attention(q, k, v, view)
    exact = attention.plain_attention(*(x.astype(jnp.float32) for x in (q, k, v)), view)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.02)


def test_kernels_are_chosen_by_device_and_heads():
    @dataclass(frozen=True)
    class Device:
        device_kind: str
        id: int
        compute_capability: str

    def choose(name, kind, dtype=jnp.bfloat16, channels=128, tp=1, capability="9.0"):
        devices = np.array([Device(kind, i, capability) for i in range(tp)]).reshape(1, 1, tp)
        mesh = jax.sharding.Mesh(devices, MESH_AXES)
        return attention.choose_kernel(name, mesh, dtype, channels, 8)

    assert choose("auto", "NVIDIA H200") == "cudnn"
    assert choose("auto", "TPU v5e") == "splash"
    assert choose("plain", "NVIDIA H200") == "plain"
    assert choose("auto", "AMD MI300X", capability="gfx942") == "plain"
    assert choose("auto", "NVIDIA H200", dtype=jnp.float32) == choose("auto", "TPU v5e", channels=64) == "plain"
    assert choose("auto", "NVIDIA TITAN V", capability="7.0") == "plain"
    assert choose("auto", "NVIDIA B200", capability="10.0") == "cudnn"
    assert choose("auto", "NVIDIA H200", tp=16) == "plain", "heads are not cut that finely"
    assert attention.choose_kernel("auto", None, jnp.bfloat16, 128, 8) == "plain"


def test_products_are_of_bfloat16_where_the_device_has_it(monkeypatch):
    found = {}
    devices = ("cpu", ""), ("gpu", "7.5"), ("gpu", "8.0"), ("gpu", "10.0"), ("gpu", "gfx942"), ("tpu", "")
    for platform, capability in devices:
        device = SimpleNamespace(platform=platform, compute_capability=capability)
        # A device that is not here.
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        found[platform + capability] = checkpoint.default_dtype()
    assert [name for name, dtype in found.items() if dtype == "float32"] == ["cpu", "gpu7.5"]


def test_layers_of_small_models_on_a_cpu_are_unrolled():
    demo = architecture.Decoder(512, 128, 384, 4, 4, 2, 32, mesh=single_device().mesh)
    assert demo.is_unrolled
    assert not replace(demo, mesh=None).is_unrolled
    assert not replace(demo, num_hidden_layers=30).is_unrolled
    tpu = np.array(SimpleNamespace(platform="tpu")).reshape(1, 1, 1)
    assert not replace(demo, mesh=SimpleNamespace(devices=tpu)).is_unrolled


# Checkpoints


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_bytes", [5 * 10**9, 20_000])
def test_a_saved_model_is_loaded_unchanged(name, max_bytes, tmp_path, monkeypatch):
    # A small model has several files.
    monkeypatch.setattr(checkpoint, "MAX_SHARD_BYTES", max_bytes)
    model, params, tokenizer = load_model(FIXTURES / name, param_dtype="")
    save_model(tmp_path / "new", model, params, tokenizer)
    saved_model, saved_params, saved_tokenizer = load_model(f"{tmp_path}/new/", param_dtype="")
    assert (saved_model, saved_tokenizer.stop_ids) == (model, tokenizer.stop_ids)
    assert_trees_all_equal(params, saved_params)
    assert (tmp_path / "new" / "model.safetensors").exists() == (max_bytes > 20_000)
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]


def test_dtypes_are_those_of_the_parameters(tmp_path):
    model, params, tokenizer = load(FIXTURES / "qwen3-bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    save_model(tmp_path / "bfloat16", model, rounded, tokenizer, fetch=np.asfortranarray)  # as devices may lay it out
    saved_model, saved_params, _ = load_model(tmp_path / "bfloat16", param_dtype="", remat="none")
    assert {x.dtype.name for x in load_file(tmp_path / "bfloat16" / "model.safetensors").values()} == {"bfloat16"}
    assert saved_params[EMBED].dtype == "bfloat16"
    assert saved_model.remat == "none"
    assert_trees_all_equal(params, jax.tree.map(lambda x: x.astype("float32"), saved_params))


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    model, params, tokenizer = load(FIXTURES / "qwen3-sharded")
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "qwen3-sharded", folder)
    save_model(folder, model, jax.tree.map(jnp.zeros_like, params), tokenizer)
    assert (folder / "expected.npz").exists()
    assert not (folder / "model.safetensors.index.json").exists()
    assert_trees_all_equal(load_model(folder)[1], jax.tree.map(jnp.zeros_like, params))
    (folder / "step20").mkdir()
    with pytest.raises(ValueError, match="step20"):
        save_model(folder, model, params, tokenizer)
    with pytest.raises(RuntimeError):  # a save that fails half-way leaves the folder as it was
        (folder / "step20").rmdir()
        save_model(folder, model, params, tokenizer, fetch=fail)
    assert_trees_all_equal(load_model(folder)[1], jax.tree.map(jnp.zeros_like, params))


def fail(x):
    raise RuntimeError


def test_only_the_writing_process_writes(tmp_path):
    model, params, tokenizer = load(FIXTURES / "qwen3-tied")
    fetched = []
    save_model(tmp_path / "model", model, params, tokenizer, fetch=fetched.append, write=False)
    assert not list(tmp_path.iterdir())
    assert len(fetched) == len(checkpoint.tensor_shapes(model))


FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"  # as Llama 2 was published with them
SPELLINGS = {  # of names of tensors that transformers reads, too
    "only the head": ("qwen3-tied", {EMBED: HEAD}),
    "head, too": ("qwen3-tied", lambda t: t.update({HEAD: t[EMBED], FREQUENCIES: np.ones(4, np.float16)})),
    "without model.": ("qwen3-tied", {"model.": ""}),
    "untied, without model.": ("llama-untied", {"model.": ""}),
    "images": ("gemma3-wrapped", {"language_model.model.": "language_model."}),
    "images, later": (  # the fixture has the names of the published files
        "gemma3-wrapped",
        {"language_model.model.": "model.language_model.", "vision": "model.vision", "multi": "model.multi"},
    ),
    "several tokens at once": ("qwen3_5-images", lambda t: t.update({"mtp.fc.weight": np.ones((2, 2), np.float32)})),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_tensors_are_found_under_each_of_their_names(name, tmp_path):
    base, change = SPELLINGS[name]

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for start, other in change.items():
            for old in [old for old in tensors if old.startswith(start)]:
                tensors[other + old.removeprefix(start)] = tensors.pop(old)

    shutil.copytree(FIXTURES / base, tmp_path, dirs_exist_ok=True)
    edit_tensors(change if callable(change) else rename)(tmp_path)
    assert_trees_all_equal(load_model(tmp_path)[1], load(FIXTURES / base)[1])


def edit_config(**fields):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return edit


def edit_tensors(edit):
    def edit_file(folder):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit_file


def remove(name):
    return lambda folder: (folder / name).unlink()


def rename_weights(name):
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NORM = "model.layers.1.input_layernorm.weight"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
UNUSED = {  # fields of transformers' configs by which no logit changes: of training, of generation, of classes
    *"attention_dropout initializer_range output_router_logits router_aux_loss_coef pretraining_tp use_cache".split(),
    *"bos_token_id eos_token_id pad_token_id _sliding_window_pattern ignore_keys_at_rope_validation".split(),
    *"max_window_layers num_local_experts no_rope_layer_interval".split(),  # others follow from them
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_a_family_is_read_or_changes_no_logit(name):
    """A version of transformers with another field shows it here."""
    config_class = CONFIG_MAPPING[FAMILIES[name].model_type]
    fields = vars(config_class()).keys() - vars(PretrainedConfig()).keys()
    read = {*re.findall(r"\w+", Path(families.__file__).read_text())}
    assert fields - read <= UNUSED


DAMAGES = {
    "folder": ("qwen3-tied", shutil.rmtree, "there is no folder .*model"),
    "weights": ("qwen3-tied", remove("model.safetensors"), "model.safetensors"),
    "weights of kvfrans/lmpo": ("qwen3-tied", rename_weights("params.pkl"), "params.pkl is a pickle"),
    "shard": ("qwen3-sharded", remove("model-00003-of-00005.safetensors"), "model-00003-of-00005.safetensors"),
    "end of a file": ("qwen3-tied", truncate, "model.safetensors is not a whole"),
    "tensor": ("qwen3-tied", edit_tensors(lambda t: t.pop(NORM)), f"lacks tensor {NORM}"),
    "untied head": ("qwen3-tied", edit_config(tie_word_embeddings=False), "lacks tensor lm_head.weight"),
    "unknown tensor": ("qwen3-tied", edit_tensors(lambda t: t.update(extra=t[NORM])), "unknown tensor extra"),
    "few layers": ("qwen3-tied", edit_config(num_hidden_layers=1, layer_types=None), "unknown tensor model.layers.1."),
    "shape": ("qwen3-tied", edit_tensors(lambda t: t.update({NORM: t[NORM][:7]})), rf"{NORM} has shape \(7,\)"),
    "architecture": ("qwen3-tied", edit_config(architectures=["MixtralForCausalLM"]), "architectures is 'Mixtral"),
    "layers without experts": ("qwen3moe-tied", edit_config(mlp_only_layers=[1]), r"mlp_only_layers is \[1\]"),
    "every other layer": ("qwen3moe-tied", edit_config(decoder_sparse_step=2), "decoder_sparse_step is 2"),
    "number of experts": ("qwen3moe-tied", edit_config(num_local_experts=4), "unknown tensor model.layers.0.mlp.exp"),
    "activation": ("qwen3-tied", edit_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "rope 4": ("qwen2-tied", edit_config(rope_scaling={"type": "dynamic", "factor": 4.0}), "rope_type is 'dynamic'"),
    "rope 5": ("qwen3-tied", edit_config(rope_parameters={"rope_type": "linear"}), "Missing .*factor"),
    "rope of a kind": ("gemma3-tied", edit_config(rope_parameters={"full_attention": [1]}), "not the config of a Gem"),
    "local rope": (
        "olmo3-yarn",
        edit_config(rope_parameters={"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}),
        "rope_type is 'yarn'",
    ),
    "text config": ("qwen3_5-images", edit_config(text_config=[1]), "text_config is .1., not an object"),
    "share beside the others": ("qwen2-tied", edit_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "magnitude": (
        "olmo3-yarn",
        edit_config(rope_parameters=None, rope_scaling=YARN | {"attention_factor": 1.1}),
        "attention_factor is 1.1, and supported is only 1.20794",
    ),
    "other head": (
        "qwen3-tied",
        edit_tensors(lambda t: t.update({HEAD: 2 * t[EMBED]})),
        "lm_head.weight differs from model.embed_tokens",
    ),
    "no window": ("gemma3-tied", edit_config(sliding_window=None), "sliding_window is None"),
    "window": ("qwen2-tied", edit_config(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
    "bias": ("qwen3-tied", edit_config(attention_bias=True), "attention_bias is True"),
}


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_named(name, damage, message, tmp_path):
    shutil.copytree(FIXTURES / name, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "model")


def test_a_model_with_images_is_loaded_as_its_text_model():
    wrapped = load(FIXTURES / "qwen3_5-images")[0]
    assert wrapped == load(FIXTURES / "qwen3_5-tied")[0]
    assert wrapped.family == "Qwen3_5ForCausalLM"
    config = json.loads((FIXTURES / "qwen3_5-images" / "config.json").read_text())
    text = config["text_config"]
    for name in ("layer_types", "rope_parameters", "head_dim", *(name for name in text if name.startswith("linear_"))):
        del text[name]
    fields = read_config(text_config(config | {"text_config": text}, Path()), Path())  # the class has defaults
    assert fields["layer_types"] == ("linear_attention",) * 3 + ("full_attention",)
    assert (fields["partial_rotary_factor"], fields["head_dim"], fields["rope_theta"]) == (0.25, 256, 10_000)
    assert fields["delta"] == (16, 32, 128, 128, 4)


def test_a_download_without_network_says_so(monkeypatch):
    # A machine without network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="downloading .* failed"):
        load_model("nobody/no-such-model")


def test_transformers_loads_what_we_save(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is needed by this test alone")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in NAMES:
        model, params, tokenizer = load(FIXTURES / name)
        save_model(tmp_path / name, model, params, tokenizer)
        reference_model, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values())
        assert reference_model.dtype == torch.float32
        assert reference_model.generation_config.eos_token_id in (list(tokenizer.stop_ids), *tokenizer.stop_ids)
        assert AutoTokenizer.from_pretrained(tmp_path / name).encode("a=1") == tokenizer.encode("a=1")
        with torch.no_grad():
            logits_of_saved = reference_model(torch.tensor(expected_of(name)["tokens"])).logits
        assert_close(logits_of_saved, expected_of(name)["logits"], depth(model, expected_of(name)["tokens"].shape[1]))


# Tokenizer


@needs_data
def test_encoding_equals_other_peoples_qwen_tokenizer():
    tokenizer = load_tokenizer(DATA / "qwen3-tokenizer")
    for row in rows("llama_cpp_qwen2.jsonl"):
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert tokenizer.decode(np.array(row["ids"])) == row["text"]


@needs_data
@pytest.mark.parametrize("thinking", [False, True])
def test_conversations_are_rendered_as_by_transformers(thinking):
    tokenizer = load_tokenizer(DATA / "qwen3-tokenizer")
    tested = 0
    for row in rows("chat_template.jsonl"):
        # Not given (null) is to the template as if thinking were allowed.
        if row["add_generation_prompt"] and not row["tools"] and (row["enable_thinking"] is not False) == thinking:
            tested += 1
            assert tokenizer.chat(row["messages"], thinking) == row["ids"]
            assert tokenizer.chat(row["messages"], thinking, "<think>\n") == row["ids"] + [151667, 198]
    assert tested


@needs_data
def test_the_ids_of_qwen3(tmp_path):
    tokenizer = load_tokenizer(DATA / "qwen3-tokenizer")
    assert tokenizer.stop_ids == (151645, 151643)
    assert tokenizer.pad_id == 151643
    assert tokenizer.decode(tokenizer.encode("<think>a</think>b<|im_end|>")) == "<think>a</think>b"
    for saved in (tokenizer, Tokenizer(tokenizer.hf)):  # as loaded, and as transformers writes it
        saved.save(tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert loaded.stop_ids[0] == 151645
        assert loaded.pad_id == 151643
        messages = [{"role": "user", "content": "Hello, y'all! 你好"}]
        assert loaded.chat(messages, True, "<think>") == tokenizer.chat(messages, True, "<think>")
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


SMOLLM2 = (  # as in the GGUF of SmolLM2-135M-Instruct
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou"
    " are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": " 1 + 1? "}


def folder_with_template(folder: Path, template: str, stop_ids: list[int]) -> Path:
    """Copies the tokenizer of a fixture, with a chat template and the stop ids of generation_config.json."""
    source = FIXTURES / "llama-untied"
    shutil.copy(source / "tokenizer.json", folder)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, "bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return folder


QWEN3 = (  # the end of its template: thinking unless it is switched off
    "{%- for message in messages %}{{- message.role + ': ' + message.content + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- if enable_thinking is defined and enable_thinking is false "
    "%}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
SMOLLM3 = (
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    "{%- macro mode() -%}{{- '/think' if enable_thinking else '/no_think' -}}{%- endmacro -%}"
    "{{- mode() + messages[0].content -}}{%- if not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}"
)


@pytest.mark.parametrize("template", [QWEN3, SMOLLM3], ids=["qwen3", "smollm3"])
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "field"])
def test_saved_template_renders_training_prompts_by_default(template, is_file, tmp_path):
    tokenizer = load_tokenizer(folder_with_template(tmp_path, template, [5]))
    prompts = {thinking: tokenizer.render([USER], thinking) for thinking in (True, False)}
    assert prompts[True] != prompts[False]
    if is_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    for thinking in (False, True, False):  # also one that was saved before, after training with the other
        with_training_prompts(load_tokenizer(tmp_path), thinking, "").save(tmp_path)
        saved = load_tokenizer(tmp_path)
        found = saved.hf.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
        assert found == prompts[thinking]
        assert saved.training_prompts == (thinking, "")
        for explicit, prompt in prompts.items():
            assert saved.render([USER], explicit) == prompt
    assert saved.hf.chat_template.count("is not defined %}") == 1
    assert (tmp_path / "chat_template.jinja").exists() == is_file


@pytest.mark.parametrize("template", [QWEN3, SMOLLM2], ids=["qwen3", "smollm2"])
def test_transformers_pipeline_prompts_a_saved_model_the_same(template, tmp_path):
    """Its own code prepares the prompt, without torch: only the class of the arrays differs."""
    tokenizer = load_tokenizer(folder_with_template(tmp_path, template, [5]))
    for prefix in ("<think>\n", 'say "{{ x }}"', "", "="):  # the folder is that of the model before
        with_training_prompts(load_tokenizer(tmp_path), False, prefix).save(tmp_path)
        saved = load_tokenizer(tmp_path)

        def render(messages, return_tensors, saved=saved, **arguments):
            return saved.hf.apply_chat_template(messages, **arguments)

        pipeline = SimpleNamespace(tokenizer=SimpleNamespace(apply_chat_template=render))
        prompt = TextGenerationPipeline.preprocess(pipeline, Chat([USER]))["input_ids"]
        assert saved.decode(prompt) == tokenizer.decode(tokenizer.chat([USER], False, prefix))
        assert prompt == tokenizer.encode(tokenizer.render([USER], False) + prefix), "ids of the whole text"
        assert saved.chat([USER], False, prefix) == tokenizer.chat([USER], False, prefix), "the prefix comes once"
        assert saved.training_prompts == (False if template == QWEN3 else None, prefix)


@pytest.mark.parametrize("is_rl", [True, False], ids=["rl", "sft"])
def test_generation_config_has_training_stops_and_no_penalty(is_rl, tmp_path):
    """Read by transformers: what is not said here, or is the default, is not applied."""
    folder_with_template(tmp_path, QWEN3, [5])
    base = {"eos_token_id": 5, "pad_token_id": 7, "bos_token_id": 1, "do_sample": True, "top_k": 20}
    base |= {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "min_new_tokens": 3, "suppress_tokens": [9]}
    base |= {"typical_p": 0.5, "num_beams": 4, "bad_words_ids": [[3]], "max_length": 20, "forced_eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(base))
    tokenizer = load_tokenizer(tmp_path)
    special = next(iter(set(tokenizer.special_ids) - {tokenizer.hf.eos_token}))
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    sampling = generation_settings(settings, 64) if is_rl else {}
    with_generation(tokenizer, sampling, f"\n\n,{special}").save(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    ids = [5, tokenizer.hf.eos_token_id, tokenizer.special_ids[special]]
    assert saved.pop("eos_token_id") == ids
    assert saved.pop("pad_token_id") == tokenizer.pad_id
    assert saved == {"bos_token_id": 1, "do_sample": True} | (sampling or {"top_k": 20})
    if is_rl:
        read = GenerationConfig.from_pretrained(tmp_path)
        assert (read.do_sample, read.temperature, read.top_k, read.top_p) == (True, 0.7, 0, 0.9)
        assert read.max_new_tokens == 64
        assert generation_settings(settings | {"temperature": 0}, 64) == {"max_new_tokens": 64, "do_sample": False}
    assert load_tokenizer(tmp_path).stop_ids == tuple(ids)
