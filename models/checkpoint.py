"""Models from Hugging Face folders and back: safetensors, slice by slice, straight into sharded arrays; no torch."""

import json
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from models.download_model import download
from models.qwen3 import EMBED, HEAD, LAYERS, Params, Qwen, Spec
from models.tokenizer import FILES, Tokenizer, load_tokenizer
from utils.sharding import Layout

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
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours: safetensors'


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

    Raises: ValueError naming what is missing, damaged, or not supported.
    """
    folder = find_model(path_or_hub_id)
    config = read_json(folder / CONFIG)
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    where = {"dtype": dtype, "mesh": layout.mesh if layout else None}
    model = Qwen(**(read_config(config, folder / CONFIG) | where | overrides))
    assert model.kernel  # which checks that it can run
    readers, tokenizer = open_tensors(folder, model), load_tokenizer(folder)
    param_dtype = jnp.dtype(param_dtype or config.get("dtype") or config.get("torch_dtype") or "float32")
    return model, load_params(readers, model, layout, param_dtype), tokenizer


def find_model(path_or_hub_id: str | Path) -> Path:
    """The folder of that name, in the working directory or the repository, else a download."""
    for folder in (Path(path_or_hub_id).expanduser(), ROOT / path_or_hub_id):
        if folder.is_dir():
            return folder
    if str(path_or_hub_id).count("/") != 1 or str(path_or_hub_id)[0] in "/~.":
        raise ValueError(f"there is no folder {path_or_hub_id}: name one, or an id of the hub like Qwen/Qwen3-1.7B")
    try:
        return download(str(path_or_hub_id))
    except ValueError as error:
        raise ValueError(f"there is no folder {path_or_hub_id}, and {error}") from error


def read_json(file: Path) -> dict:
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}: it is not a complete Hugging Face model folder")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}): download it again") from error


def read_config(config: Mapping, file: Path) -> dict:
    """The fields of Qwen that a config.json gives, as transformers 4 and 5 write it."""
    given = {name: value for name, value in config.items() if value is not None}
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
    )
    for field, value, supported in checks:
        if value not in supported:
            raise ValueError(f"{file}: {field} is {value!r}, supported is {' or '.join(map(repr, supported))}")
    given["rope_theta"] = float(rope.get("rope_theta") or given.get("rope_theta", 10_000))
    try:
        heads = given["num_attention_heads"]
        defaults = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads, "rms_norm_eps": 1e-6}
        defaults |= {"tie_word_embeddings": False, "max_position_embeddings": 32768}
        return ARCHITECTURES[architecture] | {name: (defaults | given)[name] for name in CONFIG_FIELDS}
    except KeyError as error:
        raise ValueError(f"{file} has no {error.args[0]}: it is not the config of a {architecture}") from None


def tensor_shapes(model: Qwen) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in the file, where layers are not stacked."""
    table = model.table()
    layers = table.pop(LAYERS)
    shapes = {name: spec.shape for name, spec in table.items()}
    for i in range(model.num_hidden_layers):
        shapes |= {f"{LAYERS}.{i}.{name}": spec.shape[1:] for name, spec in layers.items()}
    return shapes


def open_tensors(folder: Path, model: Qwen) -> dict:
    """Readers of all tensors by name, `reader[slices]`, once their names and shapes are those of the model."""
    files = [folder / WEIGHTS]
    if not files[0].is_file():
        if not (folder / INDEX).is_file():
            raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}: download the weights")
        files = [folder / name for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))]
    readers = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is named in {INDEX} but missing: download it again")
        try:
            opened = safe_open(file, "np")
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error}): download it again") from error
        readers |= {name: opened.get_slice(name) for name in opened.keys()}
    if model.tie_word_embeddings:
        readers.pop(HEAD, None)  # some writers store the tied weight twice
    expected = tensor_shapes(model)
    missing, unknown = expected.keys() - readers, readers.keys() - expected
    for what, names in (("lacks tensor", missing), ("has the unknown tensor", unknown)):
        if names:
            count = f"{len(names)} such tensors" if len(names) > 1 else "the only one"
            raise ValueError(f"{folder} {what} {min(names)} ({count}): its {CONFIG} is that of another model")
    for name, shape in expected.items():
        if (found := tuple(readers[name].get_shape())) != shape:
            raise ValueError(f"{folder}: {name} has shape {found}, but {CONFIG} makes it {shape}")
    return readers


def load_params(readers: Mapping, model: Qwen, layout: Layout | None, dtype: np.dtype) -> Params:
    """The arrays of `model.table()`; each process reads only the slices that its devices hold."""
    table = model.table()

    def load(spec: Spec, names: list[str], stacked: bool) -> jax.Array:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            if not stacked:
                return readers[names[0]][index].astype(dtype, copy=False)
            out = np.empty([len(range(size)[part]) for size, part in zip(spec.shape, index, strict=True)], dtype)
            for row, name in zip(out, names[index[0]], strict=True):
                row[:] = readers[name][index[1:]]
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


def save_model(
    directory: str | Path, model: Qwen, params: Params, tokenizer: Tokenizer, dtype: str = "",
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray, write: bool = True,
) -> None:  # fmt: skip
    """Writes a folder that `load_model` and transformers' AutoModelForCausalLM load, whole or not at all.

    The tensors have `dtype` (empty: that of the parameters). `fetch` brings one tensor to the host; in a multi-process
    run all processes call this function, since fetching is collective, and one of them with `write`. An earlier model
    in the folder is replaced; other files in it are kept.

    Raises: ValueError when the folder has subfolders, and so is not that of a model.
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
            raise ValueError(f"{directory} has a subfolder {entry.name}, so it is not a model's: choose another folder")
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
