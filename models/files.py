"""Files of a model's folder: downloaded, or replaced whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from models.names import EXPERT, LAYERS
from models.tokenizer import CONFIG, FILES, Tokenizer
from utils.files import remove
from utils.settings.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
CARD = "README.md"
CARD_MARK = "# Written by lmpo with each saved model; without this line the file is left as it is."
HUB_FILES = ("*.json", "*.safetensors", "merges.txt", "*.jinja", CARD)
Shape = tuple[int, ...]


def download(hub_id: str, folder: Path | None = None) -> Path:
    """Fetches a model's weights and tokenizer from the hub into `folder`, or into the hub's cache.

    Raises: UserError when that fails.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, local_dir=folder, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:  # no network, no such model, no permission; not an id
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"downloading {hub_id} from the Hugging Face hub failed: {reason}") from error


def layer_tensor(i: int, name: str) -> str:
    """Returns the name of a tensor of layer number `i` in the file."""
    return f"{LAYERS}.{i}.{name}"


def expert_tensors(name: str, num_experts: int) -> str | list[str]:
    """Returns the names in the file of a parameter that is stacked over experts; any other name unchanged."""
    return [name.replace(EXPERT, str(i)) for i in range(num_experts)] if EXPERT in name else name


def check_names(
    folder: Path, problem: str, names: set[str], reason: str = f"its {CONFIG} is that of another model"
) -> None:
    """Raises UserError if there are tensors with this problem."""
    if names:
        count = f"{len(names)} such tensors" if len(names) > 1 else "the only one"
        raise UserError(f"{folder} {problem} {min(names)} ({count}): {reason}")


@contextlib.contextmanager
def new_folder(directory: str | Path, tokenizer: Tokenizer, card: str) -> Iterator[Path]:
    """Yields a folder to write a model into, with tokenizer and card; it replaces `directory` at the end of the block.

    Files of `directory` that are not the model's are kept. Raises: UserError when it has subfolders, and so is not that
    of a model.
    """
    directory = Path(os.path.expanduser(directory)).resolve()
    new = directory.with_name(f".{directory.name}.new")
    old = directory.with_name(f".{directory.name}.old")
    entries = list(directory.iterdir()) if directory.exists() else []
    for entry in entries:
        if entry.is_dir():
            raise UserError(f"{directory} has a subfolder {entry.name}, so it is not a model's: choose another folder")
    remove(new)  # left by a process that was killed, or a file of this name
    new.mkdir(parents=True)
    for entry in entries:
        is_model = entry.name in (CONFIG, INDEX, ADAPTER_CONFIG, *FILES) or entry.suffix == ".safetensors"
        is_our_card = entry.name == CARD and CARD_MARK.encode() in entry.read_bytes()
        if not is_model and not is_our_card:
            shutil.copy2(entry, new)
    tokenizer.save(new)
    if card and not (new / CARD).exists():
        (new / CARD).write_text(card, encoding="utf-8", errors="replace")
    yield new
    if directory.exists():
        remove(old)
        directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def save_tensors(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file of arrays in any layout. Raises: OSError, for a full disk too."""
    try:
        save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
