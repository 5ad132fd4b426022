"""Mistakes on the command line: each ends with one sentence that says what is wrong, where, and what to do."""

from pathlib import Path

import pytest

from core.config import Config
from core.run.folder import settings_of_model
from envs.settings import resolve_environments
from utils.settings.config import parse
from utils.settings.errors import user_errors

PRESETS = {
    "games.py": "def get_config(): return {'env_name': 'guess', 'env_options': 'prompt=bare,numbers=9'}",
    "own_fault.py": "def get_config(): return {'env_name': 'poem', 'env_options': 'numbers=9'}",
    "groups.py": "def get_config(): return {'groups_per_batch': 4, 'group_size': 4, 'ppo_minibatch': 8}",
    "mapping.py": "get_config = {'lr': 1e-6}",
    "rows.jsonl": "".join(f'{{"prompt": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(12)),
    "other.jsonl": '{"q": "1 + 1", "a": "2"}\n',
    "empty.jsonl": "",
    "r.py": "def good(completion, answer): return 1.0\ndef wrong(completion, answr): return 1.0",
}  # files in the folder of a test
ROWS = "--env_name dataset --env_options path"
SENTENCES = {  # command line: what is printed
    "--learning_rate 1e-4": "there is no option --learning_rate; did you mean --lr?",
    "--lr fast": "--lr=fast: lr must be of type float",
    "--max_steps 2.5": "--max_steps=2.5: max_steps must be of type int",
    "--dtype float8": "--dtype=float8: dtype must be one of bfloat16, float32",
    "--kv_dtype fp8": "kv_dtype must be one of int8, or empty",
    "--advantage group_zscor": "did you mean group_zscore?",
    "--group_size 1": "--advantage group_mean compares rollouts of a group: raise --group_size above 1",
    "--env_name countdwn": "there is no environment 'countdwn' (did you mean countdown?)",
    "--env_name countdown --test_env_name countdown-val": "did you mean countdown-valid?",
    "--env_name countdown --env_options number=3": "has no option 'number' (did you mean numbers?)",
    "--env_name countdown --env_options numbers": "--env_options 'numbers': 'numbers' is not name=value",
    "--env_name math500-valid": "math500 has no -valid, since it is a benchmark with test problems only",
    "--config nowhere.yaml": "there is no preset nowhere.yaml (looked here and in",
    "--config poems.py": "did you mean configs/poem.py?",
    "--config mapping.py": "defines no get_config(): write def get_config(): return {...}",
    "--config own_fault.py": "own_fault.py: environment poem has no option for numbers=9: choose one of ",
    "--config groups.py --groups_per_batch 3": "--ppo_minibatch 8 does not divide",
    "--config groups.py --groups_per_batch 3 ": "(groups.py sets --ppo_minibatch, --group_size)",
    "--groups_per_batch 0": "--groups_per_batch must be at least 1",
    "--test_interval -1": "--test_interval and --seed must not be negative: raise the one that is",
    "--env_name poem --env_options form=tags": "environment poem has no option 'form': choose one of max_characters",
    "--env_name countdown --env_options numbers=many": "option numbers takes int, not 'many'",
    "--env_name countdown --episode x.py:C": "countdown takes it: remove it, or give --env_name dataset",
    "--env_name countdown --data_dir x": "--data_dir x: no environment of countdown takes it",
    "--env_name countdown --reward_weights 1": "--reward_weights has no effect without --reward: name the functions",
    "--env_name dataset": "the environment dataset needs data: --env_options path=FILE (or owner/name on the hub)",
    f"{ROWS}=nowhere.jsonl": "there is no file nowhere.jsonl",
    f"{ROWS}=empty.jsonl": "empty.jsonl is empty: write rows into it",
    f"{ROWS}=other.jsonl": "other.jsonl:1 has no column 'prompt', only 'q', 'a'",
    f"{ROWS}=rows.jsonl,form=boxd": "form=boxd: choose one of tags, boxed, hash, any",
    f"{ROWS}=rows.jsonl --reward nowhere.py:f": "write FILE.py:FUNCTION; there is no file nowhere.py",
    f"{ROWS}=rows.jsonl --reward r.py": "name a function of r.py after a colon, as in r.py:FUNCTION",
    f"{ROWS}=rows.jsonl --reward r.py:nothing": "r.py has no function nothing, only good, wrong",
    f"{ROWS}=rows.jsonl --reward r.py:wrong": "needs 'answr', which is not a column; there are 'prompt', 'answer'",
}


def said(words: str, capsys) -> str:
    """What a command line prints up to the environments, in one text."""
    with user_errors():
        config = parse(Config, words.split(), implied=lambda options: settings_of_model(options, False))
        resolve_environments(config.env, config.held_out, config.sampling)
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    for name, text in PRESETS.items():
        (tmp_path / name).write_text(text)
    # Relative folders are looked for here.
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", SENTENCES)
def test_a_mistake_ends_with_one_sentence(words, capsys):
    with pytest.raises(SystemExit) as ended:
        said(words, capsys)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert SENTENCES[words] in error
    assert "one of ," not in error


def test_options_of_a_preset_go_with_its_environment(capsys):
    line = "games.py: --env_options {} is dropped, because environment {} has no such option\n"
    found = said("--config games.py --env_name poem", capsys)
    assert found == line.format("prompt=bare,numbers=9", "poem")
    assert said("--config games.py --env_name guess --env_options prompt=bare", capsys) == ""
    found = line.format("prompt=bare", "countdown")[:20]
    assert found not in said("--config games.py --env_name countdown", capsys)
