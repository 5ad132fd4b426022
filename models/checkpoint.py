"""Models from Hugging Face folders and back: safetensors, slice by slice, straight into sharded arrays; no torch."""

import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open

from models.architecture import Decoder, Spec
from models.families import DTYPES, make_config, read_config, tensor_name, text_config
from models.files import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    WEIGHTS,
    Shape,
    check_names,
    download,
    expert_tensors,
    layer_tensor,
    new_folder,
    save_tensors,
)
from models.memory import USABLE
from models.names import (
    EMBED,
    EXPERT,
    HEAD,
    LAYERS,
    TRANSPOSED,
    Adapters,
    Array,
    LayerParams,
    Params,
    Weights,
    decode_axes,
    dtype_of,
)
from models.tokenizer import VOCABULARIES, Tokenizer, load_tokenizer
from utils.devices.memory import host_views
from utils.devices.runtime import cuda_capability, set_matmul_precision
from utils.devices.sharding import Layout, bytes_on_device
from utils.files import write_json
from utils.metrics.jsonl import read_json
from utils.settings.errors import UserError, most_similar
from utils.settings.groups import LoraConfig

if TYPE_CHECKING:
    from models.peft import AdapterConfig

ROOT = Path(__file__).resolve().parent.parent
SHORT_NAMES = ("coder-0.5b", "smollm2-135m")  # models that runs/real_model.py writes
MAX_SHARD_BYTES = 5 * 10**9
READABLE = (*DTYPES.values(), "F64")
CHECKED_AT_ONCE = 1 << 20  # numbers: their bits stay in the processor's cache
Slices = tuple[slice, ...]
Read = Callable[[np.dtype, str, Slices], np.ndarray]
Readers = dict[str, Any]  # slices of safetensors files, a type of its extension module, by the name of the tensor


class ModelFolder(NamedTuple):
    """A model's folder that has been checked: its files can be read."""

    model: Decoder
    tokenizer: Tokenizer
    read: Read  # slices of tensors by name
    dtype: str  # dtype of the parameters
    adapters: "AdapterConfig | None"  # settings of adapters over the model


def open_model(
    path_or_hub_id: str | Path,
    layout: Layout | None,
    dtype: str,
    param_dtype: str,
    **overrides: bool | float | str,
) -> ModelFolder:
    """Returns a folder whose files can be read. Raises: UserError as `load_model`."""
    folder = find_model(path_or_hub_id)
    adapters = find_adapters(folder)
    if adapters:
        try:
            folder = find_model(adapters.base)
        except UserError as error:
            raise UserError(
                f"{folder} holds adapters, and of their base {error}; it is base_model_name_or_path in {ADAPTER_CONFIG}"
            ) from error
        fixed = {"lora_alpha": adapters.alpha, "adapts_experts": any(".experts." in name for name in adapters.factors)}
        overrides = {"base_dtype": adapters.base_dtype} | overrides | fixed
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}, so it is not a complete model folder: download it again")
    whole_config = read_json(folder / CONFIG)
    config = text_config(whole_config, folder / CONFIG)
    settings = {"dtype": dtype or default_dtype(), "mesh": layout and layout.mesh} | overrides
    fields = read_config(config, folder / CONFIG) | {"has_images": config is not whole_config}
    model = Decoder(**(fields | settings))
    set_matmul_precision(model.dtype)
    readers = open_tensors(folder, model)
    has_own = adapters and any((adapters.folder / name).is_file() for name in VOCABULARIES)
    tokenizer = load_tokenizer(adapters.folder if has_own else folder, model.vocab_size)
    param_dtype = param_dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    return ModelFolder(
        model=model,
        tokenizer=tokenizer,
        read=partial(read_tensor, folder, readers),
        dtype=param_dtype,
        adapters=adapters,
    )


