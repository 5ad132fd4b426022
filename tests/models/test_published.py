"""config.json as it is published, and with any field left out: the same model as transformers' classes make of it.

Fields and values as public repositories quote them; lists of layers are left to the classes where they are the default.
"""

import copy
import math
from pathlib import Path

import pytest
import transformers

from models.architecture import FULL, NO_ROPE, SLIDING, Decoder
from models.families import COMMON, DELTA_FIELDS, EXPERT_FIELDS, FAMILIES, WRAPPED, read_config, text_config
from models.rotary import Scaling
from utils.settings.errors import UserError

FOURTH = [int(i % 4 != 0) for i in range(1, 37)]


def sizes(*numbers: int) -> dict[str, int]:
    """Width, width of the MLP, layers, heads, heads of keys, vocabulary, positions."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    names += "vocab_size", "max_position_embeddings"
    return dict(zip(names, numbers, strict=True))


QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN3 = QWEN | {
    "attention_bias": False,
    "head_dim": 128,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
}
EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
LLAMA = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GEMMA3 = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
}
GEMMA3_27B = sizes(5376, 21504, 62, 32, 16, 262_208, 131_072) | {
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
OLMO3 = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
HYBRID = sizes(5120, 17408, 64, 24, 4, 248_320, 262_144) | {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mtp_num_hidden_layers": 1,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}
QWEN2_5 = (
    sizes(3584, 18944, 28, 28, 4, 152_064, 32768)
    | QWEN
    | {
        "max_window_layers": 28,
        "rope_theta": 1e6,
        "sliding_window": 131_072,
        "tie_word_embeddings": False,
    }
)
PUBLISHED = {  # name: class, fields
    "Qwen2.5-7B-Instruct": ("Qwen2", QWEN2_5),
    "Qwen2.5-7B-Instruct, long": (
        "Qwen2",
        QWEN2_5 | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        sizes(2048, 6144, 48, 32, 4, 151_936, 40960)
        | QWEN3
        | EXPERTS
        | {"max_window_layers": 48, "tie_word_embeddings": False},
    ),
    "Qwen3.8-27B": ("Qwen3_5", HYBRID),
    "Llama-3.2-1B-Instruct": (
        "Llama",
        sizes(2048, 8192, 16, 32, 8, 128_256, 131_072)
        | LLAMA
        | {
            "rope_theta": 500_000.0,
            "rope_scaling": LLAMA3,
            "mlp_bias": False,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM3-3B": (
        "SmolLM3",
        sizes(2048, 11008, 36, 16, 4, 128_256, 65536)
        | LLAMA
        | {
            "attention_bias": False,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": FOURTH,
            "layer_types": [FULL] * 36,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
    ),
    "gemma-3-27b-it": ("Gemma3Text", GEMMA3_27B),
    "gemma-3-4b-it": (  # its text_config leaves out all other fields
        "Gemma3Text",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    ),
    "Olmo-3-7B-Think": (
        "Olmo3",
        sizes(4096, 11008, 32, 32, 32, 100_278, 65536) | OLMO3 | {"rope_scaling": YARN, "rope_theta": 500_000},
    ),
}
CLASSES = {name.removesuffix("ForCausalLM"): name for name in FAMILIES}
CLASSES["Gemma3Text"] = CLASSES.pop("Gemma3")
WRAPPERS = {text: outer for outer, text in WRAPPED.items()}


def config_of(name: str, fields: dict) -> transformers.PretrainedConfig:
    """What transformers makes of these fields, which it may change."""
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Qwen3_5" else f"{name}Config")
    return config_class(**copy.deepcopy(fields))


def of_transformers(config: transformers.PretrainedConfig) -> dict:
    """The fields of Decoder, from the attributes of a config of transformers."""
    rope = config.rope_parameters
    full = rope.get(FULL, rope)
    local = rope.get(SLIDING, {})
    fields = {name: getattr(config, name) for name in COMMON if name not in ("head_dim", "rope_theta")}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields |= {"head_dim": head_dim, "rope_theta": full["rope_theta"]}
    factor = full.get("factor", 1.0)
    context = {"original_max_position_embeddings": config.max_position_embeddings}
    scaling = context | {name: full[name] for name in Scaling._fields if name in full}
    fields["rope_scaling"] = None if full["rope_type"] == "default" else Scaling(**scaling)
    fields["magnitude"] = full.get("attention_factor") or (
        0.1 * math.log(factor) + 1 if full["rope_type"] == "yarn" and factor > 1 else 1
    )
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    if hasattr(config, "no_rope_layers"):
        kinds = [kind if rope else NO_ROPE for kind, rope in zip(kinds, config.no_rope_layers, strict=True)]
    fields["kinds"] = tuple(kinds)
    if SLIDING in kinds:
        fields |= {"sliding_window": config.sliding_window, "local_rope_theta": local["rope_theta"]}
    if hasattr(config, "query_pre_attn_scalar"):
        fields["attention_scale"] = config.query_pre_attn_scalar**-0.5
    if hasattr(config, "moe_intermediate_size"):
        fields |= {name: getattr(config, name) for name in EXPERT_FIELDS}
    if hasattr(config, "linear_num_key_heads"):
        fields["delta"] = tuple(getattr(config, name) for name in DELTA_FIELDS.values())
        fields["partial_rotary_factor"] = full["partial_rotary_factor"]
    return fields


def check(name: str, fields: dict, config: transformers.PretrainedConfig) -> None:
    """Asserts that a config.json of these fields, also inside of that of a model with images, is the same model."""
    family = CLASSES[name]
    texts = [fields | {"architectures": [family]}]
    if family in WRAPPERS:
        outer = {"architectures": [WRAPPERS[family]], "text_config": fields}
        texts.append(text_config(outer, Path("config.json")))
    for text in texts:
        model = Decoder(**read_config(copy.deepcopy(text), Path("config.json")))
        for field, expected in of_transformers(config).items():
            if field == "magnitude":
                found = model.rope_scaling.magnitude if model.rope_scaling else 1
                assert found == pytest.approx(expected, abs=1e-9)
            else:
                assert getattr(model, field) == expected, field


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_that_transformers_makes(name):
    family, fields = PUBLISHED[name]
    check(family, fields, config_of(family, fields))


POSITIONS = {  # context lengths of the model cards
    "Qwen2.5-7B-Instruct": 32768,
    "Qwen2.5-7B-Instruct, long": 131_072,
    "Llama-3.2-1B-Instruct": 131_072,
    "gemma-3-27b-it": 131_072,
    "Olmo-3-7B-Think": 65536,
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_model_has_the_positions_of_its_card(name):
    family, fields = PUBLISHED[name]
    fields = fields | {"architectures": [CLASSES[family]]}
    assert Decoder(**read_config(copy.deepcopy(fields), Path("config.json"))).num_positions == POSITIONS[name]


SMALL = sizes(48, 40, 5, 6, 2, 99, 77) | {"rms_norm_eps": 1e-3}
ROPE = {"rope_parameters": {"rope_type": "yarn", "factor": 3.0, "rope_theta": 4e4}}
KINDS = {"sliding_window": 7, "layer_types": [FULL, SLIDING] * 2 + [FULL]}
KINDS["rope_parameters"] = {FULL: ROPE["rope_parameters"], SLIDING: {"rope_theta": 3e3, "rope_type": "default"}}
OTHERS = {  # fields of each class that are not its defaults
    "Qwen3": ROPE | {"head_dim": 10, "tie_word_embeddings": True},
    "Qwen3Moe": ROPE | {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "Qwen2": ROPE,
    "Llama": ROPE,
    "SmolLM3": ROPE | {"no_rope_layer_interval": 2, "tie_word_embeddings": False},
    "Gemma3Text": KINDS | {"head_dim": 10, "query_pre_attn_scalar": 9},
    "Olmo3": KINDS,
    "Qwen3_5": {
        "head_dim": 16,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e3, "partial_rotary_factor": 0.5},
    },
}


@pytest.mark.parametrize("name", CLASSES)
def test_missing_field_has_the_default_of_transformers(name):
    """Each field of each class: the same model without it, or a sentence that names it."""
    fields = config_of(name, SMALL | OTHERS[name]).to_dict()
    check(name, fields, config_of(name, fields))
    num_read = 0
    for left_out in fields:
        others = {field: value for field, value in fields.items() if field != left_out}
        try:
            config = config_of(name, others)
        except Exception:  # transformers has no such model either
            continue
        try:
            check(name, others, config)
            num_read += 1
        except UserError as error:
            names = left_out.replace("num_local", "num"), "num_key_value_heads", "head_dim"  # which hang on others
            assert any(name in str(error) for name in names)
    assert num_read > 0.7 * len(fields)
