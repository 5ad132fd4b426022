"""Files of a split of a data set, on the Hugging Face hub or in a folder; `datasets` reads other forms of data sets."""

import glob
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path, PurePosixPath

from envs.data.files import Located, read_file
from utils.settings.errors import UserError, describe_error, is_installed

JSON_KINDS = (".jsonl", ".json", ".ndjson")  # are read together
KINDS = (".parquet", *JSON_KINDS, ".csv")  # files of rows; the first of equally frequent kinds is read
NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
WORDS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})")
OTHERS = "name another data set, or install the package datasets, which reads more of them: `pip install datasets`"
TIMEOUT = 10  # seconds after which a hub that does not answer counts as absent


def read_split(name: str, config: str, split: str) -> Located:
    """Returns the rows of a split of a data set: owner/name on the hub, or a folder. Raises: UserError, or others."""
    try:
        files = folder_split(Path(name), config, split) if Path(name).is_dir() else fetch_split(name, config, split)
    except UserError:
        if not is_installed("datasets"):
            raise
        return read_by_datasets(name, config, split)
    return chain.from_iterable(map(read_file, files))


def read_by_datasets(name: str, config: str, split: str) -> Located:
    """Yields the rows of a split as the package `datasets` reads it. Raises: UserError with its reason if it cannot."""
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # noqa: BLE001 (of the many kinds that it raises)
        reason = describe_error(error)
        raise UserError(f"the package datasets cannot read the split {split} of {name} ({reason})") from error
    for i, row in enumerate(rows, 1):
        yield f"{name}, row {i}", row


def fetch_split(name: str, config: str, split: str) -> list[Path]:
    """Returns the files of a split of a data set of the hub; without a network, those in the hub's cache."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().dataset_info(name, timeout=TIMEOUT)  # the only call that never waits longer
    except Exception as error:  # noqa: BLE001 (of the client's network libraries, which change)
        try:  # without patterns the client rejects a cache that lacks other files of the data set
            folder = snapshot_download(name, repo_type="dataset", local_files_only=True, allow_patterns=[])
        except Exception:  # noqa: BLE001
            raise error from None
        return folder_split(Path(folder), config, split, name)
    files = files_of_split([file.rfilename for file in info.siblings], config, split, name)
    if len(files) > 1 and not all(map(SHARD.match, files)):  # its card may make them several configurations
        raise UserError(f"{name} has several files of the split {split} that are not shards of one: {OTHERS}")
    folder = snapshot_download(name, repo_type="dataset", allow_patterns=[*map(glob.escape, files)])
    return [Path(folder, file) for file in files]


def folder_split(folder: Path, config: str, split: str, name: str = "") -> list[Path]:
    """Returns the files of a split of a data set in a folder; `name`: what errors call it."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [folder / file for file in files_of_split(names, config, split, name or str(folder))]


def files_of_split(names: Sequence[str], config: str, split: str, origin: str) -> list[str]:
    """Returns the files of a split among the paths of a data set, in which a folder may stand for a configuration.

    Words in the names of folders, or else of files, tell the split; files without one are for training. Raises:
    UserError.
    """
    paths = {name: PurePosixPath(name.removesuffix(".gz")) for name in sorted(names)}
    every = [
        name for name, path in paths.items()
        if path.suffix in KINDS and path.name not in NO_ROWS and not any(x.startswith((".", "__")) for x in path.parts)
    ]  # fmt: skip
    folder = f"{config}/" * (config not in ("", "default"))
    rows = [name for name in every if name.startswith(folder)]
    if not rows:
        configs = ", ".join(sorted({name.split("/")[0] for name in every if "/" in name})) or "no folders"
        of_rows = f"file of rows ({', '.join(KINDS)}):"
        what = f"configuration {config}: choose one of {configs}, or" if folder else of_rows
        raise UserError(f"{origin} has no {what} {OTHERS}")

    def of_split(split: str) -> list[str]:
        word = re.compile(rf"(^|[-._ /0-9])({WORDS.get(split, re.escape(split))})([-._ /0-9]|$)")
        in_folder = [name for name in rows if word.search(name[len(folder) :].rpartition("/")[0])]
        found = in_folder or [name for name in rows if word.search(name.rpartition("/")[2])]
        return one_kind([name for name in found if split_of_shard(name) == split] or found)  # train, not train_1M

    splits = {name: of_split(name) for name in dict.fromkeys((*WORDS, split))}
    if not any(splits.values()):
        splits["train"] = one_kind(rows)
    files = splits[split]
    if not files:
        found = ", ".join(word for word, found in splits.items() if found)
        raise UserError(f"{origin} has no split {split}, only {found}: name a data set or configuration that has it")
    folders = sorted({file.rpartition("/")[0] for file in files})
    if len(folders) > 1:
        raise UserError(f"{origin} has several configurations: name one by {origin}:NAME ({', '.join(folders)})")
    shards = {shard[0]: shard for shard in map(SHARD.match, files) if shard}
    found = sorted(set(map(split_of_shard, shards)))
    if len(found) > 1:
        raise UserError(f"{origin} has no split {split}, only {', '.join(found)}: name one by hub_split, or its file")
    for start, total in {shard.groups() for shard in shards.values()}:
        missing = {f"{start}-{i:05}-of-{total}" for i in range(int(total))} - shards.keys()
        if missing:  # as in a download that was cut off
            raise UserError(f"{origin} lacks {min(missing)}, {len(missing)} such files in all: download them again")
    return files


def split_of_shard(name: str) -> str:
    """Returns the split in the name of a shard, as in data/train-00000-of-00002-ab.parquet; empty for other files."""
    shard = SHARD.match(name)
    return shard[1].rpartition("/")[2] if shard else ""


def one_kind(files: Sequence[str]) -> list[str]:
    """Returns the files of the most frequent kind of row files."""
    suffixes = [PurePosixPath(file.removesuffix(".gz")).suffix for file in files]
    best = max(KINDS, key=suffixes.count)
    kinds = JSON_KINDS if best in JSON_KINDS else (best,)
    return [file for file, suffix in zip(files, suffixes, strict=True) if suffix in kinds]