def load_model(
    path_or_hub_id: str | Path,
    layout: Layout | None = None,
    dtype: str = "float32",
    param_dtype: str = "float32",
    **overrides: bool | float | str,
) -> tuple[Decoder, Params, Tokenizer]:
    """Loads a Hugging Face folder (also relative to the repository) or, when there is none, a model of the hub.

    `dtype` is that of the matmuls (empty: bfloat16 on accelerators, float32 on CPU), `param_dtype` that of the arrays
    (empty: as in config.json); `overrides` are further fields of Decoder. Without a layout parameters are put on the
    first device. Adapters of a PEFT folder are added to their base.

    Raises: UserError naming what is missing, damaged, or not supported.
    """
    source = open_model(path_or_hub_id, layout, dtype, param_dtype, **overrides)
    model = source.model
    params = load_params(source, layout)
    if source.adapters:
        from models.lora import merge_stacked
        from models.peft import load_adapters

        adapters = load_adapters(source.adapters, model)
        adapters = lay_out_adapters(model, adapters, layout) if layout else adapters
        params = merge_stacked(model, params, adapters)
    return model, params, source.tokenizer


def load_policy(
    path_or_hub_id: str | Path,
    config: LoraConfig,
    seed: int,
    layout: Layout,
    dtype: str,
    base: Weights | None = None,
    **overrides: bool | float | str,
) -> tuple[Decoder, Weights, Params | Adapters, Tokenizer]:
    """Loads a model to train: its architecture, frozen base, trained parameters, tokenizer.

    Without a rank all float32 parameters are trained, and the base is empty. With a rank the base is loaded in the
    layout and dtype of sampling, unless that of another policy is given, which is then shared. Adapters come from a
    PEFT folder, or are made by the seed.

    Raises: UserError as `load_model`, and for adapters of another rank or alpha.
    """
    if not config.lora_rank:
        model, params, tokenizer = load_model(path_or_hub_id, layout, dtype, **overrides)
        return model, {}, params, tokenizer
    if adapters := find_adapters(find_model(path_or_hub_id)):
        config = adapters.settle(config)
    overrides |= {name: getattr(config, name) for name in ("lora_rank", "lora_alpha", "base_dtype")}
    source = open_model(path_or_hub_id, layout, dtype, dtype or default_dtype(), **overrides)
    model = source.model
    base = base or load_base(source, layout)
    if source.adapters:
        from models.peft import load_adapters

        adapters = load_adapters(source.adapters, model)
    else:
        from models.lora import init_adapters

        adapters = init_adapters(model, config.lora_rank, jax.random.key(seed))
    model = replace(model, merges_adapters=is_merged(config, base, layout))
    return model, base, lay_out_adapters(model, adapters, layout), source.tokenizer


def is_merged(config: LoraConfig, base: Weights, layout: Layout) -> bool:
    """True if sampling reads a copy of the base with the adapters added: see --lora_merge."""
    if config.lora_merge == "auto" and not config.base_dtype:
        return 3 * bytes_on_device(base) < USABLE * layout.device_memory  # a third of the memory stays free
    return config.lora_merge == "always"


def default_dtype() -> str:
    """Returns the dtype of matmuls on this kind of device: bfloat16, if it multiplies that.

    GPUs before Ampere do not: XLA writes both operands out as float32 for each product.
    """
    device = jax.devices()[0]
    is_old = 0 < cuda_capability(device) < 8
    return "float32" if device.platform == "cpu" or is_old else "bfloat16"


def short_folder(name: str) -> Path:
    """Returns the folder of one of SHORT_NAMES, which may not exist yet."""
    return Path.home() / "checkpoints" / name


def find_local(name: str | Path) -> Path | None:
    """Returns the folder of that name in the working directory or the repository; None if there is none.

    One of SHORT_NAMES is also looked for where runs/real_model.py writes it.
    """
    folders = [Path(os.path.expanduser(name)), ROOT / name]
    if str(name) in SHORT_NAMES:
        folders.append(short_folder(str(name)))
    return next((folder for folder in folders if folder.is_dir()), None)


def find_model(path_or_hub_id: str | Path) -> Path:
    """Returns the folder of that name, in the working directory or the repository, or of a download.

    Raises: UserError if there is neither.
    """
    folder = find_local(path_or_hub_id)
    if folder:
        return folder
    name = str(path_or_hub_id)
    if name in SHORT_NAMES:
        raise UserError(f"there is no folder {short_folder(name)}: `python runs/real_model.py {name}` makes it")
    beside = [str(Path(name).with_name(path.name)) for path in Path(os.path.expanduser(name)).parent.glob("*")]
    close = most_similar(name, beside)
    missing = f"there is no folder {name}" + (f" (did you mean {close}?)" if close else "")
    if name.count("/") != 1 or name[0] in "/~.":
        raise UserError(f"{missing}: name one, or an id of the hub like Qwen/Qwen3-1.7B")
    try:
        return download(name)
    except ValueError as error:
        raise UserError(f"{missing}, and {error}") from error


