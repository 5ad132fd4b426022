"""Models from Hugging Face folders and back: safetensors, slice by slice, straight into sharded arrays; no torch."""

import json
import math
import os
import reprlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from models.download_model import download
from models.names import EMBED, HEAD, LAYERS, Array, Params
from models.qwen3 import Qwen, Spec
from models.tokenizer import FILES, Tokenizer, load_tokenizer, read_json
from utils.devices.sharding import Layout
from utils.settings.config import option
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
ARCHITECTURES = {
    "Qwen3ForCausalLM": {"qk_norm": True, "qkv_bias": False},
    "Qwen2ForCausalLM": {"qk_norm": False, "qkv_bias": True},
}
CONFIG_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
CONFIG_TYPES = {  # field of config.json: its type, and the least and the largest number (for text and lists: length)
    "architectures": (list, 1, 1),
    "attention_bias": (bool, 0, 1),
    "dtype": (str, 1, 20),
    "head_dim": (int, 2, 1 << 16),
    "hidden_act": (str, 1, 100),
    "hidden_size": (int, 1, 1 << 20),
    "intermediate_size": (int, 1, 1 << 24),
    "layer_types": (list, 1, 1000),
    "max_position_embeddings": (int, 1, 1 << 40),
    "max_window_layers": (int, 0, 1000),
    "num_attention_heads": (int, 1, 1 << 16),
    "num_hidden_layers": (int, 1, 1000),
    "num_key_value_heads": (int, 1, 1 << 16),
    "rms_norm_eps": (float, 1e-12, 1),
    "rope_parameters": (dict, 0, 100),
    "rope_scaling": (dict, 0, 100),
    "rope_theta": (float, 1, 10**12),
    "sliding_window": (int, 0, 1 << 40),
    "tie_word_embeddings": (bool, 0, 1),
    "torch_dtype": (str, 1, 20),
    "use_sliding_window": (bool, 0, 1),
    "vocab_size": (int, 1, 1 << 24),
}
TYPE_NAMES = {
    bool: "true or false", int: "an integer from", float: "a number from",
    str: "text of length", list: "a list of texts, of length", dict: "an object of length",
}  # fmt: skip
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours: safetensors'
READABLE = (*DTYPES.values(), "F64")
CHECKED_AT_ONCE = 1 << 20  # numbers: their bits stay in the processor's cache
Shape = tuple[int, ...]
Index = tuple[slice, ...]
Fields = Mapping[str, Any]  # of a config.json
Readers = dict[str, Any]  # slices of safetensors files, a type of its extension module, by the name of the tensor


@dataclass(frozen=True)
class ComputeConfig:
    """Model computation."""

    dtype: str = option(
        "", "Data type of matrix multiplications; empty: bfloat16, and float32 on CPU", ["", "bfloat16", "float32"]
    )
    kv_dtype: str = option(
        "",
        "Data type of the KV cache; empty: as --dtype; int8: about half the memory and traffic, but probabilities "
        "that differ a little from the trainer's (see --importance_correction)",
        ["", "int8"],
    )

    @property
    def arguments(self) -> dict[str, bool | str]:
        """Returns the arguments of `load_model` that these settings are."""
        return {"dtype": self.dtype, "kv_dtype": self.kv_dtype}


@dataclass(frozen=True)
class TrainComputeConfig(ComputeConfig):
    """Model computation."""

    attention: str = option(
        "auto",
        "Attention kernel of the update; auto: cudnn on NVIDIA, splash on TPU, else plain",
        ["auto", "plain", "cudnn", "splash"],
        resumable=True,
    )
    unroll_layers: bool = option(
        False,
        "Unrolled code for the layers of the update in place of a scan: longer compilation, for small models",
        resumable=True,
    )

    @property
    def arguments(self) -> dict[str, bool | str]:
        """Returns the arguments of `load_model` that these settings are."""
        return super().arguments | {"attention": self.attention, "unroll": self.unroll_layers}


