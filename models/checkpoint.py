"""Models from Hugging Face folders and back: safetensors, slice by slice, straight into sharded arrays; no torch."""

import json
import math
import os
import reprlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from models.download_model import download
from models.qwen3 import EMBED, HEAD, LAYERS, Params, Qwen, Spec
from models.tokenizer import FILES, Tokenizer, load_tokenizer, read_json
from utils.devices.sharding import Layout
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
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


def load_model(
    path_or_hub_id: str | Path,
    layout: Layout | None = None,
    dtype: str = "float32",
    param_dtype: str = "float32",
    **overrides,
) -> tuple[Qwen, Params, Tokenizer]:
    """A model from a Hugging Face folder (also relative to the repository) or, when there is none, from the hub.

    `dtype` is that of the matmuls (empty: bfloat16 on accelerators, float32 on CPU), `param_dtype` that of the arrays
    (empty: as config.json says), `overrides` are further fields of Qwen. Parameters are laid out by `layout`, or stand
    on the first device. Host memory holds one parameter (of all layers) at a time.

    Raises: UserError naming what is missing, damaged, or not supported.
    """
    folder = find_model(path_or_hub_id)
    config = read_json(folder / CONFIG)
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    where = {"dtype": dtype, "mesh": layout.mesh if layout else None}
    model = Qwen(**(read_config(config, folder / CONFIG) | where | overrides))
    assert model.kernel  # which checks that it can run
    readers, tokenizer = open_tensors(folder, model), load_tokenizer(folder, model.vocab_size)
    param_dtype = jnp.dtype(param_dtype or config.get("dtype") or config.get("torch_dtype") or "float32")
    return model, load_params(folder, readers, model, layout, param_dtype), tokenizer


def find_local(name: str | Path) -> Path | None:
    """Returns the folder of that name in the working directory or the repository, None where there is none."""
    folders = Path(os.path.expanduser(name)), ROOT / name
    return next((folder for folder in folders if folder.is_dir()), None)


def find_model(path_or_hub_id: str | Path) -> Path:
    """The folder of that name, in the working directory or the repository, else a download."""
    if folder := find_local(path_or_hub_id):
        return folder
    if str(path_or_hub_id).count("/") != 1 or str(path_or_hub_id)[0] in "/~.":
        raise UserError(f"there is no folder {path_or_hub_id}: name one, or an id of the hub like Qwen/Qwen3-1.7B")
    try:
        return download(str(path_or_hub_id))
    except ValueError as error:
        raise UserError(f"there is no folder {path_or_hub_id}, and {error}") from error


def read_config(config: Mapping, file: Path) -> dict:
    """The fields of Qwen that a config.json gives, as transformers 4 and 5 write it.

    Raises: UserError for a field that is missing, malformed, out of range, or not supported.
    """
    given = {name: value for name, value in config.items() if value is not None}
    check_types(given, file)
    architecture = given.get("architectures", [None])[0]
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kinds = set(given.get("layer_types", ()))
    window = given.get("use_sliding_window") and config.get("sliding_window", 4096)
    if not kinds and window and given.get("max_window_layers", 28) < given.get("num_hidden_layers", 0):
        kinds.add("sliding_attention")
    kind = next(iter(kinds - {"full_attention"}), "full_attention")
    checks = (
        ("architectures", architecture, tuple(ARCHITECTURES)),
        ("hidden_act", given.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",)),
        ("attention_bias", given.get("attention_bias", False) and architecture != "Qwen2ForCausalLM", (False,)),
        ("layer_types (see use_sliding_window)", kind, ("full_attention",)),
        ("quantization_config", given.get("quantization_config"), (None,)),
        ("dtype", given.get("dtype", "float32"), tuple(DTYPES)),
        ("torch_dtype", given.get("torch_dtype", "float32"), tuple(DTYPES)),
    )
    for field, value, supported in checks:
        if value not in supported:
            choices = " or ".join(map(repr, supported))
            raise UserError(f"{file}: {field} is {reprlib.repr(value)}, supported is {choices}")
    theta = given.get("rope_theta", 10_000) if rope.get("rope_theta") is None else rope["rope_theta"]
    check_types({"rope_theta": theta}, file)
    given["rope_theta"] = float(theta)
    try:
        heads = given["num_attention_heads"]
        check_heads(given, file)
        defaults = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads, "rms_norm_eps": 1e-6}
        defaults |= {"tie_word_embeddings": False, "max_position_embeddings": 32768}
        return ARCHITECTURES[architecture] | {name: (defaults | given)[name] for name in CONFIG_FIELDS}
    except KeyError as error:
        raise UserError(f"{file} has no {error.args[0]}: it is not the config of a {architecture}") from None


