"""GGUF files: what they convert to against the folders that they were written from, and damaged ones."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.checkpoint import load_model
from runs import gguf_to_hf
from tests.references import DATA, FIXTURES, expected_of, logits, needs_data, rows
from utils.settings.errors import UserError

gguf = pytest.importorskip("gguf", reason="pip install gguf: GGUF files are read and written by this package")

from tests.gguf_files import Edit, byte_letters, write_gguf  # noqa: E402 (imports the package)

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["llama-untied", "qwen2-untied", "qwen2-tied", "qwen3-wide-heads", "qwen3-tied"]
FLOAT32 = jnp.dtype("float32")


def rope_factors(head_dim: int, theta: float, factor: float, context: int) -> np.ndarray:
    """The factors of Llama 3.1 in float64, one pair of channels after the other."""
    factors = []
    for i in range(0, head_dim, 2):
        waves = context * theta ** (-i / head_dim) / (2 * np.pi)
        share = min(max((waves - 1) / 3, 0), 1)
        factors.append(1 / ((1 - share) / factor + share))
    return np.float32(factors)


@pytest.mark.parametrize("name", NAMES)
def test_converted_file_has_the_logits_of_its_folder(name, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", name)
    gguf_to_hf.convert(file, tmp_path / "model", FLOAT32)
    model, params, tokenizer = load_model(tmp_path / "model")
    original, original_params, _ = load_model(FIXTURES / name)
    tokens = expected_of(name)["tokens"]
    np.testing.assert_array_equal(logits(model, params, tokens), logits(original, original_params, tokens))
    assert (model.family, model.num_parameters) == (original.family, original.num_parameters)
    assert tokenizer.stop_ids == (0,)
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("!(1")) == ["!(", "1"]


def test_the_factors_of_llama_31_are_recognized(tmp_path):
    def edit(writer) -> None:
        with_metadata("llama.rope.freq_base", 5e5, "FLOAT32")(writer)
        writer.add_tensor("rope_freqs.weight", rope_factors(8, 5e5, 32.0, 8192))

    model = gguf_to_hf.convert(write_gguf(tmp_path / "model.gguf", "llama-untied", edit), tmp_path / "model", FLOAT32)
    assert (model.rope_scaling.factor, model.rope_scaling.original_max_position_embeddings) == (32.0, 8192)
    loaded, _, _ = load_model(tmp_path / "model")
    assert loaded.rope_scaling == model.rope_scaling


@pytest.mark.parametrize("quantization, error", [("Q8_0", 1 / 127), ("BF16", 2**-8)])
def test_quantized_matrices_become_their_numbers(quantization, error, tmp_path):
    """Within the distance of two neighboring numbers, as a share of the largest one of a block."""
    file = write_gguf(tmp_path / "model.gguf", "qwen3-tied", quantization=quantization)
    gguf_to_hf.convert(file, tmp_path / "model", FLOAT32)
    original = load_file(FIXTURES / "qwen3-tied" / "model.safetensors")
    for name, array in load_file(tmp_path / "model" / "model.safetensors").items():
        assert np.abs(array - original[name]).max() <= error * np.abs(original[name]).max(), name


@pytest.mark.slow
def test_the_command_converts(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama-untied")
    command = [sys.executable, "runs/gguf_to_hf.py", file, tmp_path / "model", "--dtype=float16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "of a LlamaForCausalLM; written to" in done.stdout, done.stderr


@needs_data
def test_the_tokenizer_of_qwen3_survives(tmp_path):
    """Against ids that others computed with llama.cpp and transformers."""
    source = json.loads((DATA / "qwen3-tokenizer" / "tokenizer.json").read_text())
    config = json.loads((DATA / "qwen3-tokenizer" / "tokenizer_config.json").read_text())
    words = source["model"]["vocab"] | {token["content"]: token["id"] for token in source["added_tokens"]}
    tokens = sorted(words, key=words.get)
    added = {token["content"]: 3 if token["special"] else 4 for token in source["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in source["model"]["merges"]]

    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [added.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 151645,
        "tokenizer.chat_template": config["chat_template"],
    }
    tokenizer = gguf_to_hf.read_tokenizer(gguf_to_hf.Gguf(tmp_path, "qwen3", metadata, {}), len(tokens))
    assert tokenizer.stop_ids == (151645, 151643), "the second one is not in the metadata"
    for row in rows("llama_cpp_qwen2.jsonl"):
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert tokenizer.decode(row["ids"]) == row["text"]
    for row in rows("chat_template.jsonl"):
        if row["add_generation_prompt"] and not row["tools"]:
            assert tokenizer.chat(row["messages"], row["enable_thinking"] is not False) == row["ids"]


def test_digits_of_smollm_are_tokens_of_their_own(tmp_path):
    letters = byte_letters()
    tokens = ["<|end|>", *letters, "12", "ab", "\u0120\u0120", "<|im_end|>", "<|eot_id|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 3) + [3, 1],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.merges": ["1 2", "a b", "\u0120 \u0120"],
    }
    tokenizer = gguf_to_hf.read_tokenizer(gguf_to_hf.Gguf(tmp_path, "llama", metadata, {}), len(tokens))
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("ab12")) == ["ab", "1", "2"]
    assert tokenizer.hf.convert_ids_to_tokens(tokenizer.encode("a  1")) == ["a", "\u0120\u0120", "1"]
    assert tokenizer.stop_ids == (0, tokens.index("<|im_end|>")), "the other one is no control token"


# Files that are refused


def without_tensor(writer) -> None:
    del writer.tensors[0]["blk.0.attn_q.weight"]


def with_tensor(name: str, *shape: int, value: float = 1.0) -> Edit:
    def edit(writer) -> None:
        writer.tensors[0].pop(name, None)
        writer.add_tensor(name, np.full(shape, value, np.float32))

    return edit


def with_metadata(name: str, value: object, kind: str) -> Edit:
    def edit(writer) -> None:
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, gguf.GGUFValueType[kind])

    return edit


REFUSED = {
    "lacks tensor blk.0.attn_q.weight": without_tensor,
    "has tensor blk.0.ffn_gate_exps.weight": with_tensor("blk.0.ffn_gate_exps.weight", 2, 2),
    "output_norm.weight has shape (4,)": with_tensor("output_norm.weight", 4),
    "holds NaN or infinity": with_tensor("output_norm.weight", 48, value=np.nan),
    "are not the factors of Llama 3.1": with_tensor("rope_freqs.weight", 4, value=2.0),
    "its architecture is 'gpt2'": with_metadata("general.architecture", "gpt2", "STRING"),
    "has no llama.block_count": lambda writer: writer.kv_data[0].pop("llama.block_count"),
    "llama.rope.dimension_count is 4": with_metadata("llama.rope.dimension_count", 4, "UINT32"),
    "llama.attention.sliding_window is 8, which is": with_metadata("llama.attention.sliding_window", 8, "UINT32"),
    "llama.logit_scale is 0.5, which is not read": with_metadata("llama.logit_scale", 0.5, "FLOAT32"),
    "llama.rope.scaling.type is 'yarn'": with_metadata("llama.rope.scaling.type", "yarn", "STRING"),
    "tokenizer.ggml.model is 'llama'": with_metadata("tokenizer.ggml.model", "llama", "STRING"),
    "tokenizer.ggml.eos_token_id is 99999": with_metadata("tokenizer.ggml.eos_token_id", 99999, "UINT32"),
    "the model's chat template fails": with_metadata("tokenizer.chat_template", "{{ 1 / 0 }}", "STRING"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_file_that_cannot_be_converted_is_refused_by_its_reason(reason, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama-untied", REFUSED[reason])
    with pytest.raises(UserError) as raised:
        gguf_to_hf.convert(file, tmp_path / "model", FLOAT32)
    assert str(file) in str(raised.value)
    assert reason in str(raised.value)
    assert not (tmp_path / "model").exists()


def test_a_damaged_file_ends_in_one_sentence(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", "llama-untied").read_bytes()
    file = tmp_path / "model.gguf"
    many = (1 << 60).to_bytes(8, "little")
    damaged = [whole[: len(whole) * i // 20] for i in range(20)]
    damaged += [whole[:8] + many + whole[16:], whole[:16] + many + whole[24:], b"PK" + whole[2:], bytes(1000)]
    damaged += [whole.replace(b"llama.block_count", b"llama.\xff\xfeock_count")]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(UserError, match="model.gguf"):
            gguf_to_hf.convert(file, tmp_path / "model", FLOAT32)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    # A package that is not installed.
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        gguf_to_hf.convert(tmp_path / "model.gguf", tmp_path / "model", FLOAT32)