def load_model(
    path_or_hub_id: str | Path,
    layout: Layout | None = None,
    dtype: str = "float32",
    param_dtype: str = "float32",
    **overrides: bool | float | str,
) -> tuple[Qwen, Params, Tokenizer]:
    """Loads a Hugging Face folder (also relative to the repository) or, when there is none, a model of the hub.

    `dtype` is that of the matmuls (empty: bfloat16 on accelerators, float32 on CPU), `param_dtype` that of the arrays
    (empty: as config.json says), `overrides` are further fields of Qwen. Parameters are laid out by `layout`, or put
    on the first device. Host memory holds one parameter (of all layers) at a time.

    Raises: UserError naming what is missing, damaged, or not supported.
    """
    folder = find_model(path_or_hub_id)
    config = read_json(folder / CONFIG)
    mesh = layout.mesh if layout else None
    settings = {"dtype": dtype or default_dtype(), "mesh": mesh} | overrides
    architecture = read_config(config, folder / CONFIG)
    model = Qwen(**(architecture | settings))
    assert model.kernel  # which checks that it can run
    readers = open_tensors(folder, model)
    tokenizer = load_tokenizer(folder, model.vocab_size)
    param_dtype = param_dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    params = load_params(folder, readers, model, layout, jnp.dtype(param_dtype))
    return model, params, tokenizer


def default_dtype() -> str:
    """Returns the dtype of matmuls on this kind of device."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def find_local(name: str | Path) -> Path | None:
    """Returns the folder of that name in the working directory or the repository, None where there is none."""
    folders = Path(os.path.expanduser(name)), ROOT / name
    return next((folder for folder in folders if folder.is_dir()), None)


def find_model(path_or_hub_id: str | Path) -> Path:
    """Returns the folder of that name, in the working directory or the repository, else that of a download.

    Raises: UserError if there is neither.
    """
    folder = find_local(path_or_hub_id)
    if folder:
        return folder
    name = str(path_or_hub_id)
    if name.count("/") != 1 or name[0] in "/~.":
        raise UserError(f"there is no folder {name}: name one, or an id of the hub like Qwen/Qwen3-1.7B")
    try:
        return download(name)
    except ValueError as error:
        raise UserError(f"there is no folder {name}, and {error}") from error


def read_config(config: Fields, file: Path) -> dict[str, Any]:
    """Returns the fields of Qwen that a config.json gives, as transformers 4 and 5 write it.

    Raises: UserError for a field that is missing, malformed, out of range, or not supported.
    """
    fields = {name: value for name, value in config.items() if value is not None}
    check_types(fields, file)
    if config.get("sliding_window", 4096) is None:
        fields.pop("use_sliding_window", None)  # a window of null disables it
    check_supported(fields, file)
    architecture = fields["architectures"][0]
    fields["rope_theta"] = read_rope_theta(fields, file)
    try:
        check_heads(fields, file)
        heads = fields["num_attention_heads"]
        defaults = {
            "num_key_value_heads": heads,
            "head_dim": fields["hidden_size"] // heads,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": 32768,
        }
        fields = defaults | fields
        return ARCHITECTURES[architecture] | {name: fields[name] for name in CONFIG_FIELDS}
    except KeyError as error:
        raise UserError(f"{file} has no {error.args[0]}: it is not the config of a {architecture}") from None


def check_supported(fields: Fields, file: Path) -> None:
    """Raises UserError for the first field with a value that this model code does not compute."""
    architecture = fields.get("architectures", [None])[0]
    rope = rope_parameters(fields)
    has_bias = fields.get("attention_bias", False) and architecture != "Qwen2ForCausalLM"
    checks = (
        ("architectures", architecture, tuple(ARCHITECTURES)),
        ("hidden_act", fields.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",)),
        ("attention_bias", has_bias, (False,)),
        ("layer_types (see use_sliding_window)", unusual_layer_type(fields), ("full_attention",)),
        ("quantization_config", fields.get("quantization_config"), (None,)),
        ("dtype", fields.get("dtype", "float32"), tuple(DTYPES)),
        ("torch_dtype", fields.get("torch_dtype", "float32"), tuple(DTYPES)),
    )
    for field, value, supported in checks:
        if value not in supported:
            choices = " or ".join(map(repr, supported))
            raise UserError(f"{file}: {field} is {reprlib.repr(value)}, supported is {choices}")


def rope_parameters(fields: Fields) -> Fields:
    """Returns the block on rotary embeddings, which transformers 5 and 4 name differently."""
    return fields.get("rope_parameters") or fields.get("rope_scaling") or {}


def read_rope_theta(fields: Fields, file: Path) -> float:
    """Returns the base of the rotary embedding's wavelengths. Raises UserError if it is malformed."""
    theta = rope_parameters(fields).get("rope_theta")
    if theta is None:
        theta = fields.get("rope_theta", 10_000)
    check_types({"rope_theta": theta}, file)
    return float(theta)


