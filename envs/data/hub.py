"""Files of a split of a data set, on the Hugging Face hub or in a folder, found by the rules of the package `datasets`.

Source: huggingface.co/docs/hub, "Manual Configuration" (`configs` of the card) and "File names and splits".
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from utils.settings.errors import UserError

CARD = "README.md"
CONVERTED = "refs/convert/parquet"  # branch with the hub's own copy of most data sets: CONFIG/SPLIT/0000.parquet
JSON_KINDS = (".jsonl", ".json", ".ndjson")  # are read together
KINDS = (".parquet", *JSON_KINDS, ".csv")  # files of rows; the first of equally frequent kinds is read
NO_ROWS = (CARD, "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
WORDS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
SPLIT_WORDS = {split: re.compile(rf"(^|[-._ 0-9])({words})([-._ 0-9]|$)") for split, words in WORDS.items()}
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")  # path before the shard's number, that number, number of shards
MAX_FILES = 100_000  # files in a folder
TIMEOUT = 10  # seconds after which a hub that does not answer counts as absent

Splits = dict[str, list[str]]  # files by split, as paths within the data set


def fetch_split(name: str, config: str, split: str) -> list[Path]:
    """Returns the files of a split of a data set of the hub, fetched unless the hub's cache on this machine has them.

    Raises: UserError if it has no such configuration or split; what the hub's client raises.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RevisionNotFoundError

    commit, names, card = look_up(name, "main")
    splits = find_splits(names, card, config, name)
    if not splits:  # nothing that can be read here, for example a script
        with suppress(RevisionNotFoundError):
            commit, names, _ = look_up(name, CONVERTED)
            splits = converted_splits(names, config, name)
    files = files_of_split(splits, split, f"{name}:{config}" if config else name)
    return [Path(hf_hub_download(name, file, repo_type="dataset", revision=commit)) for file in files]


def folder_split(folder: Path, config: str, split: str) -> list[Path]:
    """Returns the files of a split of a data set in a folder. Raises: UserError if it has no such split."""
    splits = find_splits(list_files(folder), read_card(folder), config, str(folder))
    return [folder / name for name in files_of_split(splits, split, f"{folder}:{config}" if config else str(folder))]


def look_up(name: str, revision: str) -> tuple[str, list[str], Mapping[str, Any]]:
    """Returns the commit, the paths and the metadata of a data set; without a network, those in the cache."""
    from huggingface_hub import HfApi, snapshot_download

    files = [CARD, ".gitattributes"]  # the second is always there: the client warns if it finds none
    fetch = partial(snapshot_download, name, repo_type="dataset", revision=revision, allow_patterns=files)
    try:
        info = HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT)  # the only call that never waits longer
        names, folder = [file.rfilename for file in info.siblings], Path(fetch())
    except Exception as error:  # noqa: BLE001 (of the client's network libraries, which change)
        try:
            folder = Path(fetch(local_files_only=True))
        except Exception:  # noqa: BLE001
            raise error from None
        names = list_files(folder)
    return folder.name, names, read_card(folder)


def list_files(folder: Path) -> list[str]:
    """Returns the paths of all files in a folder. Raises: UserError for more than MAX_FILES entries."""
    entries = list(islice(folder.rglob("*"), MAX_FILES + 1))
    if len(entries) > MAX_FILES:
        raise UserError(f"{folder} holds more than {MAX_FILES:,} files: name a file of rows in it")
    return [entry.relative_to(folder).as_posix() for entry in entries if entry.is_file()]


