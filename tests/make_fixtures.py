"""Makes tests/fixtures: small random models with what transformers' own classes say about them.

    pip install torch transformers peft safetensors numpy      # the only file here that needs torch; the tests do not
    python tests/make_fixtures.py                         # folders that exist stay as they are

Each folder is a Hugging Face model folder with, in expected.npz, for B rows of T tokens and vocabulary V:
    tokens [B, T], logits [B, T, V]                 float32, also for the model saved as bfloat16
    prompts [B, P], starts [B], completions [B, A]  left-padded prompts, their first columns, and greedy completions
    gradient_norms [N], gradient_products [N]       of the mean of -log p(tokens[:, 1:]), for each tensor by its name:
                                                    norms, and products with `direction`

And folders of adapters over them as PEFT writes them, with tokens, logits and gradients by tensor in adapted.npz.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

FIXTURES = Path(__file__).resolve().parent / "fixtures"
CHARACTERS = "\n !()*+,-./0123456789:=?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz<>"
EOS = "<|endoftext|>"
LENGTHS, NUM_NEW = (9, 4, 1), 12  # tokens of the prompts, and of each completion
MIN_GAP = 1e-3  # between the two likeliest tokens of a greedy step: the choice must not hang on rounding
MIN_ROUTER_GAP = 1e-4  # between the probabilities of the last expert that a token is sent to and of the next one

BASE = {"intermediate_size": 40, "num_hidden_layers": 2, "initializer_range": 0.25, "max_position_embeddings": 4096}
LLAMA3 = {  # a context short enough that frequencies of all three kinds are tested
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SHORT = {"max_position_embeddings": 128}  # the factor times those before it, by which transformers 4 scales
HYBRID = {  # rotated: a quarter of the channels of a head; layers of attention: every fourth
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_theta": 1e3,
    "rope": {"partial_rotary_factor": 0.25},
}
IMAGE = {"hidden_size": 8, "intermediate_size": 8, "patch_size": 2}
VISION = IMAGE | {"depth": 1, "num_heads": 1, "out_hidden_size": 32}
SIGLIP = IMAGE | {"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 4}
WRAPPED = {  # with images: fields beside those of the text model
    Qwen3_5Config: {"vision_config": VISION},
    Gemma3Config: {"vision_config": SIGLIP, "mm_tokens_per_image": 1},
}
WINDOWS = {"sliding_window": 5, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
TIED = {"tie_word_embeddings": True}
FEW_EXPERTS = {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 3}
REST = {
    "num_hidden_layers": 5, "full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 3,
    "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3,
}  # fmt: skip
WIDE_VALUES = {
    "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 16,
    "rope": {"partial_rotary_factor": 0.5},
}  # fmt: skip
WRAPPED_GEMMA3 = {"num_hidden_layers": 6, "intermediate_size": 24, "pattern": 6}  # which its config.json leaves out
SHAPES = {  # name: (config class, hidden, query heads, key heads, channels, other fields)
    "qwen3-tied": (Qwen3Config, 32, 4, 2, 8, {"tie_word_embeddings": True}),
    "qwen3-wide-heads": (Qwen3Config, 24, 3, 1, 16, {"num_hidden_layers": 3}),
    "qwen3-sharded": (Qwen3Config, 32, 4, 4, 8, {"rope_theta": 1e6}),
    "qwen3-bfloat16": (Qwen3Config, 40, 8, 2, 8, {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-tied": (Qwen2Config, 32, 4, 2, 8, {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-untied": (Qwen2Config, 48, 6, 1, 8, {"rms_norm_eps": 1e-5}),
    "qwen2-deep": (Qwen2Config, 16, 2, 2, 8, {"num_hidden_layers": 5, "intermediate_size": 24}),
    "llama-scaled": (LlamaConfig, 32, 4, 2, 8, {"tie_word_embeddings": True, "rope": LLAMA3} | SHORT),
    "llama-untied": (LlamaConfig, 48, 6, 1, 8, {"rms_norm_eps": 1e-5, "rope_theta": 5e5}),
    "llama-linear": (LlamaConfig, 24, 3, 3, 8, {"rope": LINEAR}),
    "smollm3-tied": (SmolLM3Config, 32, 4, 2, 8, {"num_hidden_layers": 4, "rope_theta": 5e4}),
    "smollm3-rest": (SmolLM3Config, 24, 3, 1, 8, {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3-untied": (SmolLM3Config, 32, 2, 2, 16, {"tie_word_embeddings": False, "no_rope_layers": [0, 1]}),
    "gemma3-tied": (Gemma3TextConfig, 32, 4, 2, 8, WINDOWS | {"query_pre_attn_scalar": 16, "pattern": 2}),
    "gemma3-rest": (Gemma3TextConfig, 24, 3, 1, 16, WINDOWS | {"num_hidden_layers": 5, "pattern": 3}),
    "gemma3-linear": (Gemma3TextConfig, 40, 4, 4, 8, WINDOWS | {"pattern": 4, "rope": LINEAR | {"factor": 8.0}}),
    "olmo3-yarn": (Olmo3Config, 32, 4, 2, 8, WINDOWS | {"pattern": 4, "rope": YARN, "rope_theta": 5e5} | SHORT),
    "olmo3-rest": (Olmo3Config, 24, 3, 1, 8, WINDOWS | {"num_hidden_layers": 5, "pattern": 2}),
    "olmo3-tied": (Olmo3Config, 32, 2, 2, 16, WINDOWS | {"pattern": 3, "tie_word_embeddings": True}),
    "qwen3moe-untied": (Qwen3MoeConfig, 32, 4, 2, 8, EXPERTS | {"rope_theta": 1e6}),
    "qwen3moe-tied": (Qwen3MoeConfig, 24, 3, 1, 8, EXPERTS | TIED | {"norm_topk_prob": False, "num_experts": 5}),
    "qwen3moe-sharded": (Qwen3MoeConfig, 16, 2, 2, 8, EXPERTS | FEW_EXPERTS),
    "qwen3_5-tied": (Qwen3_5TextConfig, 32, 4, 2, 16, HYBRID | TIED),
    "qwen3_5-rest": (Qwen3_5TextConfig, 24, 3, 1, 16, HYBRID | REST),
    "qwen3_5-wide-values": (Qwen3_5TextConfig, 40, 2, 2, 8, HYBRID | WIDE_VALUES),
    "qwen3_5-images": (Qwen3_5Config, 32, 4, 2, 16, HYBRID | TIED),
    "gemma3-wrapped": (Gemma3Config, 16, 8, 4, 4, WINDOWS | WRAPPED_GEMMA3),
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
    sizes |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}  # of a padding id there is no gradient
    fields = BASE | others
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta", 1e4)}
    scaled = rope | fields.pop("rope", {})
    pattern = fields.pop("pattern", 0)
    if pattern:
        numbers = range(1, fields["num_hidden_layers"] + 1)
        fields["layer_types"] = ["sliding_attention" if i % pattern else "full_attention" for i in numbers]
        is_gemma3 = config_class in (Gemma3Config, Gemma3TextConfig)
        local = rope | {"rope_theta": 1e3} if is_gemma3 else rope
        fields["rope_parameters"] = {"full_attention": scaled, "sliding_attention": local}
    else:
        fields["rope_parameters"] = scaled
    sizes["vocab_size"] = len(CHARACTERS) + 1
    torch.manual_seed(seed)
    if config_class in WRAPPED:
        config = config_class(text_config=sizes | fields, tie_word_embeddings=True, **WRAPPED[config_class])
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config_class(**sizes, **fields))
    has_offset = config_class in (Gemma3TextConfig, Qwen3_5TextConfig, *WRAPPED)  # that is added to gains
    draw_parameters(model, has_offset)
    return model.eval()


def draw_parameters(model: torch.nn.Module, has_offset: bool) -> None:
    """Sets gains far from 1, biases far from 0, and decays of memories that last for several tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                offset = 1.0 if has_offset and "linear_attn" not in name else 0.0
                parameter.uniform_(0.5 - offset, 1.5 - offset)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, 0)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)