def find_adapters(folder: Path) -> "AdapterConfig | None":
    """Returns the settings of the adapters in a PEFT folder; None if it holds a model. Raises: as `read_adapters`."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    from models.peft import read_adapters

    return read_adapters(folder)


def model_steps(run: Path) -> list[int]:
    """Returns the steps of the models in a run folder, in order."""
    names = [path.name for path in run.glob("step*/")]
    return sorted(int(name.removeprefix("step")) for name in names if re.fullmatch(r"step\d+", name))


def find_checkpoints(name: str) -> list[tuple[str, Path]]:
    """Returns the checkpoints under a name, each with a name: one model, or step20/, step40/, ... of a run folder.

    Raises: UserError for a run folder without any, and as `find_model`.
    """
    name = name.strip().rstrip("/")
    folder = find_model(name)
    if any(folder.glob("*.safetensors")):
        return [(name, folder)]
    if steps := model_steps(folder):
        return [(f"{name}/step{step}", folder / f"step{step}") for step in steps]
    if (folder / "metrics.jsonl").is_file() or (folder / "state").is_dir():
        raise UserError(
            f"{name} is a run folder without a model, since it has no step20/ or the like: continue the run by its "
            f"command (run.command in {name}/config.json), which writes a model when it is stopped or ends"
        )
    return [(name, folder)]  # the loader raises if something is missing in it


def resolve_model_dir(name: str) -> str:
    """Returns the name of the model to load: for a local run folder, that of its last step."""
    return find_checkpoints(name)[-1][0] if find_local(name) else name


def tensor_shapes(model: Decoder) -> dict[str, Shape]:
    """Returns name and shape of each tensor in the file, in which neither layers nor experts are stacked."""
    table = model.parameter_table()
    del table[LAYERS]
    shapes = {name: spec.shape for name, spec in table.items()}
    for i, kind in enumerate(model.kinds):
        for name, spec in model.layer_table(kind).items():
            names = expert_tensors(layer_tensor(i, name), spec.shape[0])
            shapes |= {names: spec.shape} if isinstance(names, str) else dict.fromkeys(names, spec.shape[1:])
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: the only one, or those of its index. Raises UserError if none."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        remedy = "download the weights"
        for pickle in (*folder.glob("params.pkl"), *folder.glob("*.bin")):  # of kvfrans/lmpo, of torch
            remedy = f"{pickle.name} is a pickle, which could run code: name a folder with safetensors of this model"
        raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}: {remedy}")
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is named in {INDEX} but missing: download it again")
    return [folder / name for name in names]


def open_tensors(folder: Path, model: Decoder) -> Readers:
    """Returns readers of all tensors by name, `reader[slices]`.

    Raises: UserError if their names, shapes or types are not those of the model.
    """
    readers = {}
    for file in weight_files(folder):
        try:
            opened = safe_open(file, "np")
            names = {tensor_name(model, name): name for name in opened.keys()}
            readers |= {name: opened.get_slice(stored) for name, stored in names.items() if name}
        except SafetensorError as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}): download it again") from error
    if model.tie_word_embeddings and HEAD in readers:  # some programs write the tied weight twice, or as the head only
        head = readers.pop(HEAD)
        if not np.array_equal(head[:], readers.setdefault(EMBED, head)[:]):  # transformers then unties them
            raise UserError(
                f"{folder}: {HEAD} differs from {EMBED}, although {CONFIG} sets tie_word_embeddings: set it to false"
            )
    expected = tensor_shapes(model)
    check_names(folder, "lacks tensor", expected.keys() - readers)
    check_names(folder, "has the unknown tensor", readers.keys() - expected)
    for name, expected_shape in expected.items():
        shape = tuple(readers[name].get_shape())
        if shape != expected_shape:
            raise UserError(
                f"{folder}: {name} has shape {shape}, but {CONFIG} makes it {expected_shape}: copy both from one model"
            )
        dtype = readers[name].get_dtype()
        if dtype not in READABLE:
            raise UserError(f"{folder}: {name} has type {dtype}: convert it to {' or '.join(READABLE)}")
    return readers


def load_params(source: ModelFolder, layout: Layout | None) -> Params:
    """Loads the arrays of `model.parameter_table()`; each process reads only the slices that its devices hold.

    Raises: UserError for a tensor with NaN or infinity.
    """
    table = source.model.parameter_table()
    layers_with = source.model.layers_with()

    def load_array(name: str, spec: Spec) -> Array:
        names = name
        if name in layers_with:
            names = [expert_tensors(layer_tensor(i, name), spec.shape[1]) for i in layers_with[name]]
        read = partial(read_array, source, jnp.dtype(dtype_of(name, source.dtype)), spec.shape, names)
        sharding = layout.sharding(*spec) if layout else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_callback(spec.shape, sharding, read)

    params = {LAYERS: {name: load_array(name, spec) for name, spec in table.pop(LAYERS).items()}}
    params |= {name: load_array(name, spec) for name, spec in table.items()}
    if layout:
        layout.check_mesh_axes(params)
    return params


def load_base(source: ModelFolder, layout: Layout) -> Weights:
    """Loads weights in the form of `decode_weights`, without a copy of the parameters on the way.

    Raises: UserError for a tensor with NaN or infinity.
    """
    table = source.model.weights_table()
    layers = []
    for i, specs in enumerate(table.pop(LAYERS)):
        layer = {name: load_weight(source, layout, layer_tensor(i, name), spec) for name, spec in specs.items()}
        if source.model.base_dtype:
            from models.lora import quantize_layer

            layer = quantize_layer(layer)
        layers.append(layer)
    base = {name: load_weight(source, layout, name, spec) for name, spec in table.items()} | {LAYERS: layers}
    layout.check_mesh_axes(base, ["tp"])  # fsdp cuts rows only
    return base


def load_weight(source: ModelFolder, layout: Layout, name: str, spec: Spec) -> Array:
    """Loads one array of the weights, a matrix of a layer transposed."""
    dtype = jnp.dtype(dtype_of(name, source.dtype))
    stored = name.removesuffix(TRANSPOSED)
    order = decode_axes(stored) if stored != name else range(len(spec.shape))
    inverse = np.argsort(order)
    shape = tuple(spec.shape[i] for i in inverse)
    names = expert_tensors(stored, shape[0])

    def read(index: Slices) -> np.ndarray:
        return read_array(source, dtype, shape, names, tuple(index[i] for i in inverse)).transpose(order)

    return jax.make_array_from_callback(spec.shape, layout.sharding(*spec, rollout=True), read)


def read_array(source: ModelFolder, dtype: np.dtype, shape: Shape, names: str | list, index: Slices) -> np.ndarray:
    """Reads a slice of the tensor of this name, or of the array that has those of a list as its rows."""
    if isinstance(names, str):
        return source.read(dtype, names, index)
    sizes = [len(range(size)[part]) for size, part in zip(shape, index, strict=True)]
    stacked = np.empty(sizes, dtype)
    for row, name in zip(stacked, names[index[0]], strict=True):
        row[:] = read_array(source, dtype, shape[1:], name, index[1:])
    return stacked


def read_tensor(folder: Path, readers: Readers, dtype: np.dtype, name: str, index: Slices) -> np.ndarray:
    """Reads a slice of a tensor. Raises UserError if it holds NaN or infinity."""
    with np.errstate(over="ignore"):  # what is too large becomes infinity, which is rejected
        array = readers[name][index].astype(dtype, copy=False)
    if not is_finite(array):
        raise UserError(
            f"{folder}: {name} holds NaN or infinity as {dtype.name}: the file is damaged, or its training diverged"
        )
    return array


def is_finite(array: np.ndarray) -> bool:
    """True if no number is NaN or infinite. Compares bits: NumPy's own test of bfloat16 takes four times as long."""
    bits = array.reshape(-1).view(f"uint{8 * array.itemsize}")
    infinity, sign = np.array([np.inf, -0.0], array.dtype).view(bits.dtype)
    chunks = (bits[start : start + CHECKED_AT_ONCE] for start in range(0, bits.size, CHECKED_AT_ONCE))
    return all((chunk & ~sign).max() < infinity for chunk in chunks)