def check_types(fields: Mapping[str, Any], file: Path) -> None:
    """Raises UserError for the first field that has not the type and range of CONFIG_TYPES."""
    for name, (kind, least, most) in CONFIG_TYPES.items():
        if name not in fields:
            continue
        value = fields[name]
        is_kind = type(value) in ((int, float) if kind is float else (kind,))
        if is_kind and kind is list:
            is_kind = all(isinstance(item, str) for item in value)
        size = value if kind in (bool, int, float) else len(value) if is_kind else 0
        if not is_kind or not least <= size <= most:
            limits = f" {least:,} to {most:,}" if kind is not bool else ""
            raise UserError(f"{file}: {name} is {reprlib.repr(value)}, not {TYPE_NAMES[kind]}{limits}")


def check_heads(fields: Mapping[str, Any], file: Path) -> None:
    """Raises UserError for heads that cannot share their keys, or halves that cannot be rotated against each other."""
    heads = fields["num_attention_heads"]
    key_heads = fields.get("num_key_value_heads", heads)
    head_dim = fields.get("head_dim", fields["hidden_size"] // heads)
    if heads % key_heads:
        raise UserError(f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {key_heads}")
    if head_dim < 2 or head_dim % 2:
        raise UserError(f"{file}: head_dim is {head_dim}, which is not a positive even number")


def tensor_shapes(model: Qwen) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in the file, where layers are not stacked."""
    table = model.table()
    layers = table.pop(LAYERS)
    shapes = {name: spec.shape for name, spec in table.items()}
    for i in range(model.num_hidden_layers):
        shapes |= {f"{LAYERS}.{i}.{name}": spec.shape[1:] for name, spec in layers.items()}
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the one, or those that its index names. Raises UserError without any."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}: download the weights")
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{folder / INDEX} has no weight_map from tensors to files: download it again")
    for name in set(names.values()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{folder / INDEX} names {reprlib.repr(name)}, which is no safetensors file of the folder")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is named in {INDEX} but missing: download it again")
    return [folder / name for name in sorted(set(names.values()))]


def open_tensors(folder: Path, model: Qwen) -> dict:
    """Readers of all tensors by name, `reader[slices]`, once their names, shapes and types are those of the model."""
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
    missing, unknown = expected.keys() - readers, readers.keys() - expected
    for what, names in (("lacks tensor", missing), ("has the unknown tensor", unknown)):
        if names:
            count = f"{len(names)} such tensors" if len(names) > 1 else "the only one"
            raise UserError(f"{folder} {what} {min(names)} ({count}): its {CONFIG} is that of another model")
    for name, shape in expected.items():
        if (found := tuple(readers[name].get_shape())) != shape:
            raise UserError(f"{folder}: {name} has shape {found}, but {CONFIG} makes it {shape}")
        if (dtype := readers[name].get_dtype()) not in READABLE:
            raise UserError(f"{folder}: {name} has type {dtype}, supported is {' or '.join(READABLE)}")
    return readers


def load_params(folder: Path, readers: Mapping, model: Qwen, layout: Layout | None, dtype: np.dtype) -> Params:
    """The arrays of `model.table()`; each process reads only the slices that its devices hold.

    Raises: UserError for a tensor with NaN or infinity.
    """
    table = model.table()

    def read_tensor(name: str, index: tuple[slice, ...]) -> np.ndarray:
        with np.errstate(over="ignore"):  # what is too large becomes infinity, which is refused
            array = readers[name][index].astype(dtype, copy=False)
        if not is_finite(array):
            message = f"{folder}: {name} holds NaN or infinity as {dtype.name}"
            raise UserError(f"{message}: the file is damaged, or its training diverged")
        return array

    def load(spec: Spec, names: list[str], stacked: bool) -> jax.Array:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            if not stacked:
                return read_tensor(names[0], index)
            out = np.empty([len(range(size)[part]) for size, part in zip(spec.shape, index, strict=True)], dtype)
            for row, name in zip(out, names[index[0]], strict=True):
                row[:] = read_tensor(name, index[1:])
            return out

        sharding = layout.sharding(*spec) if layout else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_callback(spec.shape, sharding, read)

    layers = {
        name: load(spec, [f"{LAYERS}.{i}.{name}" for i in range(model.num_hidden_layers)], True)
        for name, spec in table.pop(LAYERS).items()
    }
    params = {name: load(spec, [name], False) for name, spec in table.items()} | {LAYERS: layers}
    if layout:
        layout.check(params)
    return params


def is_finite(array: np.ndarray) -> bool:
    """True if no number is NaN or infinite. Compares bits: NumPy's own test of bfloat16 takes four times as long."""
    numbers = array.reshape(-1)
    bits = numbers.view(f"uint{8 * array.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(bits.dtype)
    magnitude = ~np.array(-0.0, array.dtype).view(bits.dtype)
    starts = range(0, bits.size, CHECKED_AT_ONCE)
    return all((bits[i : i + CHECKED_AT_ONCE] & magnitude).max() < infinity for i in starts)


def save_model(
    directory: str | Path, model: Qwen, params: Params, tokenizer: Tokenizer, dtype: str = "",
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray, write: bool = True,
) -> None:  # fmt: skip
    """Writes a folder that `load_model` and transformers' AutoModelForCausalLM load, whole or not at all.

    The tensors have `dtype` (empty: that of the parameters). `fetch` brings one tensor to the host; in a multi-process
    run all processes call this function, since fetching is collective, and one of them with `write`. An earlier model
    in the folder is replaced; other files in it are kept.

    Raises: UserError when the folder has subfolders, and so is not that of a model.
    """
    directory = Path(directory).expanduser().resolve()
    new, old = (directory.with_name(f".{directory.name}.{suffix}") for suffix in ("new", "old"))
    dtype = jnp.dtype(dtype or params[EMBED].dtype)
    shards = split_shards(tensor_shapes(model), dtype.itemsize)
    if write:
        prepare(new, directory)
        tokenizer.save(new)
        write_json(new / CONFIG, make_config(model, tokenizer, dtype))
        if len(shards) > 1:
            size = sum(math.prod(shape) for shapes in shards.values() for shape in shapes.values()) * dtype.itemsize
            where = {name: file for file, shapes in shards.items() for name in shapes}
            write_json(new / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    for file, shapes in shards.items():
        arrays = (np.asarray(fetch(pick(params, name))) for name in shapes)
        if write:
            write_tensors(new / file, shapes, dtype, arrays)
        else:
            deque(arrays, maxlen=0)  # this process only takes part in the fetching
    if write:
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)
            directory.rename(old)
        new.rename(directory)
        shutil.rmtree(old, ignore_errors=True)


def split_shards(shapes: Mapping[str, tuple], itemsize: int) -> dict[str, dict[str, tuple]]:
    """The tensors of each file, in order, up to MAX_SHARD_BYTES in one."""
    shards, room = [], 0
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


def prepare(new: Path, directory: Path) -> None:
    """Makes the folder `new` that will replace `directory`, with those of its files that are not the model's."""
    entries = list(directory.iterdir()) if directory.exists() else []
    for entry in entries:
        if entry.is_dir():
            raise UserError(f"{directory} has a subfolder {entry.name}, so it is not a model's: choose another folder")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for entry in entries:
        if entry.name not in (CONFIG, INDEX, *FILES) and entry.suffix != ".safetensors":
            shutil.copy2(entry, new)


def make_config(model: Qwen, tokenizer: Tokenizer, dtype: np.dtype) -> dict:
    """The config.json of a model, in the form that all versions of transformers read."""
    features = {"qk_norm": model.qk_norm, "qkv_bias": model.qkv_bias}
    (architecture,) = (name for name, given in ARCHITECTURES.items() if given == features)
    return {
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
    } | {name: getattr(model, name) for name in CONFIG_FIELDS}  # fmt: skip


def pick(params: Params, name: str) -> jax.Array:
    """The array of a tensor's name; a layer's is cut from its stack."""
    if not name.startswith(f"{LAYERS}."):
        return params[name]
    layer, name = name.removeprefix(f"{LAYERS}.").split(".", 1)
    return params[LAYERS][name][int(layer)]


def write_json(file: Path, content: Mapping) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def write_tensors(file: Path, shapes: Mapping[str, tuple], dtype: np.dtype, arrays: Iterable[np.ndarray]) -> None:
    """A safetensors file, written as the arrays come: safetensors' own writer wants all of them in memory.

    Source: the format as described at huggingface.co/docs/safetensors: length of the header, header, data.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype.name], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            out.write(array.astype(dtype, copy=False).tobytes())