def as_transformers_4(folder: Path) -> None:
    """Rewrites config.json in the form of the published Qwen folders, which transformers 4 wrote."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    config |= {"rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False}
    config.pop("layer_types", None)
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def as_gemma3_4b(folder: Path) -> None:
    """Leaves the fields in text_config that the published Gemma 3 4B has there, and sizes that no default gives."""
    config = json.loads((folder / "config.json").read_text())
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")
    unpublished = ("vocab_size", "head_dim", "pad_token_id")
    text = {name: config["text_config"][name] for name in (*names, *unpublished)}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    config["text_config"] = text
    config["torch_dtype"] = config.pop("dtype")
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def watch_routers(model) -> list[float]:
    """Returns a list to which each router will add the least gap between an expert that it takes and the next one."""
    gaps = []

    def hook(router, inputs, outputs) -> None:
        top = outputs[0].softmax(-1).sort(-1, descending=True).values
        gap = top[:, router.top_k - 1] - top[:, router.top_k]
        gaps.append(gap.min().item())

    for module in model.modules():
        if hasattr(module, "top_k"):
            module.register_forward_hook(hook)
    return gaps


def expected(model, rng: np.random.Generator) -> dict[str, np.ndarray] | None:
    """Returns what transformers computes in float32; None: two tokens of a greedy step or two experts are too close."""
    gaps = watch_routers(model)
    vocab_size = model.config.get_text_config().vocab_size
    tokens = rng.integers(0, vocab_size, (3, max(LENGTHS) + NUM_NEW))
    prompts = rng.integers(0, vocab_size, (len(LENGTHS), max(LENGTHS)))
    starts = max(LENGTHS) - np.array(LENGTHS)
    visible = np.arange(max(LENGTHS)) >= starts[:, None]
    prompts[~visible] = 0
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits
        output = model.generate(
            torch.tensor(prompts),
            attention_mask=torch.tensor(visible).long(),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    top = torch.stack(output.scores).topk(2).values
    if (top[..., 0] - top[..., 1]).min() <= MIN_GAP or min(gaps, default=1) <= MIN_ROUTER_GAP:
        return None
    completions = output.sequences[:, max(LENGTHS) :]
    arrays = {"tokens": tokens, "prompts": prompts, "starts": starts, "completions": completions.numpy()}
    return {name: x.astype(np.int32) for name, x in arrays.items()} | {"logits": logits.numpy()}


def direction(i: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns numbers to multiply the gradient of tensor number `i` by."""
    return np.random.default_rng(i).standard_normal(shape)