def unusual_layer_type(fields: Fields) -> str:
    """Returns a type of layer other than full_attention if the model has one, else full_attention."""
    types = set(fields.get("layer_types", ()))
    has_window = fields.get("use_sliding_window") and fields.get("sliding_window", 4096)
    first_with_window = fields.get("max_window_layers", 28)
    if not types and has_window and first_with_window < fields.get("num_hidden_layers", 0):
        return "sliding_attention"
    return next(iter(types - {"full_attention"}), "full_attention")


def check_types(fields: Fields, file: Path) -> None:
    """Raises UserError for the first field that has not the type and range of CONFIG_TYPES."""
    for name, (kind, least, most) in CONFIG_TYPES.items():
        if name not in fields:
            continue
        value = fields[name]
        if not has_type(value, kind) or not least <= size_of(value) <= most:
            limits = "" if kind is bool else f" {least:,} to {most:,}"
            raise UserError(f"{file}: {name} is {reprlib.repr(value)}, not {TYPE_NAMES[kind]}{limits}")


def has_type(value: object, kind: type) -> bool:
    """True if a JSON value has this type; an integer is a number too, and a list holds texts only."""
    if kind is float:
        return type(value) in (int, float)
    if kind is list and type(value) is list:
        return all(isinstance(item, str) for item in value)
    return type(value) is kind


def size_of(value: bool | int | float | str | list[str] | dict[str, object]) -> float:
    """Returns a number itself, else a length."""
    is_number = isinstance(value, (bool, int, float))
    return value if is_number else len(value)


def check_heads(fields: Fields, file: Path) -> None:
    """Raises UserError for heads that cannot share their keys, or halves that cannot be rotated against each other."""
    heads = fields["num_attention_heads"]
    key_heads = fields.get("num_key_value_heads", heads)
    head_dim = fields.get("head_dim", fields["hidden_size"] // heads)
    if heads % key_heads:
        raise UserError(f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {key_heads}")
    if head_dim < 2 or head_dim % 2:
        raise UserError(f"{file}: head_dim is {head_dim}, which is not a positive even number")


def tensor_shapes(model: Qwen) -> dict[str, Shape]:
    """Returns name and shape of each tensor in the file, where layers are not stacked."""
    table = model.parameter_table()
    layers = table.pop(LAYERS)
    shapes = {name: spec.shape for name, spec in table.items()}
    for i in range(model.num_hidden_layers):
        shapes |= {layer_tensor(i, name): spec.shape[1:] for name, spec in layers.items()}
    return shapes


def layer_tensor(i: int, name: str) -> str:
    """Returns the name of a tensor of layer number `i` in the file."""
    return f"{LAYERS}.{i}.{name}"


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: the only one, or those of its index. Raises UserError if none."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}: download the weights")
    weight_map = read_json(folder / INDEX).get("weight_map")
    is_map = isinstance(weight_map, dict) and weight_map
    if not is_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{folder / INDEX} has no weight_map from tensors to files: download it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{folder / INDEX} names {reprlib.repr(name)}, which is no safetensors file of the folder")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is named in {INDEX} but missing: download it again")
    return [folder / name for name in names]