def save_model(
    directory: str | Path,
    model: Decoder,
    params: Params,
    tokenizer: Tokenizer,
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
    write: bool = True,
    card: str = "",
) -> None:
    """Writes a folder that `load_model` and transformers' AutoModelForCausalLM load, as `write_model` does.

    `fetch` brings one tensor to the host, collectively: all processes call this function, one of them with `write`.
    `card` is the text of README.md (empty: none).
    """
    layers_with = model.layers_with()
    params = host_views(params)

    is_on_host = all(isinstance(x, np.ndarray) for x in params[LAYERS].values())
    take = take_layer.__wrapped__ if is_on_host else take_layer

    @lru_cache(maxsize=1)
    def read_layer(layer: int) -> LayerParams:
        return take(params[LAYERS], layer_rows(layers_with, layer))

    @lru_cache(maxsize=1)  # for experts, which are read one after the other
    def read_array(layer: int, name: str) -> np.ndarray:
        return np.asarray(fetch(read_layer(layer)[name]))

    def read(name: str) -> np.ndarray:
        if not name.startswith(f"{LAYERS}."):
            return np.asarray(fetch(params[name]))
        layer, name, expert = split_tensor(name)
        return read_array(layer, name)[expert]

    write_model(directory, model, tokenizer, jnp.dtype(params[EMBED].dtype), read, write, card)