def tensors_of(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors in the file of a parameter: experts are stacked in memory, gate and up projection in one."""
    layer, is_expert, projection = name.partition(".experts.")
    if not is_expert:
        return {name: x}
    tensors = {}
    for i, expert in enumerate(x):
        if projection == "gate_up_proj":
            gate, up = np.split(expert, 2)
            tensors |= {f"{layer}.experts.{i}.gate_proj.weight": gate, f"{layer}.experts.{i}.up_proj.weight": up}
        else:
            tensors[f"{layer}.experts.{i}.{projection}.weight"] = expert
    return tensors


def gradients(model, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns norms of the gradients of all tensors, in the order of their names, and a product of each."""
    ids = torch.tensor(tokens).long()
    logprobs = model(ids).logits[:, :-1].log_softmax(-1)
    loss = -logprobs.gather(-1, ids[:, 1:, None]).mean()
    loss.backward()
    found = {}
    for name, x in model.named_parameters():
        if x.grad is not None:  # else it computes images
            name = name.replace("model.language_model.", "model.")
            found |= tensors_of(name, x.grad.double().numpy())
    norms = [np.linalg.norm(found[name]) for name in sorted(found)]
    products = [(found[name] * direction(i, found[name].shape)).sum() for i, name in enumerate(sorted(found))]
    return {"gradient_norms": np.array(norms), "gradient_products": np.array(products)}


def make_folder(folder: Path, seed: int, shape: tuple) -> bool:
    """Makes a folder; returns False, and removes it, if a greedy step hangs on rounding."""
    model = make_model(seed, *shape)
    model.generation_config.eos_token_id = 0
    model = model.to(torch.bfloat16) if folder.name.endswith("bfloat16") else model
    model.save_pretrained(folder, max_shard_size="20KB" if folder.name.endswith("sharded") else "1GB")
    make_tokenizer().save_pretrained(folder)
    if folder.name in ("qwen3-bfloat16", "qwen2-tied", "qwen3moe-untied"):
        as_transformers_4(folder)
    if folder.name == "gemma3-wrapped":
        as_gemma3_4b(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arrays = expected(model, np.random.default_rng(seed))
    if arrays is None:
        shutil.rmtree(folder)
        return False
    np.savez_compressed(folder / "expected.npz", **arrays, **gradients(model, arrays["tokens"]))
    return True


ADAPTED = {"lora-qwen2": ("qwen2-untied", 3), "lora-qwen3": ("qwen3-tied", 2), "lora-qwen3_5": ("qwen3_5-tied", 2)}


def make_adapters(folder: Path, base: str, rank: int) -> None:
    """Makes a folder of random adapters over a model."""
    torch.manual_seed(rank)
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / base, dtype=torch.float32)
    settings = LoraConfig(r=rank, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, settings).eval()
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    for x in trained.values():
        torch.nn.init.normal_(x, 0, 0.2)
    with np.load(FIXTURES / base / "expected.npz") as arrays:
        tokens = arrays["tokens"]
    ids = torch.tensor(tokens).long()
    logits = model(ids).logits
    logprobs = logits[:, :-1].log_softmax(-1)
    (-logprobs.gather(-1, ids[:, 1:, None]).mean()).backward()
    gradients = {name.replace(".default", ""): x.grad.numpy() for name, x in trained.items()}
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    make_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"tests/fixtures/{base}"
    config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    np.savez_compressed(folder / "adapted.npz", tokens=tokens, logits=logits.detach().numpy(), **gradients)


def main():
    for name, (base, rank) in ADAPTED.items():
        if not (FIXTURES / name).exists():
            make_adapters(FIXTURES / name, base, rank)
    for seed, (name, shape) in enumerate(SHAPES.items()):
        folder = FIXTURES / name
        if not folder.exists():
            next(number for number in range(seed, 10**6, 100) if make_folder(folder, number, shape))


if __name__ == "__main__":
    main()
