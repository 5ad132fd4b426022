"""Adapters in and out: folders of PEFT, which peft and vLLM load (github.com/huggingface/peft)."""

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from models.architecture import Decoder
from models.families import DTYPES, module_names, tensor_name
from models.files import (
    ADAPTER_CONFIG,
    Shape,
    check_names,
    expert_tensors,
    layer_tensor,
    new_folder,
    write_tensors,
)
from models.lora import LoraConfig, adapted_layers, adapter_table
from models.names import EXPERT, LORA_A, LORA_B, Adapters
from models.tokenizer import Tokenizer, read_json
from utils.files import write_json
from utils.settings.errors import UserError

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
MERGE = "merge it by peft (merge_and_unload, save_pretrained), and name the merged model"
PLAIN = "pissa, olora, corda and lora_ga become plain LoRA if peft saves them with "
PLAIN += "path_initial_model_for_weight_conversion, and others are merged by it (merge_and_unload)"
NO_MATRIX = "it changes no matrix of the layers that could be merged"
READABLE = (*DTYPES.values(), "F64")
MAX_NUMBER = 65_504.0  # largest number of float16: no weights have more
ANY = object()
# Each field of adapter_config.json (those of LoraConfig in peft 0.21.2), with the values that are supported: any other
# except null, false and empty ones is refused, and so is a field of a later release.
FIELDS = {
    "base_model_name_or_path": ANY, "r": ANY, "lora_alpha": ANY, "use_rslora": ANY,
    "rank_pattern": ANY, "alpha_pattern": ANY,
    # Which matrices: the tensors show it.
    "target_modules": ANY, "exclude_modules": ANY, "layers_to_transform": ANY, "layers_pattern": ANY,
    # Training by peft, initial values (which come with init_lora_weights), layers of other kinds than nn.Linear.
    "lora_dropout": ANY, "inference_mode": ANY, "eva_config": ANY, "corda_config": ANY,
    "loftq_config": ANY, "lora_ga_config": ANY, "fan_in_fan_out": ANY, "use_qalora": ANY, "qalora_group_size": ANY,
    "megatron_core": ANY, "ensure_weight_tying": ANY, "runtime_config": ANY,
    "task_type": ANY, "auto_mapping": ANY, "peft_version": ANY,
    "peft_type": ("LORA",), "bias": ("none",), "revision": ("main",), "base_dtype": ("int8",),  # the last: our own
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),  # others change the base when they are loaded
    "use_dora": (), "modules_to_save": (), "lora_bias": (), "layer_replication": (), "target_parameters": (),
    "trainable_token_indices": (), "alora_invocation_tokens": (), "use_bdlora": (), "arrow_config": (),
    "monteclora_config": (), "kasa_config": (), "velora_config": (), "megatron_config": (),
}  # fmt: skip
REMEDIES = {
    "init_lora_weights": PLAIN,
    "revision": "download that revision of the base, and name its folder in base_model_name_or_path",
    "alora_invocation_tokens": "it is for some of the tokens only, and cannot be merged",
    "arrow_config": "it chooses among adapters for each token, and cannot be merged",
}
IMAGES = r"\b(vision_tower|visual|multi_modal_projector)\b"  # modules that compute them
PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
MAX_PATTERNS, MAX_PATTERN, MAX_CHOICES = 10_000, 1000, 3
REPEATED_GROUP = re.compile(r"\)[*+?{]")
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
    def has_experts(self) -> bool:
        """True if experts of an MoE model have adapters."""
        return any(".experts." in name for name in self.factors)

    @property
    def options(self) -> dict[str, int | float | str]:
        """Settings for continued training of these adapters."""
        return {"lora_rank": self.rank, "lora_alpha": self.alpha, "base_dtype": self.base_dtype}

    def check_options(self, given: Mapping[str, object]) -> None:
        """Raises UserError if settings that were given differ from the adapters' own; an int8 base may be chosen."""
        for name, value in self.options.items():
            wrong = given.get(name, value)
            if wrong not in (value, "int8"):
                both = f"--{name} {value}, and --{name} {wrong} was given"
                raise UserError(
                    f"{self.folder} holds adapters of {both}: give the value of the adapters, or leave the option out"
                )

    def settle(self, config: LoraConfig) -> LoraConfig:
        """Returns the settings, with the adapters' own values instead of defaults. Raises: as `check_options`."""
        given = {name: x for name, x in vars(config).items() if x != getattr(LoraConfig, name)}
        self.check_options(given)
        return LoraConfig(**(vars(config) | self.options | {name: given[name] for name in given}))


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads adapter_config.json, and the names and shapes of the tensors.

    Raises: UserError if they are malformed, or a field has a value that is not supported.
    """
    file = folder / ADAPTER_CONFIG
    config = read_json(file)
    check_fields(file, config)
    base, rank, alpha = config.get("base_model_name_or_path"), config.get("r"), config.get("lora_alpha")
    if not isinstance(base, str) or not is_size(rank) or not is_size(alpha):
        raise UserError(f"{file} lacks base_model_name_or_path, r or lora_alpha: export it again")
    ranks, alphas = (read_patterns(file, config, name) for name in ("rank_pattern", "alpha_pattern"))
    power = 0.5 if config.get("use_rslora") else 1.0  # the scale is divided by this power of the rank
    shapes = read_shapes(folder)
    largest, factors = 0, {}
    for name in shapes:
        if not name.endswith(LORA_A):
            continue
        matrix = name.removesuffix(LORA_A)
        own_rank = value_of(ranks, matrix, rank)
        if shapes[name][:1] != (own_rank,):
            raise UserError(
                f"{folder}: {name} has shape {shapes[name]}, but {ADAPTER_CONFIG} makes its rank {own_rank}: export it "
                "again"
            )
        largest = max(largest, shapes[name][0])
        factors[matrix] = value_of(alphas, matrix, alpha) / alpha * (rank / own_rank) ** power
    if not factors:
        raise UserError(f"{folder / WEIGHTS} has no tensor that ends in {LORA_A}: export it again")
    alpha *= largest / rank**power
    return AdapterConfig(
        folder=folder,
        base=base,
        base_dtype=config.get("base_dtype") or "",
        rank=largest,
        alpha=alpha,
        factors=factors,
        shapes=shapes,
    )


def is_size(value: object) -> bool:
    """True for a number above 0 that is neither a bool nor beyond any rank or alpha."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def check_fields(file: Path, config: Mapping[str, object]) -> None:
    """Raises UserError naming a field that makes the adapters of a kind that is not supported."""
    kind = config.get("peft_type")
    if kind != "LORA":
        remedy = NO_MATRIX if kind in PROMPTS else MERGE
        raise UserError(f"{file}: peft_type {reprlib.repr(kind)} is not supported, only LORA: {remedy}")
    for name, value in config.items():
        supported = FIELDS.get(name, ())
        if supported is ANY or value in (None, False, "", [], {}) or value in supported:
            continue
        remedy = REMEDIES.get(name, MERGE)
        raise UserError(f"{file}: {reprlib.repr(name)[1:-1]} {reprlib.repr(value)} is not supported: {remedy}")


