"""Families of models: the config.json of each as fields of Decoder.

To add one: write a row of FAMILIES if its fields differ, and a function of models/decoder.py if its computation does.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models.architecture import FULL, LINEAR, NO_ROPE, SLIDING, Decoder, DeltaShape
from models.rotary import Scaling
from models.tokenizer import Tokenizer
from utils.settings.errors import UserError

Fields = Mapping[str, Any]  # fields of a config.json
COMMON = (  # fields of config.json that are fields of Decoder
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
RENAMED = {"num_local_experts": "num_experts"}  # names that transformers 5 changed
WRAPPED = {  # class of a model with images: class of its text model
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
}
WRAPPED_PREFIXES = {  # prefixes of the names of its tensors: prefixes in the text model
    "model.language_model.": "model.",
    "language_model.model.": "model.",  # the published files of Gemma 3
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",  # a file without "model." before its names
}
BARE = ("embed_tokens.", "layers.", "norm.")  # in the files of a model without its head; transformers reads them, too
MODULES = {  # of the text model inside, as transformers names them: AutoModelForCausalLM takes Qwen3.5's out
    "Gemma3ForCausalLM": ("model.language_model.",),
    "Qwen3_5ForCausalLM": ("model.language_model.", "model."),
}
UNREAD = (  # tensors of images, and of the prediction of several tokens at once
    "model.visual.", "mtp.", "vision_tower.", "multi_modal_projector.", "model.vision_tower.",
    "model.multi_modal_projector.",
)  # fmt: skip
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours: safetensors'


class Family(NamedTuple):
    """A class of transformers: the fields of Decoder that all its models have, and those to read."""

    model_type: str
    fields: dict[str, bool | float | str]
    defaults: dict[str, bool | float]  # defaults of its config.json that differ from DEFAULTS
    read: Callable[[Fields], dict[str, Any]] = lambda fields: {}  # further fields of Decoder
    kinds: tuple[str, ...] = (FULL,)  # kinds of layers that config.json may name


def read_smollm3(fields: Fields) -> dict[str, Any]:
    """Returns which layers have no rotary embedding: by default every fourth."""
    interval = fields.get("no_rope_layer_interval", 4)
    numbers = range(1, fields["num_hidden_layers"] + 1)
    has_rope = fields.get("no_rope_layers") or [int(i % interval != 0) for i in numbers]
    return {"layer_types": tuple(FULL if rope else NO_ROPE for rope in has_rope)}


def layer_types(fields: Fields, other: str, interval: int) -> tuple[str, ...]:
    """Returns the kinds of layers: by default full attention in each one with a number that `interval` divides."""
    numbers = range(1, fields["num_hidden_layers"] + 1)
    return tuple(fields.get("layer_types") or [other if i % interval else FULL for i in numbers])


def read_windows(fields: Fields, interval: int) -> dict[str, Any]:
    """Returns which layers have a window, and its length."""
    types = layer_types(fields, SLIDING, interval)
    return {"layer_types": types, "sliding_window": fields.get("sliding_window", 4096)}


def read_gemma3(fields: Fields) -> dict[str, Any]:
    """Returns windows, wavelengths of layers with a window, and the scale of attention."""
    block = rope_block(fields, SLIDING)
    theta = block.get("rope_theta", fields.get("rope_local_base_freq", 10_000))
    scale = float(fields.get("query_pre_attn_scalar", 256)) ** -0.5
    windows = read_windows(fields, fields.get("sliding_window_pattern", 6))
    return windows | {"local_rope_theta": float(theta), "attention_scale": scale}


def read_olmo3(fields: Fields) -> dict[str, Any]:
    """Returns windows, and wavelengths of layers with a window, which are not scaled."""
    theta = rope_block(fields, SLIDING).get("rope_theta", fields.get("rope_theta", 500_000))
    return read_windows(fields, 4) | {"local_rope_theta": float(theta)}


EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def read_qwen3_5(fields: Fields) -> dict[str, Any]:
    """Returns which layers have attention, and the sizes of the others."""
    types = layer_types(fields, LINEAR, fields["full_attention_interval"])
    delta = DeltaShape(**{name: fields[field] for name, field in DELTA_FIELDS.items()})
    rotated = rope_block(fields, FULL).get("partial_rotary_factor") or fields["partial_rotary_factor"]
    return {"layer_types": types, "partial_rotary_factor": float(rotated), "delta": delta}


DELTA_FIELDS = {  # fields of DeltaShape: fields of config.json
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_channels": "linear_key_head_dim",
    "value_channels": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
DEFAULTS = {  # values of fields that config.json leaves out, as in transformers
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768, "rope_theta": 10_000,
}  # fmt: skip
FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", {"qk_norm": "head"}, {"num_key_value_heads": 32, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {"qk_norm": "head"},
        {"num_key_value_heads": 4, "norm_topk_prob": False},
        read=lambda fields: {name: fields[name] for name in EXPERT_FIELDS},
    ),
    "Qwen2ForCausalLM": Family("qwen2", {"qk_norm": "", "qkv_bias": True}, {"num_key_value_heads": 32}),
    "LlamaForCausalLM": Family("llama", {"qk_norm": ""}, {"max_position_embeddings": 2048}),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {"qk_norm": ""},
        {"num_key_value_heads": 4, "rope_theta": 2_000_000, "tie_word_embeddings": True},
        read=read_smollm3,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {
            "qk_norm": "head", "norms": "both", "norm_offset": 1.0, "hidden_act": "gelu_pytorch_tanh",
            "scale_embeddings": True,
        },
        {  # the published text_config of Gemma 3 4B leaves all of them out
            "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "max_position_embeddings": 131_072, "rope_theta": 1_000_000, "tie_word_embeddings": True,
        },
        read=read_gemma3,
        kinds=(FULL, SLIDING),
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        {"qk_norm": "projection", "norms": "post"},
        {"rope_theta": 500_000, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        read=read_olmo3,
        kinds=(FULL, SLIDING),
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        {"qk_norm": "head", "norm_offset": 1.0, "output_gate": True},
        {
            "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4, "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
        read=read_qwen3_5,
        kinds=(FULL, LINEAR),
    ),
}  # fmt: skip


def text_config(config: Fields, file: Path) -> Fields:
    """Returns the config of the text model in that of a model with images; any other config unchanged.

    Raises: UserError for a text_config that is not an object.
    """
    name = next((wrapped for wrapped in WRAPPED if config.get("architectures") == [wrapped]), None)
    if name is None:
        return config
    fields = config.get("text_config")
    if not isinstance(fields, dict):
        raise UserError(f"{file}: text_config is {reprlib.repr(fields)}, not an object: download it again")
    outer = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
    shared = {field: config[field] for field in outer if config.get(field) is not None}
    return fields | shared | {"architectures": [WRAPPED[name]]}


def tensor_name(model: Decoder, name: str) -> str | None:
    """Returns the name in the text model of a tensor of a file; None: it is not part of it."""
    if name.endswith("rotary_emb.inv_freq"):  # in old folders; config.json has it, too
        return None
    if name.startswith(BARE):
        return f"model.{name}"
    if model.family not in WRAPPED.values():
        return name
    if name.startswith(UNREAD):
        return None
    for prefix, text_prefix in WRAPPED_PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name


def module_names(model: Decoder, name: str) -> list[str]:
    """Returns the names that the classes of transformers give a tensor of the text model, in its published form."""
    prefixes = MODULES[model.family] if model.has_images else ["model."]
    return [prefix + name.removeprefix("model.") for prefix in prefixes]


def read_config(config: Fields, file: Path) -> dict[str, Any]:
    """Returns the fields of Decoder that a config.json gives, as transformers 4 and 5 write it.

    Raises: UserError for a field that is missing, malformed, out of range, or not supported.
    """
    fields = {RENAMED.get(name, name): value for name, value in config.items() if value is not None}
    if config.get("sliding_window", 4096) is None:
        fields["use_sliding_window"] = False  # a window of null disables it
    name = next(iter(fields.get("architectures", [])), None)
    try:
        check_supported(fields, file)
        family = FAMILIES[name]
        defaults = DEFAULTS | family.defaults
        heads = (defaults | fields)["num_attention_heads"]
        sizes = {"num_key_value_heads": heads, "head_dim": fields["hidden_size"] // heads}
        null = {name: size for name, size in sizes.items() if name in config}
        fields = sizes | defaults | null | fields
        block = rope_block(fields, FULL)
        fields["rope_theta"] = float(block.get("rope_theta", fields["rope_theta"]))
        common = {name: fields[name] for name in COMMON}
        common |= {"family": name, "rope_scaling": read_scaling(block, fields), "config": json.dumps(config)}
        common |= family.fields | family.read(fields)
    except KeyError as error:
        raise UserError(
            f"{file} has no {error.args[0]}, so it is not the config of a {name}: download it again"
        ) from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{file} has a field of another type ({error}): download it again") from error
    if SLIDING in common.get("layer_types", ()) and "sliding_window" in config:
        check_value("sliding_window", config["sliding_window"], (common["sliding_window"],), file)  # it may be null
    return common


def read_scaling(block: Fields, fields: Fields) -> Scaling | None:
    """Returns the scaling of rotary embeddings; None: there is none. Raises KeyError for a field that is missing."""
    rope_type = block.get("rope_type", block.get("type", "default"))
    if rope_type == "default":
        return None
    given = {name: block[name] for name in Scaling._fields if block.get(name) is not None}
    context = {"original_max_position_embeddings": fields["max_position_embeddings"], "factor": block["factor"]}
    return Scaling(**(context | given | {"rope_type": rope_type}))


def make_config(model: Decoder, tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, Any]:
    """Returns the config.json of a model: the one that it was read from, but for its dtype and the ids that end texts.

    A model without one is a Qwen3 that was made here.
    """
    made = {name: getattr(model, name) for name in COMMON} | {"attention_bias": False, "use_sliding_window": False}
    config = json.loads(model.config) if model.config else made | {"hidden_act": model.hidden_act}
    for name in ("dtype", "auto_map"):  # the first is read by transformers 5 alone
        config.pop(name, None)
    return config | {
        "architectures": [model.family],
        "model_type": FAMILIES[model.family].model_type,
        "torch_dtype": dtype.name,
        "eos_token_id": list(tokenizer.stop_ids),
        "pad_token_id": tokenizer.pad_id,
    }


SUPPORTED = {  # values of a field that this model code computes; the first also if config.json leaves it out
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "dtype": tuple(DTYPES),
    "torch_dtype": tuple(DTYPES),
}


def check_supported(fields: Fields, file: Path) -> None:
    """Raises UserError for the first field with a value that this model code does not compute."""
    name = next(iter(fields.get("architectures", [])), None)
    check_value("architectures", name, tuple(FAMILIES), file)
    family = FAMILIES[name]
    activation = family.fields.get("hidden_act", "silu")
    given = fields.get("hidden_act", fields.get("hidden_activation", activation))
    check_value("hidden_act", given, (activation,), file)
    if name != "Qwen2ForCausalLM":
        check_value("attention_bias", fields.get("attention_bias", False), (False,), file)
    check_value("layer_types (see use_sliding_window)", unusual_layer_type(fields, family), family.kinds, file)
    for field, supported in SUPPORTED.items():
        check_value(field, fields.get(field, supported[0]), supported, file)
    check_rope(fields, file, family)


def check_value(field: str, value: object, supported: tuple[object, ...], file: Path) -> None:
    """Raises UserError for a value of a field that is not supported."""
    if value not in supported:
        choices = " or ".join(map(repr, supported))
        raise UserError(
            f"{file}: {field} is {reprlib.repr(value)}, and supported is only {choices}: choose another model"
        )


def check_rope(fields: Fields, file: Path, family: Family) -> None:
    """Raises UserError for rotary embeddings that are malformed, or not computed."""
    parameters = fields.get("rope_parameters")
    if SLIDING in family.kinds and parameters and not parameters.keys() & {FULL, SLIDING}:
        raise UserError(
            f"{file}: rope_parameters have no {FULL} and {SLIDING}, which are rotated differently: download it again"
        )
    for kind, supported in ((FULL, ("default", "linear", "llama3", "yarn")), (SLIDING, ("default",))):
        block = rope_block(fields, kind)
        if not isinstance(block, dict):
            raise UserError(
                f"{file}: rope_parameters of {kind} are {reprlib.repr(block)}, not an object: download it again"
            )
        given = {name: value for name, value in block.items() if value is not None}
        rope_type = given.get("rope_type", given.get("type", "default"))
        check_value("rope_type", rope_type, supported, file)
        magnitude = Scaling(rope_type, given.get("factor", 1)).magnitude
        factor = given.get("attention_factor", magnitude)
        check_value("attention_factor", magnitude if abs(factor - magnitude) < 1e-6 else factor, (magnitude,), file)
        for name, value in {"mscale": None, "mscale_all_dim": None, "truncate": True}.items():
            check_value(name, given.get(name, value), (value,), file)
        if "partial_rotary_factor" not in family.defaults:
            factor = given.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1))
            check_value("partial_rotary_factor", factor, (1,), file)
    if family.model_type == "olmo3" and "rope_theta" not in rope_block(fields, SLIDING):
        # Versions of transformers differ on other wavelengths.
        theta = rope_block(fields, FULL).get("rope_theta", fields.get("rope_theta", 500_000))
        check_value("rope_theta without one of sliding_attention", theta, (500_000,), file)


def rope_block(fields: Fields, kind: str) -> Fields:
    """Returns the parameters of rotary embeddings in layers of this kind.

    transformers 5 has one block for all layers or one for each kind; version 4 one that is for full attention.
    """
    block = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if FULL in block or SLIDING in block:
        return block.get(kind) or {}
    return block if kind == FULL else {}


def unusual_layer_type(fields: Fields, family: Family) -> str:
    """Returns a kind of layer other than the family's if the model has one; if not, the family's first kind."""
    types = set(fields.get("layer_types", ()))
    unusual = sorted(types - set(family.kinds))
    has_list = family.model_type in ("qwen2", "qwen3")  # in others a window is one of all layers
    first_with_window = fields.get("max_window_layers", 28) if has_list else 0
    has_window = fields.get("use_sliding_window") and first_with_window < fields.get("num_hidden_layers", 0)
    if has_window and not (types and has_list):
        unusual.append(SLIDING)
    return next(iter(unusual), family.kinds[0])
