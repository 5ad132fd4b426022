"""config.json as public repositories have it: the model that it describes, by their model cards and papers.

That transformers computes the same of such models is in test_model.py, by its outputs.
"""

from pathlib import Path

import pytest

from models.architecture import FULL, LINEAR, NO_ROPE, SLIDING, Decoder
from models.families import WRAPPED, read_config, text_config
from models.rotary import Scaling

YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
HYBRID = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "output_gate_type": "swish",
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10_000_000, "rope_type": "default"},
}


def sizes(*numbers: int) -> dict[str, int]:
    """Width, width of the MLP, layers, heads, heads of keys, vocabulary, positions."""
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    names += "vocab_size", "max_position_embeddings"
    return dict(zip(names, numbers, strict=True))


PUBLISHED = {  # name: class, fields, fields and properties of the model
    "Qwen2.5-7B-Instruct, long": (
        "Qwen2ForCausalLM",
        sizes(3584, 18944, 28, 28, 4, 152_064, 32768)
        | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 131_072, "use_sliding_window": False}
        | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        {"head_dim": 128, "rope_scaling": Scaling("yarn", 4.0, 32768), "num_positions": 131_072, "qkv_bias": True},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        sizes(2048, 6144, 48, 32, 4, 151_936, 40960)
        | EXPERTS
        | {"head_dim": 128, "rope_theta": 1_000_000, "sliding_window": None},
        EXPERTS | {"head_dim": 128, "rope_theta": 1e6, "kinds": (FULL,) * 48, "num_parameters": 30_532_122_624},
    ),
    "Qwen3.8-27B": (
        "Qwen3_5ForCausalLM",
        sizes(5120, 17408, 64, 24, 4, 248_320, 262_144) | HYBRID,
        {
            "delta": (16, 48, 128, 128, 4),
            "kinds": ((LINEAR,) * 3 + (FULL,)) * 16,
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
        },
    ),
    "Llama-3.2-1B-Instruct": (
        "LlamaForCausalLM",
        sizes(2048, 8192, 16, 32, 8, 128_256, 131_072)
        | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True}
        | {"layer_types": None},
        {
            "head_dim": 64,
            "rope_scaling": Scaling("llama3", 32.0, 8192, 1.0, 4.0),
            "num_positions": 131_072,
            "num_parameters": 1_235_814_400,
        },
    ),
    "SmolLM3-3B": (
        "SmolLM3ForCausalLM",
        sizes(2048, 11008, 36, 16, 4, 128_256, 65536) | {"rope_theta": 5_000_000.0, "use_sliding_window": False},
        {"kinds": ((FULL,) * 3 + (NO_ROPE,)) * 9, "tie_word_embeddings": True, "rope_theta": 5e6},
    ),
    "gemma-3-4b-it": (  # its text_config leaves out all other fields
        "Gemma3ForCausalLM",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        sizes(2560, 10240, 34, 8, 4, 262_208, 131_072)
        | {
            "head_dim": 256,
            "kinds": (((SLIDING,) * 5 + (FULL,)) * 6)[:34],
            "sliding_window": 1024,
            "rope_theta": 1e6,
            "local_rope_theta": 1e4,
            "attention_scale": 1 / 16,
            "num_positions": 131_072,
        },
    ),
    "Olmo-3-7B-Think": (
        "Olmo3ForCausalLM",
        sizes(4096, 11008, 32, 32, 32, 100_278, 65536)
        | {"rms_norm_eps": 1e-6, "rope_scaling": YARN, "rope_theta": 500_000, "sliding_window": 4096},
        {
            "kinds": ((SLIDING,) * 3 + (FULL,)) * 8,
            "rope_scaling": Scaling("yarn", 8.0, 8192),
            "local_rope_theta": 5e5,
            "num_positions": 65536,
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_of_its_card(name):
    """Also inside of the config of a model with images."""
    family, fields, expected = PUBLISHED[name]
    texts = [fields | {"architectures": [family]}]
    for outer, text in WRAPPED.items():
        if text == family:
            texts.append(text_config({"architectures": [outer], "text_config": fields}, Path("config.json")))
    for config in texts:
        model = Decoder(**read_config(config, Path("config.json")))
        assert {field: getattr(model, field) for field in expected} == expected
