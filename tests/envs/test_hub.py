"""Data sets of the hub, from a hub on this machine and from folders: the files that the package `datasets` reads."""

import json
import subprocess
import sys

import pytest

import envs
from envs.data.files import read_file
from envs.data.hub import CONVERTED, KINDS, files_of_split, find_splits, folder_split, matches
from tests.local_hub import local_hub, put
from tests.published import ROOT, SAMPLES, card, config, jsonl, parquet, published, sample
from utils.settings.errors import UserError

MAKE = """
import json, sys
import envs

found = []
for name, options in json.loads(sys.argv[1]):
    try:
        env = envs.make_env(name, **options)
        found.append([env.problem(i).messages[-1]["content"] for i in range(env.num_tasks)])
    except ValueError as error:
        found.append(str(error))
assert "datasets" not in sys.modules
print(json.dumps(found))
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
    MINE | {"path": "me/script", "hub_split": "validation"},
    {"path": "openai/gsm8k"},
    {"path": "openai/gsm8k:maim"},
    {"path": "me/mine", "hub_split": "valid"},
    {"path": "me/nothing"},
]


def test_environments_load_from_the_hub_and_then_without_it(tmp_path):
    """With the rows that files in --data_dir give; then from the cache, without a network."""
    published(tmp_path)
    names = "gsm8k gsm8k-valid gsm8k-test deepscaler aime-test aime25 amc amc23-test math500-test countdown34".split()
    rows = [{"q": f"{i}?", "a": str(i)} for i in range(40)]
    files = {
        "a.jsonl": jsonl(rows[:20]),
        "b.jsonl": jsonl(rows[20:]),
        "plot.png": b"\x89PNG",
    }
    put(tmp_path, "me/mine", files)
    put(tmp_path, "me/script", {"script.py": "raise SystemExit"})
    put(tmp_path, "me/script", {"one/validation/0000.parquet": parquet(rows)}, CONVERTED)
    wanted = [(name, {}) for name in names] + [("dataset", options) for options in OPTIONS]
    fetched = []
    with local_hub(tmp_path, fetched) as env:
        found = make(wanted, env)
        assert len(fetched) == len(set(fetched)), "each file once"
        assert "me/mine/plot.png" not in fetched
        assert "openai/gsm8k/main/train-00000-of-00001.parquet" in fetched
    assert_local_rows(names, found)
    own, other_configuration, converted, several, unknown, no_split, absent = found[len(names) :]
    assert set(own) <= {row["q"] for row in rows}
    assert len(own) == 34
    assert other_configuration == ["no"]
    assert set(converted) == set(own)
    assert several == "openai/gsm8k has several configurations: name one by openai/gsm8k:NAME (main, socratic)"
    assert unknown == "openai/gsm8k has no configuration maim: choose one of main, socratic"
    assert no_split == "me/mine has no split valid, only train: name a data set or configuration that has it"
    assert "could not load me/nothing from the hub (" in absent
    assert "--local-dir FOLDER` on a machine with" in absent
    again = make(wanted, env)  # the server is gone
    assert again[:-1] == found[:-1]
    assert "could not load me/nothing from the hub (" in again[-1]
    assert make(wanted[2:3], env | {"HF_HUB_OFFLINE": "1"}) == found[2:3]


def assert_local_rows(names: list[str], found: list[list[str]]) -> None:
    """Asserts that environments have the problems that files in --data_dir give."""
    for name, ours in zip(names, found, strict=False):
        local = envs.make_env(name, data_dir=str(SAMPLES))
        theirs = [local.problem(i).messages[-1]["content"] for i in range(local.num_tasks)]
        assert ours
        assert isinstance(ours, list), name
        assert ours == theirs or name in ("countdown34", "deepscaler"), name


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
FOLDERS = ("train/a.jsonl", "train/b.jsonl", "validation/a.jsonl", "c.jsonl", "my-train/d.jsonl")
WORDS = ("my_train_1.csv", "my_test.csv", "trainer.csv", "testing-2.csv")
SHARDS = ("data/train-00001-of-00002-cd.parquet", "data/train-00000-of-00002-ab.parquet", "data/x-00000-of-00001.csv")
HIDDEN = (".x/train.jsonl", "__pycache__/train.jsonl", "sub/train.jsonl", ".train.jsonl")
NESTED = ("p/a.jsonl", "q/b.jsonl", "q/c/d.jsonl")


@pytest.mark.parametrize(
    ("names", "configs", "name", "splits"),
    [  # what datasets 5.2 reads, in its order, from a hub of this kind
        (NAMES, [], "", {"train": ["train.jsonl"], "test": ["test.jsonl"], "validation": ["dev.jsonl"]}),
        (FOLDERS, [], "", {"train": ["my-train/d.jsonl", *FOLDERS[:2]], "validation": ["validation/a.jsonl"]}),
        (WORDS, [], "", {"train": ["my_train_1.csv"], "test": ["my_test.csv", "testing-2.csv"]}),
        (SHARDS + NAMES, [], "default", {"train": [SHARDS[1], SHARDS[0]], "x": [SHARDS[2]]}),
        (HIDDEN, [], "", {"train": ["sub/train.jsonl"]}),
        (("a.csv", "a.json", "plot.png", "notes.txt"), [], "", {"train": ["a.json"]}),
        (("a.csv", "b.csv", "a.json"), [], "", {"train": ["a.csv", "b.csv"]}),
        (("b.jsonl", "a.json", "x.csv"), [], "", {"train": ["a.json", "b.jsonl"]}),
        (("one.parquet", "two.parquet"), [], "", {"train": ["one.parquet", "two.parquet"]}),
        (("rows.jsonl.gz", "notes.txt.gz"), [], "", {"train": ["rows.jsonl.gz"]}),
        (NESTED, [{"config_name": "z", "data_files": "q/*"}], "", {"train": ["q/b.jsonl"]}),
        (
            NESTED,
            [{"config_name": "z", "data_files": ["q/**", "./p/a.jsonl"]}],
            "z",
            {"train": [*NESTED[1:], NESTED[0]]},
        ),
        (
            NESTED,
            [config("z", train="q/[a-b].*", x=["p/*", "q/b.jsonl"])],
            "z",
            {"train": ["q/b.jsonl"], "x": ["p/a.jsonl", "q/b.jsonl"]},
        ),
        (
            NESTED,
            [{"config_name": "z", "data_dir": "q"}, {"config_name": "y", "data_dir": "p", "default": True}],
            "",
            {"train": ["p/a.jsonl"]},
        ),
        (
            NESTED,
            [{"config_name": "z", "data_dir": "q", "data_files": "c/*"}, {"config_name": "y"}],
            "z",
            {"train": ["q/c/d.jsonl"]},
        ),
        (NESTED, [config("z", train="nothing/*")], "", {}),
        (("notes.txt", "LICENSE"), [], "", {}),
    ],
)
def test_files_of_splits_are_those_that_datasets_reads(names, configs, name, splits, tmp_path):
    folder = put(tmp_path, "me/mine", dict.fromkeys(names, "") | ({"README.md": card(*configs)} if configs else {}))
    found = {}
    for split in ("train", "test", "validation", "x"):
        try:
            found[split] = [path.relative_to(folder).as_posix() for path in folder_split(folder, name, split)]
        except UserError as error:
            assert str(error).startswith(str(folder))
            assert f"has no split {split}, only" in str(error) or "holds no file of rows" in str(error)
    assert found == splits


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("---\nconfigs: [\n---\n", "README.md: the YAML at its head cannot be read"),
        ("---\n- 1\n---\n", "README.md: the YAML at its head cannot be read"),
        ("---\na: " + "[" * 5000 + "\n---\n", "README.md: the YAML at its head cannot be read"),
        (card({"name": "main"}), "`configs` of its README.md has another form"),
        (card("main"), "`configs` of its README.md has another form"),
        (card({"config_name": "main", "data_files": 5}), "`configs` of its README.md has another form"),
        (card({"config_name": "main", "data_files": [{"split": "train"}]}), "has another form"),
        (card({"config_name": "main", "data_files": [5]}), "has another form"),
        (card({"config_name": "main", "data_dir": 5}), "has another form"),
        (card(config("main", train=[5])), "has another form"),
    ],
)
def test_a_damaged_card_is_named(tmp_path, text, reason):
    folder = put(tmp_path, "me/mine", {"README.md": text, "train.jsonl": "{}"})
    with pytest.raises(UserError, match=reason):
        folder_split(folder, "", "train")


def test_a_split_without_all_of_its_shards_is_not_read():
    """As a download that was cut off leaves it: its rows would be another data set."""
    splits = find_splits([f"data/train-0000{i}-of-00004.parquet" for i in (0, 2)], {}, "", "me/mine")
    with pytest.raises(UserError, match="lacks data/train-00001-of-00004, 2 such files in all: download them again$"):
        files_of_split(splits, "train", "me/mine")


def test_no_pattern_takes_long():
    assert not matches(("a",) * 60 + ("c",), ("**", "a") * 40 + ("b",))
    assert not matches(("a" * 200,), ("*a" * 60 + "b",))


def test_every_kind_of_file_that_is_looked_for_is_read(tmp_path):
    for kind in KINDS:
        (tmp_path / f"rows{kind}").write_bytes(parquet([{"a": 1}]) if kind == ".parquet" else b'[{"a": "1"}]\n')
        assert list(read_file(tmp_path / f"rows{kind}")) or kind == ".csv"
