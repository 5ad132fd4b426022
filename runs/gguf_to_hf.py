"""Converts a GGUF file, as llama.cpp reads it, to a Hugging Face folder that `load_model` and transformers load.

    python runs/gguf_to_hf.py SmolLM2-135M-Instruct.Q4_1.gguf ~/checkpoints/SmolLM2-135M-Instruct

Quantized weights become the numbers that they stand for, in float32, or in --dtype. The tokenizer, its
chat template and its stop ids come from the file's metadata.

To add an architecture: a row of ARCHITECTURES. To add a tokenizer: a row of PATTERNS.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import tempfile
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from einops import rearrange
from jaxtyping import Float
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from models.architecture import Decoder
from models.checkpoint import is_finite, tensor_shapes, write_model
from models.families import DTYPES, read_config
from models.rotary import Scaling, frequencies
from models.tokenizer import GENERATION_CONFIG, Tokenizer, load_tokenizer
from utils.files import write_json
from utils.settings.errors import UserError, describe_error, user_errors

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FIELDS = {  # fields of config.json: fields of the metadata, behind the name of the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
OPTIONAL = ("num_key_value_heads", "head_dim", "rope_theta")
NEUTRAL = {  # fields that change no number: the size of the embedding, and facts about scaled rotary embeddings
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"
}  # fmt: skip
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"  # by which the frequencies of Llama 3.1 and later are divided
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {  # patterns of the pieces into which a text is split before merges; source: llama.cpp, src/llama-vocab.cpp
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (rf"{LETTERS}|\p{{N}}{{1,3}}|{SPACES}",),
    "qwen2": (rf"{LETTERS}|\p{{N}}|{SPACES}",),
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens
STOPS = ("eos", "eot", "eom")  # tokens that end a text, a turn, a message
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")  # as in llama.cpp
T = TypeVar("T")
GGUFValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]


class Gguf(NamedTuple):
    """A file that was read: its metadata, and its tensors, which stay on the disk until they are used."""

    path: Path
    architecture: str
    metadata: dict[str, GGUFValue]
    tensors: dict[str, Any]  # ReaderTensor of the package gguf, by name

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        """Returns a list of the tokenizer's metadata. Raises UserError if it is missing or holds another type."""
        values = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise UserError(f"{self.path}: tokenizer.ggml.{name} is no list of {kind.__name__}: download it again")
        return values


def read_gguf(path: Path) -> Gguf:
    """Reads the metadata of a GGUF file, and where its tensors are.

    Raises: UserError for a file that is damaged or of another architecture, and if the package gguf is missing.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("GGUF files are read by the package gguf: pip install gguf") from error
    if not path.is_file():
        raise UserError(f"there is no file {path}: correct the path")
    try:
        reader = GGUFReader(path)
        metadata = {name: plain_value(field.contents()) for name, field in reader.fields.items()}
    except Exception as error:  # of NumPy, of enumerations, of text: the package checks little of what it reads
        message = f"{path} is not a whole GGUF file ({describe_error(error)}): download it again"
        raise UserError(message) from error
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path}: its architecture is {architecture!r}: convert a file of {' or '.join(ARCHITECTURES)}")
    return Gguf(path, architecture, metadata, {tensor.name: tensor for tensor in reader.tensors})


def plain_value(value: GGUFValue) -> GGUFValue:
    """Returns a value of the metadata, a float with as many digits as its float32 has: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def read_model(gguf: Gguf) -> Decoder:
    """Returns the model that the metadata describes. Raises UserError for one that is malformed or not supported."""
    embedding = gguf.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{gguf.path} has no matrix {EMBEDDING}: download it again")
    config = {"architectures": [ARCHITECTURES[gguf.architecture]], "vocab_size": int(embedding.shape[1])}
    for field, name in FIELDS.items():
        value = gguf.metadata.get(f"{gguf.architecture}.{name}")
        if value is None and field not in OPTIONAL:
            raise UserError(f"{gguf.path} has no {gguf.architecture}.{name}: download it again")
        config |= {} if value is None else {field: value}
    config["tie_word_embeddings"] = OUTPUT not in gguf.tensors
    model = Decoder(**read_config(config, gguf.path))
    # Of all other fields, one value is converted: rotary embeddings of a part of each head, or scaled, are not.
    supported = {"rope.dimension_count": model.head_dim, "attention.value_length": model.head_dim}
    supported |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0, "attention.causal": True}
    for name, value in gguf.metadata.items():
        architecture, _, field = name.partition(".")
        if architecture == gguf.architecture and field not in {*FIELDS.values(), *NEUTRAL}:
            if value != supported.get(field):
                needed = f"supported is {supported[field]!r}" if field in supported else "which is not read"
                raise UserError(f"{gguf.path}: {name} is {value!r}, {needed}: choose another file")
    if ROPE_FACTORS in gguf.tensors:
        scaling = read_scaling(gguf, model)._asdict()
        config["rope_scaling"] = {name: value for name, value in scaling.items() if not name.startswith("beta_")}
        model = Decoder(**read_config(config, gguf.path))
    return model


