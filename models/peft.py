"""Adapters in and out: folders of PEFT, which peft and vLLM load (github.com/huggingface/peft)."""

import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from models.architecture import Decoder
from models.families import module_names, tensor_name
from models.files import ADAPTER_CONFIG, Shape, check_names, expert_tensors, layer_tensor, new_folder, save_tensors
from models.lora import adapted_layers, adapter_table
from models.names import EXPERT, LORA_A, LORA_B, Adapters
from models.tokenizer import Tokenizer
from utils.files import write_json
from utils.metrics.jsonl import read_json
from utils.settings.errors import UserError
from utils.settings.groups import LoraConfig

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Fields of adapter_config.json that do not change what the tensors of nn.Linear compute, or are read elsewhere. Any
# other field of peft, and of its later releases, is refused unless it is null, false, empty, or in SUPPORTED.
READ_OR_UNUSED = {
    "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "inference_mode", "eva_config",
    "corda_config", "loftq_config", "lora_ga_config", "fan_in_fan_out", "use_qalora", "qalora_group_size",
    "megatron_core", "ensure_weight_tying", "runtime_config", "task_type", "auto_mapping", "peft_version",
}  # fmt: skip
SUPPORTED = {
    "peft_type": ("LORA",), "bias": ("none",), "revision": ("main",), "base_dtype": ("int8",),  # the last: our own
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),  # others change the base when they are loaded
}  # fmt: skip
IMAGES = r"\b(vision_tower|visual|multi_modal_projector)\b"  # modules that compute them
FIXED = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
    "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip


class AdapterConfig(NamedTuple):
    """A checked folder of PEFT: contents of adapter_config.json, names and shapes of the tensors."""

    folder: Path
    base: str
    base_dtype: str  # dtype of the base in training: int8, or empty
    rank: int  # the largest of the matrices
    alpha: float  # scale as a multiple of 1 / rank, except for matrices with a factor
    factors: dict[str, float]  # for each matrix its own scale, divided by alpha / rank
    shapes: dict[str, Shape]  # shapes of the tensors

    @property
    def options(self) -> dict[str, int | float | str]:
        """Settings for continued training of these adapters."""
        return {"lora_rank": self.rank, "lora_alpha": self.alpha, "base_dtype": self.base_dtype}

    def check_options(self, given: Mapping[str, object]) -> None:
        """Raises UserError if settings that were given differ from the adapters' own; an int8 base may be chosen."""
        for name, value in self.options.items():
            if given.get(name, value) not in (value, "int8"):
                raise UserError(
                    f"{self.folder} holds adapters of --{name} {value}, and --{name} {given[name]} was given: give the "
                    "value of the adapters, or remove the option"
                )

    def settle(self, config: LoraConfig) -> LoraConfig:
        """Returns the settings, with the adapters' own values instead of defaults. Raises: as `check_options`."""
        given = {name: x for name, x in vars(config).items() if x != getattr(LoraConfig, name)}
        self.check_options(given)
        return LoraConfig(**(vars(config) | self.options | given))


