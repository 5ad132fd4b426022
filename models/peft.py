"""Adapters in and out: folders of PEFT, which peft and vLLM load (github.com/huggingface/peft)."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from models.architecture import Decoder
from models.files import (
    ADAPTER_CONFIG,
    check_names,
    expert_tensors,
    layer_tensor,
    new_folder,
    write_json,
    write_tensors,
)
from models.lora import adapted_layers, adapter_table
from models.names import EXPERT, LORA_A, LORA_B, Adapters
from models.tokenizer import Tokenizer, read_json
from utils.settings.errors import UserError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
FIXED = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
    "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip


class AdapterConfig(NamedTuple):
    """Fields of adapter_config.json, the file of PEFT, that are read here."""

    folder: Path
    base: str
    rank: int
    alpha: float
    has_experts: bool  # of a mixture; else of no effect


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads adapter_config.json. Raises: UserError where it is malformed, or asks for what is not supported."""
    config = read_json(folder / ADAPTER_CONFIG)
    base, rank, alpha = config.get("base_model_name_or_path"), config.get("r"), config.get("lora_alpha")
    is_whole = isinstance(base, str) and isinstance(rank, int) and isinstance(alpha, int | float)
    if not is_whole or isinstance(rank, bool) or not (rank > 0 and alpha > 0):
        raise UserError(f"{folder / ADAPTER_CONFIG} lacks base_model_name_or_path, r or lora_alpha: export it again")
    unsupported = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unsupported:
        name = min(unsupported, default="peft_type" if config.get("peft_type") != "LORA" else "bias")
        raise UserError(f"{folder / ADAPTER_CONFIG}: {name} {config.get(name)!r} is not supported: plain LoRA is")
    has_experts = "down_proj" in (config.get("target_modules") or ())
    return AdapterConfig(folder, base, rank, float(alpha), has_experts)


def base_name(model_dir: str) -> str:
    """Returns the folder or hub id of the base of what is trained from here: of adapters that of their own base."""
    folder = Path(model_dir)
    return read_adapter_config(folder).base if (folder / ADAPTER_CONFIG).is_file() else model_dir


def load_adapters(config: AdapterConfig, model: Decoder, rank: int = 0) -> Adapters:
    """Loads the adapters of a PEFT folder, float32, on the host.

    Raises: UserError where a tensor is missing, unknown, of another shape, or not finite; for another rank (0: any).
    """
    folder = config.folder
    if rank and config.rank != rank:
        raise UserError(f"{folder} has adapters of rank {config.rank}: give --lora_rank {config.rank}")
    if model.num_experts and config.has_experts != model.adapts_experts:
        raise UserError(f"{folder} was saved with the other --lora_experts: give --lora_experts {config.has_experts:d}")
    file = folder / WEIGHTS
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a whole safetensors file ({error}): copy it again") from error
    table = adapter_table(model, config.rank)
    names = {name: peft_names(model, layers, name) for name, layers in adapter_layers(model).items()}
    every = {tensor for stacked in names.values() for tensor in stacked}
    check_names(folder, "lacks tensor", every - tensors.keys())
    check_names(folder, "has the unknown tensor", tensors.keys() - every)
    adapters = {}
    for name, stacked in names.items():
        shapes = {tensors[tensor].shape for tensor in stacked}
        expected = table[name].shape[-2:]
        if shapes != {expected}:
            raise UserError(f"{folder}: {stacked[0]} has shape {min(shapes)}, the base makes it {expected}")
        arrays = np.stack([tensors[tensor].astype(np.float32) for tensor in stacked])
        adapters[name] = arrays.reshape(table[name].shape)
        if not np.isfinite(adapters[name]).all():
            raise UserError(f"{folder}: {name} holds NaN or infinity: the file is damaged, or its training diverged")
    return adapters


def adapter_layers(model: Decoder) -> dict[str, list[int]]:
    """Returns the numbers of the layers of each array of adapters."""
    return {name + part: layers for name, layers in adapted_layers(model).items() for part in (LORA_A, LORA_B)}


def peft_name(i: int, name: str) -> str:
    """Returns the name in PEFT's file of the adapter of layer number `i`."""
    return PREFIX + layer_tensor(i, name)


def peft_names(model: Decoder, layers: list[int], name: str) -> list[str]:
    """Returns the names in PEFT's file of an array of adapters: a tensor of each layer, or of each of its experts.

    peft stacks those of experts where transformers does so with their matrices.
    """
    names = [peft_name(i, name) for i in layers]
    if EXPERT not in name:
        return names
    return [tensor for stacked in names for tensor in expert_tensors(stacked, model.num_experts)]


def save_adapters(
    directory: str | Path,
    model: Decoder,
    adapters: Adapters,
    tokenizer: Tokenizer,
    base: str,
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
    write: bool = True,
    card: str = "",
) -> None:
    """Writes adapters as a PEFT folder, whole or not at all. `base`: folder or hub id of their model.

    The other arguments are those of `save_model`.
    """
    arrays, shapes = {}, {}
    for name, layers in adapter_layers(model).items():
        stacked = np.asarray(fetch(adapters[name]))
        matrices = stacked.reshape(-1, *stacked.shape[-2:])
        for tensor, matrix in zip(peft_names(model, layers, name), matrices, strict=True):
            arrays[tensor] = matrix
            shapes[tensor] = matrix.shape
    if not write:
        return
    rank = next(shape[0] for name, shape in shapes.items() if name.endswith(LORA_A))
    targets = sorted({name.rpartition(".")[2] for name in adapted_layers(model)})
    with new_folder(directory, tokenizer, card) as new:
        write_json(new / ADAPTER_CONFIG, FIXED | {
            "base_model_name_or_path": base, "r": rank, "lora_alpha": model.lora_alpha, "target_modules": targets,
        })
        write_tensors(new / WEIGHTS, shapes, np.dtype("float32"), arrays.values())
