"""Makes tests/fixtures: small random models with what transformers' own Qwen3 and Qwen2 say about them.

    pip install torch transformers safetensors numpy      # the only file here that needs torch; the tests do not
    python tests/make_fixtures.py

Each folder is a Hugging Face model folder with, in expected.npz, for B rows of T tokens and vocabulary V:
    tokens [B, T], logits [B, T, V]                 float32, also for the model saved as bfloat16
    prompts [B, P], starts [B], completions [B, A]  left-padded prompts, their first columns, and greedy completions
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

FIXTURES = Path(__file__).resolve().parent / "fixtures"
CHARACTERS = "\n !()*+,-./0123456789:=?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz<>"
EOS = "<|endoftext|>"
LENGTHS, NUM_NEW = (9, 4, 1), 12  # tokens of the prompts, and of each completion
MIN_GAP = 1e-3  # between the two likeliest tokens of a greedy step: the choice must not hang on rounding

BASE = {"intermediate_size": 40, "num_hidden_layers": 2, "initializer_range": 0.25, "max_position_embeddings": 128}
SHAPES = {  # name: (config class, hidden, query heads, key heads, channels, other fields)
    "qwen3-tied": (Qwen3Config, 32, 4, 2, 8, {"tie_word_embeddings": True}),
    "qwen3-wide-heads": (Qwen3Config, 24, 3, 1, 16, {"num_hidden_layers": 3}),
    "qwen3-sharded": (Qwen3Config, 32, 4, 4, 8, {"rope_theta": 1e6}),
    "qwen3-bfloat16": (Qwen3Config, 40, 8, 2, 8, {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-tied": (Qwen2Config, 32, 4, 2, 8, {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-untied": (Qwen2Config, 48, 6, 1, 8, {"rms_norm_eps": 1e-5}),
    "qwen2-deep": (Qwen2Config, 16, 2, 2, 8, {"num_hidden_layers": 5, "intermediate_size": 24}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character."""
    vocab = {token: i for i, token in enumerate([EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def make_model(seed: int, config_class, hidden: int, heads: int, kv_heads: int, head_dim: int, others: dict):
    """A model whose every parameter matters: normal weights, gains far from 1, biases far from 0."""
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    fields = BASE | others
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta", 1e4)}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_class(vocab_size=len(CHARACTERS) + 1, **sizes, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
    return model.eval()


def as_transformers_4(folder: Path) -> None:
    """Rewrites config.json in the form of the published Qwen folders."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    config |= {"rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def expected(model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What transformers computes in float32."""
    tokens = rng.integers(0, model.config.vocab_size, (3, max(LENGTHS) + NUM_NEW))
    prompts = rng.integers(0, model.config.vocab_size, (len(LENGTHS), max(LENGTHS)))
    starts = max(LENGTHS) - np.array(LENGTHS)
    visible = np.arange(max(LENGTHS)) >= starts[:, None]
    prompts[~visible] = 0
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits
        output = model.generate(
            torch.tensor(prompts), attention_mask=torch.tensor(visible).long(), do_sample=False, max_new_tokens=NUM_NEW,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    top = torch.stack(output.scores).topk(2).values
    assert (top[..., 0] - top[..., 1]).min() > MIN_GAP, "a greedy step is too close: take another seed"
    completions = output.sequences[:, max(LENGTHS) :]
    arrays = {"tokens": tokens, "prompts": prompts, "starts": starts, "completions": completions.numpy()}
    return {name: x.astype(np.int32) for name, x in arrays.items()} | {"logits": logits.numpy()}


def main():
    shutil.rmtree(FIXTURES, ignore_errors=True)
    for seed, (name, shape) in enumerate(SHAPES.items()):
        folder = FIXTURES / name
        model = make_model(seed, *shape)
        model.generation_config.eos_token_id = 0
        model = model.to(torch.bfloat16) if name.endswith("bfloat16") else model
        model.save_pretrained(folder, max_shard_size="20KB" if name.endswith("sharded") else "1GB")
        make_tokenizer().save_pretrained(folder)
        if name in ("qwen3-bfloat16", "qwen2-tied"):
            as_transformers_4(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        np.savez_compressed(folder / "expected.npz", **expected(model, np.random.default_rng(seed)))


if __name__ == "__main__":
    main()
