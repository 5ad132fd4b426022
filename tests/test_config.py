"""Command lines, presets and their mistakes."""

import json
from dataclasses import dataclass

import pytest

from utils.settings.config import option, parse, read_preset, to_dict


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn."""

    temperature: float = option(1.0, "of the softmax; 0 is greedy")
    group_size: int = option(8, "rollouts of one prompt")
    sharding: str = option("fsdp", "of the parameters", choices=["dp", "fsdp"])


@dataclass(frozen=True)
class Settings(Sampling):
    """The training loop."""

    lr: float = option(1e-6, "learning rate")
    do_group_filter: bool = option(True, "drop groups in which all rewards are equal")
    ckpt_dir: str = option("", "folder of the model")
    sharding: str = "dp"

    def __post_init__(self):
        if self.lr < 0:
            raise ValueError("lr must not be negative.")


def read(line: str, **options) -> tuple[Settings, set[str]]:
    return parse(Settings, line.split(), "Trains.", aliases={"model_path": "ckpt_dir"}, **options)


def mistake(line: str, capsys) -> str:
    """The sentence that a wrong command line ends with."""
    with pytest.raises(SystemExit) as end:
        read(line)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, f"one sentence, no traceback: {message}"
    return message


def test_nothing_given_is_the_defaults():
    assert read("") == (Settings(), set())


def test_the_block_of_policy_gradients_is_the_environment(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text("lr: 1e-5\ndata:\n  size: 70\n  specs:\n  - name: leg_counting\nenv_options: system=none\n")
    options = f"datasets={file},system=none"
    assert read_preset(str(file)) == {"lr": "1e-5", "env_name": "reasoning_gym", "env_options": options}
    file.write_text("data: {size: 3}")
    assert read_preset(str(file)) == {"data": {"size": 3}}, "not that block: refused as an unknown option"


@pytest.mark.parametrize(
    ("line", "value"),
    [("--do_group_filter 0", False), ("--do_group_filter=false", False), ("--nodo_group_filter", False)]
    + [("--do_group_filter 1", True), ("--do-group-filter=true", True), ("--do_group_filter --lr 1", True)],
)
def test_booleans_in_all_their_spellings(line, value):
    config, explicit = read(line)
    assert config.do_group_filter is value
    assert "do_group_filter" in explicit


def test_dashes_aliases_and_negative_numbers():
    config, explicit = read("--model-path x --temperature -1 --group-size=4")
    assert (config.ckpt_dir, config.temperature, config.group_size) == ("x", -1.0, 4)
    assert explicit == {"ckpt_dir", "temperature", "group_size"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "def get_config(): return {'lr': 0.5, 'group_size': 2}"),
        ("a.py", "import ml_collections as m\ndef get_config(): return m.ConfigDict({'lr': 0.5, 'group_size': 2})"),
        ("a.yaml", "lr: 5e-1  # text to YAML, a number to us\ngroup_size: 2"),
    ],
)
def test_preset_overrides_defaults_and_flags_override_the_preset(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config, explicit = read(f"--group_size 3 --config {tmp_path / name}")
    assert (config.lr, config.group_size, config.temperature) == (0.5, 3, 1.0)
    assert explicit == {"lr", "group_size"}


def test_the_settings_of_a_run_are_a_preset(tmp_path):
    config, _ = read("--lr 1e-7 --nodo_group_filter")
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert read(f"--config {tmp_path / 'config.json'}")[0] == config


def test_an_empty_command_line_uses_the_default_preset_and_says_so(tmp_path, capsys):
    (tmp_path / "demo.yaml").write_text("lr: 2.0")
    assert read("", default_preset=str(tmp_path / "demo.yaml"))[0].lr == 2.0
    assert "demo.yaml" in capsys.readouterr().out
    assert read("--group_size 2", default_preset=str(tmp_path / "demo.yaml"))[0].lr == 1e-6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--do_group_filer 0", "did you mean do_group_filter"),
        ("--lr abc", "type float"),
        ("--group_size 2.5", "type int"),
        ("--sharding tp", "one of dp, fsdp"),
        ("--lr --group_size 3", "--lr needs a value"),
        ("--group_size 3 4", "'4' belongs to no option"),
        ("--lr -1", "lr must not be negative"),
        ("--config nowhere.py", "no preset nowhere.py"),
    ],
)
def test_mistakes_end_with_one_sentence(line, words, capsys):
    assert words in mistake(line, capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [("group_sise: 3", "did you mean group_size"), ("group_size: [3]", "type int"), ("ckpt_dir: 3", "quotes")]
    + [("- lr", "names and values"), ("lr: [", "not YAML")],
)
def test_mistakes_in_a_preset_name_the_file(text, words, tmp_path, capsys):
    (tmp_path / "wrong.yaml").write_text(text)
    message = mistake(f"--config {tmp_path / 'wrong.yaml'}", capsys)
    assert words in message and "wrong.yaml" in message


def test_help_lists_each_option_under_the_class_that_introduces_it(capsys):
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    order = ["Trains.", "The training", "--lr float = 1e-06", "How replies", "--group_size", "--sharding str = 'dp'"]
    assert [text.index(word) for word in order] == sorted(text.index(word) for word in order)
    assert "of the parameters [dp | fsdp]" in text, "a new default keeps the help and the choices"