def read_adapters(folder: Path) -> AdapterConfig:
    """Reads a folder's adapter_config.json, and the names and shapes of its tensors.

    Raises: UserError if they are malformed, or a field has a value that is not supported.
    """
    file, weights = folder / ADAPTER_CONFIG, folder / WEIGHTS
    config = read_json(file)
    for name, value in config.items():
        is_off = value in (None, False, "", [], {})
        if not (name in READ_OR_UNUSED or is_off or value in SUPPORTED.get(name, ())):
            raise UserError(
                f"{file}: {name} {reprlib.repr(value)} is not supported: merge it by peft (merge_and_unload, "
                "save_pretrained), and name the merged model"
            )
    base, rank, alpha = config.get("base_model_name_or_path"), config.get("r"), config.get("lora_alpha")
    if not (config.get("peft_type") and base and rank and alpha):
        raise UserError(f"{file} lacks peft_type, base_model_name_or_path, r or lora_alpha: export it again")
    try:
        with safe_open(weights, "np") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{weights} cannot be read ({error}): copy it again, or save a .bin file by peft") from error
    power = 0.5 if config.get("use_rslora") else 1.0  # the scale is divided by this power of the rank
    patterns = config.get("alpha_pattern") or {}
    largest, factors = 0, {}
    for name, shape in shapes.items():
        if name.endswith(LORA_A):
            matrix = name.removesuffix(LORA_A)
            module = matrix.removeprefix(PREFIX)
            own = (x for pattern, x in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
            largest = max(largest, shape[0])
            factors[matrix] = next(own, alpha) / alpha * (rank / shape[0]) ** power
    if not factors:
        raise UserError(f"{weights} has no tensor that ends in {LORA_A}: export it again")
    return AdapterConfig(
        folder=folder,
        base=base,
        base_dtype=config.get("base_dtype") or "",
        rank=largest,
        alpha=alpha * largest / rank**power,
        factors=factors,
        shapes=shapes,
    )


def load_adapters(config: AdapterConfig, model: Decoder) -> Adapters:
    """Loads the adapters of a PEFT folder, float32, on the host; missing ones are zeros, which stay zeros.

    All have one rank and one scale: smaller ranks are padded with zeros, and B is multiplied by the matrix's factor.
    Raises: UserError if a tensor is unknown, lacks its other half, has another shape, or is not finite.
    """
    folder = config.folder
    # A tensor may have two names, for two classes of transformers: see `module_names`.
    names = {tensor: tensor_name(model, tensor.removeprefix(PREFIX)) for tensor in config.shapes}
    if None in names.values() and jax.process_index() == 0:
        print(f"{folder}: adapters of images are neither read nor saved again, since only text is computed")
    stored = {PREFIX * tensor.startswith(PREFIX) + name: tensor for tensor, name in names.items() if name}
    table = adapter_table(model, config.rank)
    adapters = {name: np.zeros(spec.shape, np.float32) for name, spec in table.items()}
    places = {}  # the matrix of a layer, or of an expert, by the name of its tensor
    for name, tensors in peft_names(model).items():
        places |= zip(tensors, adapters[name].reshape(-1, *table[name].shape[-2:]), strict=True)
    halves = {matrix_of(name) + part for name in stored for part in (LORA_A, LORA_B)}
    check_names(folder, "has the unknown tensor", stored.keys() - places, "adapters of the matrices of layers are read")
    check_names(folder, "lacks tensor", halves - stored.keys(), "copy it again")
    with safe_open(folder / WEIGHTS, "np") as tensors:
        for name, tensor in stored.items():
            x = tensors.get_tensor(tensor).astype(np.float32)
            is_A = name.endswith(LORA_A)
            own = places[name][: x.shape[0]] if is_A else places[name][:, : x.shape[-1]]
            if x.shape != own.shape:
                raise UserError(
                    f"{folder}: {tensor} has shape {x.shape}, but the base makes it {own.shape}: name the base of "
                    "these adapters"
                )
            if not np.isfinite(x).all():
                raise UserError(f"{folder}: {tensor} holds NaN or infinity: copy it again, or train it again")
            own[:] = x if is_A else x * config.factors[matrix_of(tensor)]
    return adapters


def matrix_of(name: str) -> str:
    """Returns the name of the matrix that a tensor adapts, without its ".weight"."""
    return name.removesuffix(LORA_A).removesuffix(LORA_B)


def peft_names(model: Decoder) -> dict[str, list[str]]:
    """Returns the names in PEFT's file of each array of adapters: a tensor of each layer, or of each of its experts."""
    found = {}
    for name, layers in adapted_layers(model).items():
        for part in (LORA_A, LORA_B):
            tensors = [PREFIX + layer_tensor(i, name + part) for i in layers]
            if EXPERT in name:
                tensors = [x for tensor in tensors for x in expert_tensors(tensor, model.num_experts)]
            found[name + part] = tensors
    return found


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

    Adapters that are zeros, in A too, are left out, as they were in the folder that they came from. The other
    arguments are as in `save_model`.
    """
    arrays = {}
    for name, tensors in peft_names(model).items():
        stacked = np.asarray(fetch(adapters[name]))
        arrays |= zip(tensors, stacked.reshape(-1, *stacked.shape[-2:]), strict=True)
    if not write:
        return
    every = {*map(matrix_of, arrays)}
    matrices = {matrix_of(name) for name, x in arrays.items() if x.any()} or every
    arrays = {name: x for name, x in arrays.items() if matrix_of(name) in matrices}
    ends, other_ends = ({name.rpartition(".")[2] for name in names} for names in (matrices, every - matrices))
    modules = sorted({name.removeprefix(PREFIX) for name in matrices} if ends & other_ends else ends)
    if model.has_images:  # a pattern for the modules that are not of images
        texts = "|".join(re.escape(module.removeprefix("model.")) for module in modules)
        modules = rf"(?!.*{IMAGES})(.*\.)?({texts})"
    config = FIXED | {
        "base_model_name_or_path": base,
        "r": next(x.shape[0] for name, x in arrays.items() if name.endswith(LORA_A)),
        "lora_alpha": model.lora_alpha,
        "target_modules": modules,
    }
    names = {name: module_names(model, name.removeprefix(PREFIX)) for name in arrays}
    arrays = {PREFIX + stored: arrays[name] for name, every_name in names.items() for stored in every_name}
    with new_folder(directory, tokenizer, card) as new:
        write_json(new / ADAPTER_CONFIG, config | ({"base_dtype": model.base_dtype} if model.base_dtype else {}))
        save_tensors(new / WEIGHTS, {name: x.astype(np.float32, copy=False) for name, x in arrays.items()})