def read_patterns(file: Path, config: Mapping[str, object], field: str) -> list[tuple[re.Pattern, float]]:
    """Returns peft's patterns for names of matrices, in its order, and the value for each.

    Raises: UserError for a malformed pattern, or one that could take forever: with a repeated group, or with many
    groups and repetitions.
    """
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise UserError(f"{file}: {field} is no object of at most {MAX_PATTERNS:,} names: export it again")
    compiled = []
    for pattern, value in patterns.items():
        is_simple = len(pattern) <= MAX_PATTERN and sum(map(pattern.count, "*+?{(")) <= MAX_CHOICES
        try:
            if not is_simple or REPEATED_GROUP.search(pattern) or not is_size(value):
                raise ValueError(f"not a number above 0 for a pattern with at most {MAX_CHOICES} groups or repetitions")
            compiled.append((re.compile(rf"(.*\.)?({pattern})$"), value))
        except (re.error, OverflowError, ValueError) as error:
            entry = f"{reprlib.repr(pattern)}: {reprlib.repr(value)}"
            raise UserError(f"{file}: {field} has {entry} ({error}): write out the names of matrices") from error
    return compiled


def value_of(patterns: list[tuple[re.Pattern, float]], matrix: str, default: float) -> float:
    """Returns the value of the first pattern that a matrix of PEFT's file matches."""
    module = matrix.removeprefix(PREFIX)
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def read_shapes(folder: Path) -> dict[str, Shape]:
    """Returns the shapes of the tensors of adapters. Raises: UserError if the file cannot be read."""
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = f"{PICKLE} is a pickle, which is not read: load it by peft and save it"
        raise UserError(f"{folder} has no file {WEIGHTS}: {pickled if (folder / PICKLE).exists() else 'copy it again'}")
    try:
        with safe_open(file, "np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}
            shapes = {name: tuple(stored.get_shape()) for name, stored in slices.items()}
            dtypes = {name: stored.get_dtype() for name, stored in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a whole safetensors file ({error}): copy it again") from error
    for name, dtype in dtypes.items():
        if dtype not in READABLE:
            raise UserError(f"{file}: {name} has type {dtype}: convert it to {' or '.join(READABLE)}")
    return shapes


def read_adapters(folder: Path) -> AdapterConfig | None:
    """Returns the settings of a folder's adapters, None if it holds a model. Raises: as `read_adapter_config`."""
    return read_adapter_config(folder) if (folder / ADAPTER_CONFIG).is_file() else None


def load_adapters(config: AdapterConfig, model: Decoder) -> Adapters:
    """Loads the adapters of a PEFT folder, float32, on the host; missing ones are zeros, which stay zeros.

    All have one rank and one scale: smaller ranks are padded with zeros, and B is multiplied by the matrix's factor.
    Raises: UserError if a tensor is unknown, lacks its other half, has another shape, or is not finite. Also if it is
    so large that the weights with the adapters added would not be finite.
    """
    folder = config.folder
    stored = stored_names(config, model)
    shapes = {name: config.shapes[tensor] for name, tensor in stored.items()}
    table = adapter_table(model, config.rank)
    names = {name: peft_names(model, layers, name) for name, layers in adapter_layers(model).items()}
    every = {tensor for stacked in names.values() for tensor in stacked}
    matrices = {name.removesuffix(LORA_A).removesuffix(LORA_B) for name in shapes}
    halves = {matrix + part for matrix in matrices for part in (LORA_A, LORA_B)}
    check_names(folder, "has the unknown tensor", shapes.keys() - every, "adapters of the matrices of layers are read")
    check_names(folder, "lacks tensor", halves - shapes.keys(), "copy it again")
    adapters = {name: np.zeros(spec.shape, np.float32) for name, spec in table.items()}
    largest = {}
    with safe_open(folder / WEIGHTS, "np") as tensors:
        for name, stacked in names.items():
            matrices_of_layers = adapters[name].reshape(-1, *table[name].shape[-2:])
            for matrix_of_layer, tensor in zip(matrices_of_layers, stacked, strict=True):
                if tensor not in shapes:
                    continue
                matrix, is_A = tensor.removesuffix(LORA_A).removesuffix(LORA_B), tensor.endswith(LORA_A)
                rank = shapes[matrix + LORA_A][0]
                own = matrix_of_layer[:rank] if is_A else matrix_of_layer[:, :rank]
                if shapes[tensor] != own.shape:
                    raise UserError(
                        f"{folder}: {tensor} has shape {shapes[tensor]}, but the base makes it {own.shape}: name the "
                        "base of these adapters"
                    )
                factor = 1.0 if is_A else config.factors[stored[matrix + LORA_A].removesuffix(LORA_A)]
                with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinity
                    own[:] = tensors.get_tensor(stored[tensor]).astype(np.float32) * factor
                largest[tensor] = check_size(f"{folder}: {tensor}", own)
    for matrix in matrices:
        A, B = (largest[matrix + part] for part in (LORA_A, LORA_B))
        rank = shapes[matrix + LORA_A][0]
        check_size(f"{folder}: {matrix}, B times A", A * B * rank * config.alpha / config.rank)
    return adapters


def check_size(name: str, x: np.ndarray) -> float:
    """Returns the largest magnitude of an array. Raises: UserError for NaN, and numbers beyond float16."""
    magnitude = float(np.abs(x).max(initial=0.0))
    if not magnitude <= MAX_NUMBER:
        what = f"numbers up to {magnitude:g}, beyond {MAX_NUMBER:g}" if math.isfinite(magnitude) else "NaN or infinity"
        raise UserError(f"{name} holds {what}: the file is damaged, or its training diverged")
    return magnitude


def stored_names(config: AdapterConfig, model: Decoder) -> dict[str, str]:
    """Returns the names of the file's tensors, by name in the text model; prints a line if some are for images.

    A tensor may have two names, for two classes of transformers: see `module_names`. Raises: UserError if they differ.
    """
    stored: dict[str, str] = {}
    twice = []
    of_images = False
    for tensor in config.shapes:
        start = PREFIX if tensor.startswith(PREFIX) else ""
        name = tensor_name(model, tensor.removeprefix(start))
        if name is None:
            of_images = True
            continue
        if start + name in stored:
            twice.append((stored[start + name], tensor))
        stored[start + name] = tensor
    with safe_open(config.folder / WEIGHTS, "np") as tensors:
        for pair in twice:
            if not np.array_equal(*map(tensors.get_tensor, pair)):
                raise UserError(f"{config.folder}: {' and '.join(pair)} are one matrix, but differ: leave one out")
    if of_images and jax.process_index() == 0:
        print(f"{config.folder}: adapters of images are neither read nor saved again, since only text is computed")
    return stored


def adapter_layers(model: Decoder) -> dict[str, list[int]]:
    """Returns the numbers of the layers in each array of adapters."""
    return {name + part: layers for name, layers in adapted_layers(model).items() for part in (LORA_A, LORA_B)}


def peft_name(i: int, name: str) -> str:
    """Returns the name in PEFT's file of the adapter of layer number `i`, over a model without images."""
    return PREFIX + layer_tensor(i, name)


def peft_names(model: Decoder, layers: list[int], name: str) -> list[str]:
    """Returns the names in PEFT's file of an array of adapters: a tensor of each layer, or of each of its experts.

    peft stacks the tensors of experts if transformers stacks their matrices.
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

    Adapters that are zeros, in A too, are left out, as they were in the folder that they came from. The other
    arguments are as in `save_model`.
    """
    arrays = {}
    for name, layers in adapter_layers(model).items():
        stacked = np.asarray(fetch(adapters[name]))
        of_layers = stacked.reshape(-1, *stacked.shape[-2:])
        arrays |= dict(zip(peft_names(model, layers, name), of_layers, strict=True))
    if not write:
        return
    every = {name.removesuffix(LORA_A) for name in arrays if name.endswith(LORA_A)}
    matrices = {name for name in every if arrays[name + LORA_A].any() or arrays[name + LORA_B].any()} or every
    arrays = {name: x for name, x in arrays.items() if name.removesuffix(LORA_A).removesuffix(LORA_B) in matrices}
    modules = target_modules(matrices, every - matrices)
    config = FIXED | {
        "base_model_name_or_path": base,
        "r": next(x.shape[0] for name, x in arrays.items() if name.endswith(LORA_A)),
        "lora_alpha": model.lora_alpha,
        "target_modules": text_modules(modules) if model.has_images else modules,
    }
    names = {name: module_names(model, name.removeprefix(PREFIX)) for name in arrays}
    arrays = {PREFIX + stored: arrays[name] for name, every_name in names.items() for stored in every_name}
    with new_folder(directory, tokenizer, card) as new:
        write_json(new / ADAPTER_CONFIG, config | ({"base_dtype": model.base_dtype} if model.base_dtype else {}))
        shapes = {name: x.shape for name, x in arrays.items()}
        write_tensors(new / WEIGHTS, shapes, np.dtype("float32"), arrays.values())


def target_modules(matrices: set[str], others: set[str]) -> list[str]:
    """Returns PEFT's `target_modules`: the ends of the matrices' names, or whole names if others end alike."""
    ends, other_ends = ({name.rpartition(".")[2] for name in names} for names in (matrices, others))
    return sorted({name.removeprefix(PREFIX) for name in matrices} if ends & other_ends else ends)


def text_modules(modules: Sequence[str]) -> str:
    """Returns PEFT's pattern for modules with these names or ends of names that are not of images."""
    ends = "|".join(re.escape(module.removeprefix("model.")) for module in modules)
    return rf"(?!.*{IMAGES})(.*\.)?({ends})"