def read_scaling(gguf: Gguf, model: Decoder) -> Scaling:
    """Returns the rotary scaling in a file's factors: Llama 3.1's for an original context of 8,192 tokens.

    Raises: UserError if they follow another rule.
    """
    factors = dequantize(gguf, ROPE_FACTORS)
    scaling = Scaling("llama3", float(factors.max()))
    plain = frequencies(model.rope_theta, None, model.head_dim)
    scaled = frequencies(model.rope_theta, scaling, model.head_dim)
    if factors.shape != plain.shape or not np.allclose(factors, plain / scaled, rtol=1e-4):
        raise UserError(f"{gguf.path}: {ROPE_FACTORS} are not the factors of Llama 3.1, the only ones supported")
    return scaling


def dequantize(gguf: Gguf, name: str) -> Float[np.ndarray, "..."]:
    """Reads a tensor as float32 numbers. Raises UserError for a type that the package cannot convert."""
    from gguf.quants import dequantize as convert

    tensor = gguf.tensors[name]
    try:
        return convert(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        message = f"{gguf.path}: {name} has type {tensor.tensor_type.name}, which gguf cannot convert"
        raise UserError(f"{message}: choose a file with another quantization") from error


def gguf_name(model: Decoder, name: str) -> str:
    """Returns the name in a GGUF file of a tensor of a Hugging Face folder."""
    names = tensor_names(model.family, model.num_hidden_layers)
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


@cache
def tensor_names(family: str, num_layers: int) -> Any:
    """Returns the package's TensorNameMap of an architecture."""
    import gguf

    architecture = next(name for name, of_family in ARCHITECTURES.items() if of_family == family)
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], num_layers)


def check_tensors(gguf: Gguf, model: Decoder) -> None:
    """Raises UserError if the tensors of a file are not those of its model, by name and by shape."""
    shapes = {gguf_name(model, name): shape for name, shape in tensor_shapes(model).items()}
    missing = shapes.keys() - gguf.tensors
    unknown = gguf.tensors.keys() - shapes - {ROPE_FACTORS}
    if missing:
        raise UserError(f"{gguf.path} lacks tensor {min(missing)} ({len(missing)} in all): download it again")
    if unknown:
        raise UserError(f"{gguf.path} has tensor {min(unknown)}, which no {model.family} has: take another file")
    for name, expected in shapes.items():
        shape = tuple(reversed(gguf.tensors[name].shape.tolist()))
        if shape != expected:
            raise UserError(
                f"{gguf.path}: {name} has shape {shape}, but the metadata makes it {expected}: download it again"
            )


def read_weights(gguf: Gguf, model: Decoder, dtype: np.dtype, name: str) -> np.ndarray:
    """Reads a tensor by its Hugging Face name. Raises UserError if it holds NaN or infinity.

    llama.cpp rotates neighboring channels of a Llama against each other; transformers rotates the halves of a head. So
    rows of queries and keys are put back in the order of halves.
    Source: `permute` in convert_hf_to_gguf.py of llama.cpp.
    """
    array = dequantize(gguf, gguf_name(model, name))
    if gguf.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        array = rearrange(array, "(H C two) ... -> (H two C) ...", two=2, C=model.head_dim // 2)
    with np.errstate(over="ignore"):  # what is too large becomes infinity, which is refused
        array = array.astype(dtype, copy=False)
    if not is_finite(np.ascontiguousarray(array)):
        raise UserError(
            f"{gguf.path}: {gguf_name(model, name)} holds NaN or infinity as {dtype.name}: download it again"
        )
    return array


def read_tokenizer(gguf: Gguf, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of the metadata: written to a folder, and loaded with all the checks of one.

    Raises: UserError for one that is malformed or not supported.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_tokenizer(gguf, Path(folder))
            return load_tokenizer(folder, vocab_size)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(gguf.path))) from error