def open_tensors(folder: Path, model: Qwen) -> Readers:
    """Returns readers of all tensors by name, `reader[slices]`.

    Raises: UserError if their names, shapes or types are not those of the model.
    """
    readers = {}
    for file in weight_files(folder):
        try:
            opened = safe_open(file, "np")
            readers |= {name: opened.get_slice(name) for name in opened.keys()}
        except SafetensorError as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}): download it again") from error
    if model.tie_word_embeddings:
        readers.pop(HEAD, None)  # some writers store the tied weight twice
    expected = tensor_shapes(model)
    check_names(folder, "lacks tensor", expected.keys() - readers)
    check_names(folder, "has the unknown tensor", readers.keys() - expected)
    for name, expected_shape in expected.items():
        shape = tuple(readers[name].get_shape())
        if shape != expected_shape:
            raise UserError(f"{folder}: {name} has shape {shape}, but {CONFIG} makes it {expected_shape}")
        dtype = readers[name].get_dtype()
        if dtype not in READABLE:
            raise UserError(f"{folder}: {name} has type {dtype}, supported is {' or '.join(READABLE)}")
    return readers


def check_names(folder: Path, problem: str, names: set[str]) -> None:
    """Raises UserError if there are tensors with this problem."""
    if names:
        count = f"{len(names)} such tensors" if len(names) > 1 else "the only one"
        raise UserError(f"{folder} {problem} {min(names)} ({count}): its {CONFIG} is that of another model")


def load_params(folder: Path, readers: Readers, model: Qwen, layout: Layout | None, dtype: np.dtype) -> Params:
    """Loads the arrays of `model.parameter_table()`; each process reads only the slices that its devices hold.

    Raises: UserError for a tensor with NaN or infinity.
    """
    table = model.parameter_table()
    read = partial(read_tensor, folder, readers, dtype)
    layers = {}
    for name, spec in table.pop(LAYERS).items():
        names = [layer_tensor(i, name) for i in range(model.num_hidden_layers)]
        layers[name] = load_array(spec, layout, partial(read_stacked, read, spec.shape, names, dtype))
    params = {LAYERS: layers}
    for name, spec in table.items():
        params[name] = load_array(spec, layout, partial(read, name))
    if layout:
        layout.check_mesh_axes(params)
    return params


def load_array(spec: Spec, layout: Layout | None, read: Callable[[Index], np.ndarray]) -> jax.Array:
    """Returns an array, laid out or on the first device, of the slices that `read` returns."""
    if layout:
        sharding = layout.sharding(*spec)
    else:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.make_array_from_callback(spec.shape, sharding, read)


def read_stacked(
    read: Callable[[str, Index], np.ndarray], shape: Shape, names: list[str], dtype: np.dtype, index: Index
) -> np.ndarray:
    """Reads a slice of the array that has the tensors of these names as its rows."""
    sizes = [len(range(size)[part]) for size, part in zip(shape, index, strict=True)]
    stacked = np.empty(sizes, dtype)
    for row, name in zip(stacked, names[index[0]], strict=True):
        row[:] = read(name, index[1:])
    return stacked


def read_tensor(folder: Path, readers: Readers, dtype: np.dtype, name: str, index: Index) -> np.ndarray:
    """Reads a slice of a tensor. Raises UserError if it holds NaN or infinity."""
    with np.errstate(over="ignore"):  # what is too large becomes infinity, which is refused
        array = readers[name][index].astype(dtype, copy=False)
    if not is_finite(array):
        message = f"{folder}: {name} holds NaN or infinity as {dtype.name}"
        raise UserError(f"{message}: the file is damaged, or its training diverged")
    return array