def write_model(
    directory: str | Path,
    model: Decoder,
    tokenizer: Tokenizer,
    dtype: np.dtype,
    read: Callable[[str], np.ndarray],
    write: bool = True,
    card: str = "",
) -> None:
    """Writes a Hugging Face folder, whole or not at all, of the tensors that `read` returns by name, a file at a time.

    An earlier model in the folder is replaced, other files are kept: see `new_folder`. Without `write` tensors are read
    only.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    shapes = tensor_shapes(model)
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    if not write:
        for names in split.filename_to_tensors.values():
            deque(map(read, names), maxlen=0)  # this process only takes part in the fetching
        return
    with new_folder(directory, tokenizer, card) as new:
        write_json(new / CONFIG, make_config(model, tokenizer, dtype))
        if split.is_sharded:
            write_json(new / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
        for file, names in split.filename_to_tensors.items():
            save_tensors(new / file, {name: read(name).astype(dtype, copy=False) for name in names})


def split_tensor(name: str) -> tuple[int, str, tuple[int, ...]]:
    """Returns the layer of a layer's tensor, the name of its parameter, and its expert; empty: none."""
    layer, *expert = re.findall(r"\.(\d+)\.", name)
    parameter = re.sub(r"experts\.\d+", f"experts.{EXPERT}", name.removeprefix(f"{LAYERS}.{layer}."))
    return int(layer), parameter, tuple(map(int, expert))


def layer_rows(layers_with: Mapping[str, list[int]], layer: int) -> dict[str, np.int32]:
    """Returns the row of each parameter's array that is a layer's; 0 if the layer has no such parameter."""
    return {name: np.int32(layers.index(layer) if layer in layers else 0) for name, layers in layers_with.items()}


@jax.jit
def take_layer(layers: LayerParams, rows: Mapping[str, Int[Array, ""]]) -> LayerParams:
    """Returns a row of each parameter's array: one program for all layers, not one for each shape and slice."""
    return {name: x[rows[name]] for name, x in layers.items()}


def lay_out_adapters(model: Decoder, adapters: Adapters, layout: Layout) -> Adapters:
    """Returns adapters on the devices, as sampling and updates read them: whole but for tp."""
    from models.lora import adapter_table

    table = adapter_table(model, next(iter(adapters.values())).shape[-2])
    laid_out = {}
    for name, x in adapters.items():
        sharding = layout.sharding(*table[name], rollout=True)
        laid_out[name] = jax.make_array_from_callback(x.shape, sharding, partial(np.asarray(x).__getitem__))
    return laid_out
