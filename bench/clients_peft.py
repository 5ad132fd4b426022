"""Adapters that peft makes of each kind, over small random models: the logits of peft and ours.

    pip install torch peft transformers
    python bench/clients.py peft

Each kind is made by peft, given random numbers, saved, and loaded again by peft and by us; what we save of it in turn
is loaded by peft, in float64. Equal: within 1e-5 of the largest logit. CorDA, which needs texts, and LoftQ, which needs
bitsandbytes, are tried by their names in tests/models/test_lora.py.
"""

import contextlib
import io
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

from bench.clients import EQUAL, REFUSED, WRONG, Row
from models import decoder
from models.checkpoint import load_model, load_policy
from models.lora import LoraConfig as OurConfig
from models.peft import read_adapters, save_adapters
from utils.devices.sharding import single_device
from utils.settings.errors import UserError

PACKAGES = ("peft", "transformers", "torch")
FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures"
LLAMA, MIXTURE, HYBRID = "llama-untied", "qwen3moe-untied", "qwen3_5-tied"
WITH_IMAGES = " with images"  # behind a base: it is loaded with its images, not as AutoModelForCausalLM loads it
ALL = {"target_modules": "all-linear", "r": 4, "lora_alpha": 6}
SOME = ALL | {"target_modules": ["q_proj", "v_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOKENS = np.random.default_rng(0).integers(1, 60, (2, 24)).astype(np.int32)

KINDS = {  # name: base, config of peft
    "all-linear, Llama": (LLAMA, ALL),
    "all-linear, Qwen2": ("qwen2-untied", ALL),
    "all-linear, Qwen3": ("qwen3-tied", ALL),
    "all-linear, Gemma 3": ("gemma3-tied", ALL),
    "all-linear, OLMo 3": ("olmo3-yarn", ALL),
    "all-linear, SmolLM3": ("smollm3-tied", ALL),
    "all-linear, Qwen3.5": (HYBRID, ALL),
    "all-linear, Qwen3-MoE": (MIXTURE, ALL),
    "all-linear, Gemma 3 inside": ("gemma3-wrapped", ALL),
    "all-linear, Gemma 3 with images": (f"gemma3-wrapped{WITH_IMAGES}", ALL),
    "q and v, Gemma 3 with images": (f"gemma3-wrapped{WITH_IMAGES}", SOME),
    "all-linear, Qwen3.5 inside": ("qwen3_5-images", ALL),
    "all-linear, Qwen3.5 with images": (f"qwen3_5-images{WITH_IMAGES}", ALL),
    "attention, Qwen3-MoE": (MIXTURE, ALL | {"target_modules": ATTENTION}),
    "default modules, Llama": (LLAMA, {"r": 4}),
    "default modules, Qwen2": ("qwen2-untied", {"r": 4}),
    "q and v": (LLAMA, SOME),
    "attention only": (LLAMA, ALL | {"target_modules": ATTENTION}),
    "MLP only": (LLAMA, ALL | {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "a regex": (LLAMA, ALL | {"target_modules": r".*layers\.0\..*_proj"}),
    "layers_to_transform": (LLAMA, SOME | {"layers_to_transform": [1]}),
    "layers_pattern": (LLAMA, SOME | {"layers_to_transform": 1, "layers_pattern": "layers"}),
    "exclude_modules": (LLAMA, ALL | {"exclude_modules": ["down_proj", "model.layers.0.self_attn.o_proj"]}),
    "full attention of a hybrid": (HYBRID, SOME),
    "rsLoRA": (LLAMA, ALL | {"use_rslora": True}),
    "rank_pattern": (LLAMA, ALL | {"rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 1}}),
    "alpha_pattern": (LLAMA, ALL | {"alpha_pattern": {"^model.layers.0.self_attn.k_proj": 1, r".*\.mlp\..*": 16}}),
    "both patterns with rsLoRA": (
        LLAMA, ALL | {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 3, "o_proj": 2}}
    ),
    "a pattern with a group": (LLAMA, ALL | {"alpha_pattern": {r"(q|k)_proj": 3}}),
    "a pattern that may hang": (LLAMA, ALL | {"alpha_pattern": {r"([a-z]+_?)+": 3}}),
    "dropout": (LLAMA, ALL | {"lora_dropout": 0.3}),
    "gaussian": (LLAMA, ALL | {"init_lora_weights": "gaussian"}),
    "orthogonal": (LLAMA, ALL | {"init_lora_weights": "orthogonal"}),
    "random B": (LLAMA, ALL | {"init_lora_weights": False}),
    "EVA": (LLAMA, ALL | {"init_lora_weights": "eva"}),
    "MiCA": (LLAMA, ALL | {"init_lora_weights": "mica"}),
    "PiSSA": (LLAMA, ALL | {"init_lora_weights": "pissa"}),
    "PiSSA, fast": (LLAMA, ALL | {"init_lora_weights": "pissa_niter_2"}),
    "OLoRA": (LLAMA, ALL | {"init_lora_weights": "olora"}),
    "LoRA-GA": (LLAMA, ALL | {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()}),
    "PiSSA saved as plain LoRA": (LLAMA, ALL | {"init_lora_weights": "pissa"}),
    "DoRA": (LLAMA, ALL | {"use_dora": True}),
    "VeLoRA": (LLAMA, ALL | {"velora_config": peft.VeloraConfig(num_groups=4)}),
    "KaSA": (LLAMA, ALL | {"kasa_config": peft.KasaConfig()}),
    "aLoRA": (LLAMA, ALL | {"alora_invocation_tokens": [3, 4]}),
    "BD-LoRA": (LLAMA, SOME | {"use_bdlora": peft.BdLoraConfig(target_modules_bd_a=["q_proj", "v_proj"], nblocks=2)}),
    "MonteCLoRA": (LLAMA, ALL | {"monteclora_config": peft.MontecloraConfig()}),
    "fan_in_fan_out": (LLAMA, ALL | {"fan_in_fan_out": True}),
    "bias": ("qwen2-untied", ALL | {"bias": "all"}),
    "lora_bias": ("qwen2-untied", SOME | {"lora_bias": True}),
    "modules_to_save": (LLAMA, SOME | {"modules_to_save": ["lm_head"]}),
    "trainable_token_indices": (LLAMA, SOME | {"trainable_token_indices": [1, 2]}),
    "embedding": (LLAMA, SOME | {"target_modules": ["q_proj", "embed_tokens"]}),
    "head": (LLAMA, SOME | {"target_modules": ["q_proj", "lm_head"]}),
    "layer_replication": (LLAMA, SOME | {"layer_replication": [(0, 2), (1, 2)]}),
    "target_parameters": (MIXTURE, {"r": 4, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "bfloat16 file": (LLAMA, ALL),
    "adapter_model.bin": (LLAMA, ALL),
    "revision": (LLAMA, ALL | {"revision": "v2"}),
    "IA3": (LLAMA, peft.IA3Config()),
    "LoHa": (LLAMA, peft.LoHaConfig(target_modules=["q_proj"])),
    "LoKr": (LLAMA, peft.LoKrConfig(target_modules=["q_proj"])),
    "VeRA": (LLAMA, peft.VeraConfig(target_modules=["q_proj"])),
    "AdaLoRA": (LLAMA, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10)),
    "OFT": (LLAMA, peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4)),
    "prompt tuning": (LLAMA, peft.PromptTuningConfig(num_virtual_tokens=2)),
    "prefix tuning": (LLAMA, peft.PrefixTuningConfig(num_virtual_tokens=2)),
}  # fmt: skip


def rows() -> Iterator[Row]:
    """Yields a row for each kind."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    for name in KINDS:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            yield try_kind(name, Path(folder))


def try_kind(name: str, folder: Path) -> Row:
    """Makes adapters of a kind, and compares what peft and what we compute with them."""
    try:
        reference, plain = make(name, folder)
    except Exception as error:  # noqa: BLE001 (of peft, torch or transformers: nothing that we could load)
        return Row(name, "peft fails", f"{type(error).__name__}: {str(error)[:100]}")
    try:
        found = our_logits(folder)
    except UserError as error:
        return Row(name, REFUSED, str(error).replace(str(folder), "FOLDER"))
    again = peft_logits(KINDS[name][0], save_again(folder))
    size = np.abs(reference).max()
    distances = [np.abs(x - reference).max() / size for x in (found, again, plain)]
    text = "off by {:.0e}, what we save by {:.0e}; the adapters move logits by {:.1f}".format(*distances)
    return Row(name, EQUAL if max(distances[:2]) < 1e-5 < distances[2] else WRONG, text)


def load_base(name: str) -> PreTrainedModel:
    loader = AutoModelForImageTextToText if name.endswith(WITH_IMAGES) else AutoModelForCausalLM
    return loader.from_pretrained(FIXTURES / name.removesuffix(WITH_IMAGES), dtype=torch.float32)


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS).long()).logits.numpy()


def peft_logits(base: str, folder: Path) -> np.ndarray:
    model = PeftModel.from_pretrained(load_base(base), folder)
    return logits(model if base == MIXTURE else model.double())  # torch has no grouped product in float64


def our_logits(folder: Path) -> np.ndarray:
    model, params, _ = load_model(folder)
    return np.asarray(jax.jit(decoder.logits, static_argnums=0)(model, params, TOKENS))


def make(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Makes a folder of adapters by peft; returns the logits that peft computes with it, and those of the base."""
    base, settings = KINDS[name]
    torch.manual_seed(0)
    model = load_base(base)
    plain = logits(model)
    config = LoraConfig(**settings, task_type="CAUSAL_LM") if isinstance(settings, dict) else settings
    config.task_type = "CAUSAL_LM"
    model = get_peft_model(model, config)
    if name == "PiSSA saved as plain LoRA":
        model.save_pretrained(folder / "initial")
        json_file = folder / "initial/adapter_config.json"
        json_file.write_text(json_file.read_text().replace('"pissa"', "true"))  # loaded without another change
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    if name == "bfloat16 file":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16() if parameter.requires_grad else parameter.data
    if name == "PiSSA saved as plain LoRA":
        model.save_pretrained(folder, path_initial_model_for_weight_conversion=folder / "initial")
        shutil.rmtree(folder / "initial")
    else:
        model.save_pretrained(folder, safe_serialization=name != "adapter_model.bin")
    return peft_logits(base, folder), plain


def save_again(folder: Path) -> Path:
    """Writes adapters as training that goes on with them does; returns their folder."""
    adapters = read_adapters(folder)
    config = OurConfig(lora_rank=adapters.rank)
    model, _, arrays, tokenizer = load_policy(folder, config, 0, single_device(), "float32")
    save_adapters(folder / "again", model, arrays, tokenizer, adapters.base)
    return folder / "again"