def is_finite(array: np.ndarray) -> bool:
    """True if no number is NaN or infinite. Compares bits: NumPy's own test of bfloat16 takes four times as long."""
    numbers = array.reshape(-1)
    bits = numbers.view(f"uint{8 * array.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(bits.dtype)
    magnitude = ~np.array(-0.0, array.dtype).view(bits.dtype)
    for start in range(0, bits.size, CHECKED_AT_ONCE):
        chunk = bits[start : start + CHECKED_AT_ONCE]
        if (chunk & magnitude).max() >= infinity:
            return False
    return True


def save_model(
    directory: str | Path,
    model: Qwen,
    params: Params,
    tokenizer: Tokenizer,
    dtype: str = "",
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
    write: bool = True,
) -> None:
    """Writes a folder that `load_model` and transformers' AutoModelForCausalLM load, whole or not at all.

    The tensors have `dtype` (empty: that of the parameters). `fetch` brings one tensor to the host; in a multi-process
    run all processes call this function, since fetching is collective, and one of them with `write`. An earlier model
    in the folder is replaced; other files in it are kept.

    Raises: UserError when the folder has subfolders, and so is not that of a model.
    """
    directory = Path(directory).expanduser().resolve()
    new = directory.with_name(f".{directory.name}.new")
    dtype = jnp.dtype(dtype or params[EMBED].dtype)
    shards = split_shards(tensor_shapes(model), dtype.itemsize)
    if write:
        prepare(new, directory)
        tokenizer.save(new)
        write_json(new / CONFIG, make_config(model, tokenizer, dtype))
        if len(shards) > 1:
            write_json(new / INDEX, make_index(shards, dtype))
    for file, shapes in shards.items():
        arrays = fetch_arrays(params, shapes, fetch)
        if write:
            write_tensors(new / file, shapes, dtype, arrays)
        else:
            deque(arrays, maxlen=0)  # this process only takes part in the fetching
    if write:
        replace_folder(directory, new)


def fetch_arrays(
    params: Params, names: Iterable[str], fetch: Callable[[jax.Array], np.ndarray]
) -> Iterator[np.ndarray]:
    """Yields the arrays of these tensors on the host, one at a time."""
    for name in names:
        array = fetch(select_tensor(params, name))
        yield np.asarray(array)


def replace_folder(directory: Path, new: Path) -> None:
    """Moves the folder `new` to the place of `directory`, which may not exist yet."""
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def split_shards(shapes: Mapping[str, Shape], itemsize: int) -> dict[str, dict[str, Shape]]:
    """Returns the tensors of each file, in order, up to MAX_SHARD_BYTES in one."""
    shards = []
    room = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if size > room:
            shards.append({})
            room = MAX_SHARD_BYTES
        shards[-1][name] = shape
        room -= size
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def make_index(shards: Mapping[str, Mapping[str, Shape]], dtype: np.dtype) -> dict[str, object]:
    """Returns the index of a model in several files: the size of all tensors in bytes, and the file of each."""
    num_elements = 0
    weight_map = {}
    for file, shapes in shards.items():
        for name, shape in shapes.items():
            num_elements += math.prod(shape)
            weight_map[name] = file
    total_size = num_elements * dtype.itemsize
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def prepare(new: Path, directory: Path) -> None:
    """Makes the folder `new` that will replace `directory`, with copies of its files that are not the model's."""
    entries = list(directory.iterdir()) if directory.exists() else []
    for entry in entries:
        if entry.is_dir():
            raise UserError(f"{directory} has a subfolder {entry.name}, so it is not a model's: choose another folder")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for entry in entries:
        is_model = entry.name in (CONFIG, INDEX, *FILES) or entry.suffix == ".safetensors"
        if not is_model:
            shutil.copy2(entry, new)


def make_config(model: Qwen, tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, object]:
    """Returns the config.json of a model, in the form that all versions of transformers read."""
    features = {"qk_norm": model.qk_norm, "qkv_bias": model.qkv_bias}
    architecture = next(name for name in ARCHITECTURES if ARCHITECTURES[name] == features)
    config = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "torch_dtype": dtype.name,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "eos_token_id": list(tokenizer.stop_ids),
        "pad_token_id": tokenizer.pad_id,
    }
    return config | {name: getattr(model, name) for name in CONFIG_FIELDS}


def select_tensor(params: Params, name: str) -> Array:
    """Returns the array of a tensor's name; a layer's is sliced from the stacked array."""
    if not name.startswith(f"{LAYERS}."):
        return params[name]
    layer, name = name.removeprefix(f"{LAYERS}.").split(".", 1)
    return params[LAYERS][name][int(layer)]


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Writes an object as indented JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n")


def write_tensors(file: Path, shapes: Mapping[str, Shape], dtype: np.dtype, arrays: Iterable[np.ndarray]) -> None:
    """Writes a safetensors file one array at a time: safetensors' own writer wants all of them in memory.

    Source: the format as described at huggingface.co/docs/safetensors: length of the header, header, data.
    """
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype.name], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            out.write(array.astype(dtype, copy=False).tobytes())