def read_card(folder: Path) -> Mapping[str, Any]:
    """Returns the metadata at the head of the data set's card; empty if there is none."""
    from huggingface_hub.repocard import metadata_load
    from yaml import YAMLError

    card = folder / CARD
    try:
        return metadata_load(card) or {} if card.is_file() else {}
    except (ValueError, RecursionError, YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{card}: the YAML at its head cannot be read ({reason}): correct it") from error


def find_splits(names: Sequence[str], card: Mapping[str, Any], config: str, origin: str) -> Splits:
    """Returns the files of rows of each split; no split if there is nothing that can be read here.

    Raises: UserError if the card has no such configuration, or has several and none is named.
    """
    visible = sorted(name for name in names if not re.search(r"(^|/)(\.|__)", name))
    if card.get("configs"):
        try:
            configs = {str(entry["config_name"]): entry for entry in card["configs"]}
            chosen = configs[choose_config(configs, config, origin)]
            inside = within(visible, chosen.get("data_dir") or "")
            splits = infer_splits(inside)
            if chosen.get("data_files") is not None:
                patterns = split_patterns(chosen["data_files"]).items()
                splits = {split: match(inside, paths) for split, paths in patterns}
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{origin}: `configs` of its {CARD} has another form than the hub's: correct it") from error
    else:  # a folder may stand for a configuration
        splits = infer_splits(within(visible, "" if config in ("", "default") else config))
    return {split: files for split, files in ((split, one_kind(files)) for split, files in splits.items()) if files}


def choose_config(configs: Mapping[str, Mapping[str, Any]], config: str, origin: str) -> str:
    """Returns the name of the named or default configuration. Raises: UserError if there is no such one."""
    default = [name for name, entry in configs.items() if name == "default" or entry.get("default")]
    default = default or list(configs) * (len(configs) == 1)
    if config in configs or (not config and default):
        return config or default[0]
    there = ", ".join(configs)
    if config:
        raise UserError(f"{origin} has no configuration {config}: choose one of {there}")
    raise UserError(f"{origin} has several configurations: name one by {origin}:NAME ({there})")


def within(names: Iterable[str], folder: str) -> dict[str, str]:
    """Returns the paths in a folder of the data set, by their paths relative to it."""
    start = "" if PurePosixPath(folder) == PurePosixPath() else f"{PurePosixPath(folder)}/"
    return {name.removeprefix(start): name for name in names if name.startswith(start)}


def split_patterns(data_files: str | Sequence[Any] | Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns patterns of paths by split, from any form that the card may have; paths without a split are of train."""
    if isinstance(data_files, Mapping):
        pairs = list(data_files.items())
    elif isinstance(data_files, str) or all(isinstance(item, str) for item in data_files):
        pairs = [("train", data_files)]
    else:
        pairs = [(item["split"], item["path"]) for item in data_files]
    return {str(split): [paths] if isinstance(paths, str) else list(paths) for split, paths in pairs}


def match(names: Mapping[str, str], patterns: Sequence[str]) -> list[str]:
    """Returns the paths that match any of the patterns, in the order of these."""
    found = []
    for pattern in patterns:
        parts = PurePosixPath(pattern).parts
        found += [path for name, path in names.items() if matches(PurePosixPath(name).parts, parts)]
    return list(dict.fromkeys(found))


@cache  # so that no pattern takes exponential time
def matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """True if the parts of a path match a pattern, in which "**" stands for any number of folders."""
    if not pattern or not path:
        return not path and set(pattern) <= {"**"}
    if pattern[0] == "**":
        return matches(path, pattern[1:]) or matches(path[1:], pattern)
    return fnmatchcase(path[0], pattern[0]) and matches(path[1:], pattern[1:])


def infer_splits(names: Mapping[str, str]) -> Splits:
    """Returns files by split if the card does not name them: from shards in data/, or from words in the paths."""
    shards, by_folder, by_file = defaultdict(list), defaultdict(list), defaultdict(list)
    for name, path in names.items():
        *folders, file = name.split("/")
        if folders == ["data"] and (shard := SHARD.match(file)):
            shards[shard[1]].append(path)
        for split, word in SPLIT_WORDS.items():
            if any(map(word.search, folders)):
                by_folder[split].append(path)
            if word.search(file):
                by_file[split].append(path)
    return shards or by_folder or by_file or {"train": list(names.values())}


def one_kind(files: Sequence[str]) -> list[str]:
    """Returns the files of the most frequent kind of row files."""
    kinds = {file: PurePosixPath(file.removesuffix(".gz")).suffix for file in files}
    counts = Counter(kinds[file] for file in files if PurePosixPath(file).name not in NO_ROWS)
    best = max(KINDS, key=lambda kind: counts[kind])
    alike = JSON_KINDS if best in JSON_KINDS else (best,)
    return [file for file in files if kinds[file] in alike and PurePosixPath(file).name not in NO_ROWS]


def converted_splits(names: Sequence[str], config: str, origin: str) -> Splits:
    """Returns files by split in the hub's own copy of a data set. Raises: UserError for no such configuration."""
    configs = defaultdict(lambda: defaultdict(list))
    for name in sorted(names):
        if name.count("/") == 2 and name.endswith(".parquet"):
            folder, split, _ = name.split("/")
            configs[folder][split].append(name)
    return configs[choose_config(configs, config, origin)] if configs else {}


def files_of_split(splits: Splits, split: str, origin: str) -> list[str]:
    """Returns the files of a split. Raises: UserError if there is none, or a shard is missing."""
    if not splits:
        raise UserError(f"{origin} holds no file of rows ({', '.join(KINDS)}): name another data set")
    if split not in splits:
        raise UserError(
            f"{origin} has no split {split}, only {', '.join(splits)}: name a data set or configuration that has it"
        )
    shards = defaultdict(set)
    for file in splits[split]:
        if shard := SHARD.match(file):
            shards[shard[1], int(shard[3])].add(int(shard[2]))
    for (start, total), numbers in shards.items():
        if missing := sorted(set(range(total)) - numbers):
            raise UserError(
                f"{origin} lacks {start}-{missing[0]:05}-of-{total:05}, {len(missing)} such files in all: download "
                "them again"
            )
    return splits[split]
