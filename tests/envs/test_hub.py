"""Data sets of the hub, from a hub on this machine and from folders."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import envs
from envs.data.hub import files_of_split, folder_split
from envs.own.dataset import Dataset
from tests.local_hub import local_hub, put
from tests.published import ROOT, SAMPLES, jsonl, published, sample
from utils.settings.errors import UserError

MAKE = """
import json, os, sys
import envs

found = []
for name, options in json.loads(sys.argv[1]):
    try:
        env = envs.make_env(name, **options)
        found.append([env.problem(i).messages[-1]["content"] for i in range(env.num_tasks)])
    except ValueError as error:
        found.append(str(error))
assert "datasets" not in sys.modules
print(json.dumps(found), flush=True)
os._exit(0)  # threads of the hub's client may abort the exit of a program as short as this
"""


def make(wanted: list, env: dict[str, str]) -> list:
    """Questions of each environment, or its error, from another process: the hub's address is read by an import."""
    done = subprocess.run(
        [sys.executable, "-c", MAKE, json.dumps(wanted)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no warning of the hub's client"
    return json.loads(done.stdout)


MINE = {"path": "me/mine", "prompt": "q", "answer": "a"}
OPTIONS = [  # of data sets
    MINE,
    {"path": "openai/gsm8k:socratic", "prompt": "question", "form": "hash"},
    {"path": "openai/gsm8k"},
    {"path": "openai/gsm8k:maim"},
    {"path": "me/mine", "hub_split": "valid"},
    MINE | {"path": "me/apart"},
    {"path": "me/nothing"},
]


def test_environments_load_from_the_hub_and_then_without_it(tmp_path):
    """With the rows that files in --data_dir give; then from the cache, without a network."""
    published(tmp_path)
    names = "gsm8k gsm8k-valid gsm8k-test deepscaler aime-test aime25 amc amc23-test math500-test countdown34".split()
    rows = [{"q": f"{i}?", "a": str(i)} for i in range(40)]
    files = {
        "rows-00000-of-00002.jsonl": jsonl(rows[:20]),
        "rows-00001-of-00002.jsonl": jsonl(rows[20:]),
        "plot.png": b"\x89PNG",
    }
    put(tmp_path, "me/mine", files)
    put(tmp_path, "me/apart", {"en.jsonl": jsonl(rows[:20]), "de.jsonl": jsonl(rows[20:])})
    wanted = [(name, {}) for name in names] + [("dataset", options) for options in OPTIONS]
    fetched = []
    with local_hub(tmp_path, fetched) as env:
        found = make(wanted, env)
        assert len(fetched) == len(set(fetched)), "each file once"
        assert "me/mine/plot.png" not in fetched
        assert "openai/gsm8k/main/train-00000-of-00001.parquet" in fetched
    for name, ours in zip(names, found, strict=False):
        local = envs.make_env(name, data_dir=str(SAMPLES))
        theirs = [local.problem(i).messages[-1]["content"] for i in range(local.num_tasks)]
        assert ours == theirs or (ours and name in ("countdown34", "deepscaler")), name
    own, other_configuration, several, unknown, no_split, apart, absent = found[len(names) :]
    assert set(own) <= {row["q"] for row in rows}
    assert len(own) == 34
    assert other_configuration == ["no"]
    assert "me/apart has several files of the split train that are not shards of one: " in apart
    assert apart.endswith("install the package datasets, which reads more of them: `pip install datasets`")
    assert several == "openai/gsm8k has several configurations: name one by openai/gsm8k:NAME (main, socratic)"
    assert unknown.startswith("openai/gsm8k has no configuration maim: choose one of main, socratic, or name another")
    assert no_split == "me/mine has no split valid, only train: name a data set or configuration that has it"
    assert "could not load me/nothing from the hub (" in absent
    assert "--local-dir FOLDER` on a machine with" in absent
    again = make(wanted, env)  # the server is gone
    assert again[:-2] == found[:-2]
    assert "could not load me/nothing from the hub (" in again[-1]
    assert make(wanted[2:3], env | {"HF_HUB_OFFLINE": "1"}) == found[2:3]


def test_a_copy_of_a_data_set_of_the_hub_is_read_from_its_folder(tmp_path):
    """What `hf download NAME --repo-type dataset --local-dir FOLDER` writes, under any of its names."""
    published(tmp_path / "hub")
    questions = [row["question"] for row in sample("gsm8k/test.jsonl")]
    for place in ("a/openai/gsm8k", "b/gsm8k"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).symlink_to(tmp_path / "hub/openai/gsm8k/main")
    (tmp_path / "c").symlink_to(tmp_path / "hub/openai/gsm8k/main")
    for data_dir in ("a", "b", "b/gsm8k", "c"):
        env = envs.make_env("gsm8k-test", data_dir=str(tmp_path / data_dir))
        found = [env.problem(i).messages[-1]["content"] for i in range(env.num_tasks)]
        assert found == questions, data_dir
    options = {"prompt": "question", "form": "hash", "hub_split": "test"}
    env = envs.make_env("dataset", path=f"{tmp_path / 'c'}:main", **options)
    assert {env.problem(i).messages[-1]["content"] for i in range(env.num_tasks)} < set(questions)
    with pytest.raises(UserError, match=r"c has several configurations: name one by .*c:NAME \(main, socratic\)"):
        envs.make_env("dataset", path=str(tmp_path / "c"), **options)
    with pytest.raises(UserError, match=r"has none of aime/aime24.jsonl.*`hf download HuggingFaceH4/aime_2024 "):
        envs.make_env("aime", data_dir=str(tmp_path / "b"))


NAMES = ("train.jsonl", "test.jsonl", "dev.jsonl", "other.jsonl", "README.md", "dataset_infos.json")
FOLDERS = ("train/a.jsonl", "train/b.jsonl", "validation/a.jsonl", "c.jsonl")
SHARDS = ("data/train-00001-of-00002-cd.parquet", "data/train-00000-of-00002-ab.parquet", "data/x-00000-of-00001.csv")
CONFIGS = ("p/train.jsonl", "q/train.jsonl", "q/test.jsonl")
SIZES = ("data/train-00000-of-00001.parquet", "data/train_1M-00000-of-00001.parquet")
KINDS = ("data/train_gen-00000-of-00001.parquet", "data/train_sft-00000-of-00001.parquet")


@pytest.mark.parametrize(
    ("names", "config", "splits"),
    [
        (NAMES, "", {"train": ["train.jsonl"], "test": ["test.jsonl"], "validation": ["dev.jsonl"]}),
        (FOLDERS, "", {"train": [*FOLDERS[:2]], "validation": ["validation/a.jsonl"]}),
        (("my_train_1.csv", "trainer.csv", "test-2.csv"), "", {"train": ["my_train_1.csv"], "test": ["test-2.csv"]}),
        (SHARDS, "default", {"train": [SHARDS[1], SHARDS[0]], "x": [SHARDS[2]]}),
        ((".x/train.jsonl", "__pycache__/train.jsonl", "sub/train.jsonl"), "", {"train": ["sub/train.jsonl"]}),
        (("a.csv", "a.json", "plot.png", "notes.txt"), "", {"train": ["a.json"]}),
        (("a.csv", "b.csv", "a.json"), "", {"train": ["a.csv", "b.csv"]}),
        (("rows.jsonl.gz", "notes.txt.gz"), "", {"train": ["rows.jsonl.gz"]}),
        (SIZES, "", {"train": [SIZES[0]], "train_1M": [SIZES[1]]}),
        (KINDS, "", {"train_sft": [KINDS[1]]}),
        (CONFIGS, "q", {"train": ["q/train.jsonl"], "test": ["q/test.jsonl"]}),
        (("notes.txt", "LICENSE"), "", {}),
    ],
)
def test_files_of_a_split_are_found_by_their_names(names, config, splits, tmp_path):
    folder = put(tmp_path, "me/mine", dict.fromkeys(names, ""))
    found = {}
    for split in ("train", "test", "validation", "x", "train_1M", "train_sft"):
        try:
            found[split] = [path.relative_to(folder).as_posix() for path in folder_split(folder, config, split)]
        except UserError as error:
            assert str(error).startswith(str(folder))
            assert f"has no split {split}, only" in str(error) or "has no file of rows" in str(error)
    assert found == splits


def test_other_data_sets_are_read_by_the_package_datasets(tmp_path, monkeypatch):
    """A stand-in for the package, which is not among those that lmpo needs."""
    asked = []

    def load_dataset(*names: str, split: str) -> list[dict]:
        asked.append((*names, split))
        if split == "none":
            raise KeyError("no such split")
        return [{"prompt": f"{i}?", "answer": str(i)} for i in range(3)]

    # The package is not installed for tests.
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    folder = put(tmp_path, "me/mine", {"rows.arrow": ""})
    env = Dataset("test", path=str(tmp_path), test_path=f"{folder}:small", test_hub_split="validation")
    assert [env.problem(i).answer["answer"] for i in range(3)] == ["0", "1", "2"]
    assert asked == [(str(folder), "small", "validation")]
    with pytest.raises(UserError, match="datasets cannot read the split none of .*main .KeyError: 'no such split'.$"):
        Dataset("test", path=str(tmp_path), test_path=str(folder), test_hub_split="none")


def test_a_split_without_all_of_its_shards_is_not_read():
    """As a download that was cut off leaves it: its rows would be another data set."""
    with pytest.raises(UserError, match="lacks data/train-00001-of-00004, 2 such files in all: download them again$"):
        files_of_split([f"data/train-0000{i}-of-00004.parquet" for i in (0, 2)], "", "train", "me/mine")
