"""GGUF files of the fixtures, as llama.cpp's converter writes them."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.references import FIXTURES

Edit = Callable[[gguf.GGUFWriter], None]


def read_config(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


def interleave(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp wants them: one of each half of a head after the other."""
    heads = matrix.reshape(num_heads, 2, -1, matrix.shape[1])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(matrix.shape)


def write_vocabulary(writer, tokens: list[str], merges: list[str], types: list[int], pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)


def byte_letters() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(file: Path, name: str, edit: Edit = lambda writer: None, quantization: str = "F32") -> Path:
    """Writes a fixture as llama.cpp's converter does."""
    config = read_config(name)
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(file, architecture)
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if rope["rope_theta"] != 1e4:  # which files may leave out
        writer.add_rope_freq_base(rope["rope_theta"])
    num_letters = config["vocab_size"] - 2
    tokens = ["<|endoftext|>", *byte_letters()[:num_letters], "!("]  # whose first one Qwen2Tokenizer needs
    write_vocabulary(writer, tokens, ["! ("], [3] + [1] * (num_letters + 1), "qwen2")
    tensor_type = gguf.GGMLQuantizationType[quantization]
    for tensor, array in load_file(FIXTURES / name / "model.safetensors").items():
        if architecture == "llama" and "q_proj" in tensor:
            array = interleave(array, config["num_attention_heads"])
        if architecture == "llama" and "k_proj" in tensor:
            array = interleave(array, config["num_key_value_heads"])
        tensor_name = hf_to_gguf(architecture, config, tensor)
        if array.ndim == 2 and array.shape[1] % 32 == 0:  # numbers of a block
            writer.add_tensor(tensor_name, gguf.quants.quantize(array, tensor_type), raw_dtype=tensor_type)
        else:
            writer.add_tensor(tensor_name, array)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def hf_to_gguf(architecture: str, config: dict, tensor: str) -> str:
    """The package's own table of names."""
    names = gguf.constants.MODEL_ARCH_NAMES
    model = next(number for number, name in names.items() if name == architecture)
    table = gguf.get_tensor_name_map(model, config["num_hidden_layers"])
    base, kind = tensor.rsplit(".", 1)
    return f"{table.get_name(base)}.{kind}"