def write_tokenizer(gguf: Gguf, folder: Path) -> None:
    """Writes the tokenizer's files and generation_config.json."""
    tokens = gguf.list_of("tokens", str)
    ids = {name: gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in (*STOPS, "bos", "unknown", "padding")}
    for name, i in ids.items():
        if i is not None and (type(i) is not int or not 0 <= i < len(tokens)):
            raise UserError(
                f"{gguf.path}: tokenizer.ggml.{name}_token_id is {i!r}, which is no token: download it again"
            )
    names = {"eos_token": "eos", "bos_token": "bos", "unk_token": "unknown", "pad_token": "padding"}
    config = {key: tokens[ids[name]] for key, name in names.items() if ids[name] is not None}
    config |= {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    template = gguf.metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    backend = make_backend(gguf, tokens)
    stops = dict.fromkeys(ids[name] for name in STOPS if ids[name] is not None)  # there is room for one of each
    for i, (token, kind) in enumerate(zip(tokens, gguf.list_of("token_type", int), strict=True)):
        if kind == CONTROL and token in ENDS:
            stops[i] = None
    generation = {"bos_token_id": ids["bos"], "eos_token_id": list(stops), "pad_token_id": ids["padding"]}
    if gguf.metadata.get("tokenizer.ggml.add_bos_token") is True and "bos_token" in config:
        bos = config["bos_token"]
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, ids["bos"])])
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / GENERATION_CONFIG, {key: i for key, i in generation.items() if i is not None})


def make_backend(gguf: Gguf, tokens: list[str]) -> Backend:
    """Returns the byte-level BPE of a file. Raises UserError for another kind of tokenizer, or a malformed one."""
    kind, pattern = (gguf.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    for name, value, supported in (("model", kind, ("gpt2",)), ("pre", pattern, tuple(PATTERNS))):
        if value not in supported:
            raise UserError(f"{gguf.path}: tokenizer.ggml.{name} is {value!r}, supported is {' or '.join(supported)}")
    types = gguf.list_of("token_type", int)
    merges = [tuple(merge.split(" ")) for merge in gguf.list_of("merges", str)]
    if len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise UserError(f"{gguf.path}: its vocabulary is damaged: download it again")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    try:
        backend = Backend(BPE(vocab, merges, ignore_merges=pattern == "llama-bpe"))
    except Exception as error:  # tokenizers raises this class itself
        raise UserError(
            f"{gguf.path}: its vocabulary is damaged ({describe_error(error)}): download it again"
        ) from error
    if pattern == "qwen2":
        backend.normalizer = normalizers.NFC()
    pieces = [pre_tokenizers.Split(Regex(piece), "isolated") for piece in PATTERNS[pattern]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*pieces, to_bytes])
    backend.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=token_type == CONTROL, normalized=False)])
    return backend


def convert(file: Path, folder: Path, dtype: np.dtype, card: str = "") -> Decoder:
    """Writes the folder of a GGUF file, with a model card if there is one, and returns its model.

    Raises: UserError for a file that it cannot convert.
    """
    gguf = read_gguf(file)
    model = read_model(gguf)
    check_tensors(gguf, model)
    tokenizer = read_tokenizer(gguf, model.vocab_size)
    write_model(folder, model, tokenizer, dtype, partial(read_weights, gguf, model, dtype), card=card)
    return model


def main(arguments: list[str]) -> None:
    if len(arguments) != 3:
        sys.exit("error: give the GGUF file, and the folder to write")
    file, folder = (Path(os.path.expanduser(argument)) for argument in arguments[1:])
    jax.config.update("jax_platforms", "cpu")  # an accelerator would only be occupied
    with user_errors():
        model = convert(file, folder, jnp.dtype(FLAGS.dtype))
    print(f"{file}: {model.num_parameters:,} parameters of a {model.family}; written to {folder}")


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_enum("dtype", "float32", list(DTYPES), "data type of the tensors to write")
    app.run(main)
