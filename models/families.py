"""Families of models: the config.json of each as fields of Decoder.

To add one: write a row of FAMILIES if its fields differ, and a function of models/decoder.py if its computation does.
"""

import copy
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from models.architecture import FULL, LINEAR, NO_ROPE, SLIDING, Decoder, DeltaShape
from models.rotary import Scaling
from models.tokenizer import Tokenizer
from utils.settings.errors import UserError, describe_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Fields = Mapping[str, Any]  # fields of a config.json
COMMON = (  # fields of config.json that are fields of Decoder
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
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
    """A class of transformers: its name in a config.json, and the fields of Decoder that all its models have."""

    model_type: str
    fields: dict[str, bool | float | str]
    kinds: tuple[str, ...] = (FULL,)  # kinds of layers that config.json may name


EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
DELTA_FIELDS = {  # fields of DeltaShape: fields of config.json
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_channels": "linear_key_head_dim",
    "value_channels": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
GEMMA3 = {
    "qk_norm": "head", "norms": "both", "norm_offset": 1.0, "hidden_act": "gelu_pytorch_tanh", "scale_embeddings": True,
}  # fmt: skip
FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", {"qk_norm": "head"}),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", {"qk_norm": "head"}),
    "Qwen2ForCausalLM": Family("qwen2", {"qk_norm": "", "qkv_bias": True}),
    "LlamaForCausalLM": Family("llama", {"qk_norm": ""}),
    "SmolLM3ForCausalLM": Family("smollm3", {"qk_norm": ""}),
    "Gemma3ForCausalLM": Family("gemma3_text", GEMMA3, (FULL, SLIDING)),
    "Olmo3ForCausalLM": Family("olmo3", {"qk_norm": "projection", "norms": "post"}, (FULL, SLIDING)),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text", {"qk_norm": "head", "norm_offset": 1.0, "output_gate": True}, (FULL, LINEAR)
    ),
}


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
    """Returns the fields of Decoder that a config.json gives: as transformers' class reads it, with its defaults.

    Raises: UserError for a field that is malformed, or has a value that is not computed here.
    """
    from transformers import CONFIG_MAPPING

    name = next(iter(config.get("architectures") or []), None)
    check_value("architectures", name, tuple(FAMILIES), file)
    family = FAMILIES[name]
    try:
        read = CONFIG_MAPPING[family.model_type].from_dict(copy.deepcopy(dict(config)))
        rope = read.rope_parameters
        full, local = rope.get(FULL, rope), rope.get(SLIDING, {})
        check_supported(config, read, family, file)
        fields = {field: getattr(read, field) for field in COMMON if field not in ("head_dim", "rope_theta")}
        head_dim = getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
        fields |= {"head_dim": head_dim, "rope_theta": float(full["rope_theta"])}
        fields["rope_scaling"] = read_scaling(full, read)
        fields |= {"family": name, "config": json.dumps(config)} | family.fields
        kinds = getattr(read, "layer_types", None) or ()
        if family.model_type == "smollm3":
            kinds = [FULL if has_rope else NO_ROPE for has_rope in read.no_rope_layers]
        if {*kinds} - {FULL}:
            fields["layer_types"] = tuple(kinds)
        if SLIDING in kinds:
            fields |= {"sliding_window": read.sliding_window, "local_rope_theta": float(local["rope_theta"])}
        if family.model_type == "gemma3_text":
            fields["attention_scale"] = float(read.query_pre_attn_scalar) ** -0.5
        if family.model_type == "qwen3_moe":
            fields |= {field: getattr(read, field) for field in EXPERT_FIELDS}
        if LINEAR in kinds:
            fields["delta"] = DeltaShape(**{field: getattr(read, other) for field, other in DELTA_FIELDS.items()})
            fields["partial_rotary_factor"] = float(full["partial_rotary_factor"])
        return fields
    except UserError:
        raise
    except Exception as error:  # of transformers, whose classes check fields, or of a field of another type
        raise UserError(f"{file} is not the config of a {name} ({describe_error(error)}): download it again") from error


def read_scaling(block: Fields, read: "PretrainedConfig") -> Scaling | None:
    """Returns the scaling of rotary embeddings; None: there is none."""
    if block["rope_type"] == "default":
        return None
    given = {name: block[name] for name in Scaling._fields if block.get(name) is not None}
    return Scaling(**({"original_max_position_embeddings": read.max_position_embeddings} | given))


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


def check_supported(config: Fields, read: "PretrainedConfig", family: Family, file: Path) -> None:
    """Raises UserError for the first field with a value that this model code does not compute."""
    given = {name: value for name, value in config.items() if value is not None}
    activation = family.fields.get("hidden_act", "silu")
    check_value("hidden_act", given.get("hidden_act", given.get("hidden_activation", activation)), (activation,), file)
    if family.model_type != "qwen2":
        check_value("attention_bias", given.get("attention_bias", False), (False,), file)
    for field, supported in SUPPORTED.items():
        check_value(field, given.get(field, supported[0]), supported, file)
    kinds = getattr(read, "layer_types", None) or ()
    for kind in kinds:
        check_value("layer_types (see use_sliding_window)", kind, family.kinds, file)
    if SLIDING in family.kinds:
        check_value("sliding_window", read.sliding_window, (read.sliding_window or "a number of tokens",), file)
    elif not kinds:  # a window is one of all layers
        check_value("use_sliding_window", getattr(read, "use_sliding_window", False), (False,), file)
    blocks = read.rope_parameters
    for kind, supported in ((FULL, ("default", "linear", "llama3", "yarn")), (SLIDING, ("default",))):
        block = {name: value for name, value in blocks.get(kind, blocks).items() if value is not None}
        if kind == SLIDING and SLIDING not in family.kinds:
            continue
        check_value("rope_type", block["rope_type"], supported, file)
        magnitude = Scaling(block["rope_type"], block.get("factor", 1)).magnitude
        factor = block.get("attention_factor", magnitude)
        check_value("attention_factor", magnitude if abs(factor - magnitude) < 1e-6 else factor, (magnitude,), file)
        for name, value in {"mscale": None, "mscale_all_dim": None, "truncate": True}.items():
            check_value(name, block.get(name, value), (value,), file)
        if LINEAR not in family.kinds:
            factor = block.get("partial_rotary_factor", given.get("partial_rotary_factor", 1))
            check_value("partial_rotary_factor", factor, (1,), file)


def check_value(field: str, value: object, supported: tuple[object, ...], file: Path) -> None:
    """Raises UserError for a value of a field that is not supported."""
    if value not in supported:
        choices = " or ".join(map(repr, supported))
        raise UserError(
            f"{file}: {field} is {reprlib.repr(value)}, and supported is only {choices}: choose another model"
        )
