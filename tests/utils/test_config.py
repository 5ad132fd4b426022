"""Command lines, presets and their mistakes."""

import json
import re
import runpy
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import pytest

from core import eval, grpo, sampling
from core.sampler import SamplingConfig
from envs.settings import EnvConfig, HeldOutConfig, resolve_environments
from extras.chat_web import PageCommand
from extras.replay import ReplayCommand
from models.speed import PEAKS
from recipes.preferences.dpo import DPOConfig
from utils.devices import startup
from utils.settings.checks import hide_passwords
from utils.settings.config import make_config, options_of, parse, to_dict, with_options
from utils.settings.errors import UserError, user_errors
from utils.settings.lmpo import LMPO
from utils.settings.options import group, option
from utils.settings.presets import ROOT, demo_of_tiny, read_preset


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn."""

    temperature: float = option(1.0, "of the softmax; 0 is greedy")
    group_size: int = option(8, "rollouts of one prompt", essential=True)
    sharding: str = option("fsdp", "of the parameters", choices=["dp", "fsdp"], resumable=True)


@dataclass(frozen=True)
class Loop:
    """The training loop."""

    lr: float = option(1e-6, "learning rate")
    do_group_filter: bool = option(True, "drop groups in which all rewards are equal")
    ckpt_dir: str = option("", "folder of the model")

    def __post_init__(self):
        if self.lr < 0:
            raise UserError("lr must not be negative.")


@dataclass(frozen=True)
class Inherited(Loop, Sampling):
    """All."""

    sharding: str = "dp"


@dataclass(frozen=True)
class Copies(Sampling):
    """Sampling from copies."""

    sharding: str = "dp"


@dataclass(frozen=True)
class Composed:
    """All."""

    loop: Loop = group(Loop)
    sampling: Copies = group(Copies)
    seed: int = option(0, "seed of all draws")

    def __post_init__(self):
        if self.seed > self.sampling.group_size:
            raise UserError("seed must not be above group_size.")


OLD = {"greedy": ("sharding", "fsdp", "dp")}
both = pytest.mark.parametrize("settings", [Inherited, Composed], ids=["inherited", "composed"])


def read(line: str, settings: type = Composed, **options) -> Composed | Inherited:
    aliases = {"model_path": "ckpt_dir"}
    return parse(settings, line.split(), "Trains.", aliases=aliases, spellings=OLD, **options)


def mistake(line: str, capsys, settings: type = Composed) -> str:
    """The sentence that a wrong command line ends with."""
    with pytest.raises(SystemExit) as end:
        read(line, settings)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, f"one sentence, no traceback: {message}"
    return message


@both
def test_settings_are_made_and_changed_by_flat_names(settings):
    config = make_config(settings, temperature=0.5, ckpt_dir="x")
    assert config == read("--temperature 0.5 --ckpt_dir x", settings)
    assert with_options(config, lr=1.0) == make_config(settings, temperature=0.5, ckpt_dir="x", lr=1.0)
    assert to_dict(config)["lr"] == 1e-6, "the original is as it was"
    with pytest.raises(UserError, match="no option temprature; did you mean --temperature"):
        make_config(settings, temprature=1.0)
    with pytest.raises(UserError, match="lr must not be negative"):
        with_options(config, lr=-1.0)


def test_the_block_of_policy_gradients_is_the_environment(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text("lr: 1e-5\ndata:\n  size: 70\n  specs:\n  - name: leg_counting\nenv_options: system=none\n")
    options = f"datasets={file},system=none"
    assert read_preset(str(file)) == {"lr": "1e-5", "env_name": "reasoning_gym", "env_options": options}
    file.write_text("data: {size: 3}")
    assert read_preset(str(file)) == {"data": {"size": 3}}, "not that block: refused as an unknown option"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--do_group_filter 0", False),
        ("--do_group_filter=false", False),
        ("--nodo_group_filter", False),
        ("--do-group-filter=true", True),
        ("--do_group_filter --lr 1", True),
    ],
)
def test_booleans_in_all_their_spellings(line, value):
    assert read(f"--do_group_filter={not value} {line}").loop.do_group_filter is value


def test_dashes_aliases_and_negative_numbers():
    config = read("--model-path x --temperature -1 --group-size=4")
    assert to_dict(config) == to_dict(Composed()) | {"ckpt_dir": "x", "temperature": -1.0, "group_size": 4}


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
    config = read(f"--group_size 3 --config {tmp_path / name}")
    assert to_dict(config) == to_dict(Composed()) | {"lr": 0.5, "group_size": 3}


@both
def test_the_settings_of_a_run_are_a_preset(settings, tmp_path):
    config = read("--lr 1e-7 --nodo_group_filter --group_size 2 --greedy 1", settings)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config) | {"run": {"host": "here"}}))
    assert read(f"--config {tmp_path / 'config.json'}", settings) == config


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"env_name": "countdown", "max_steps": 24, "lr": 6e-4}),
        ("--max_steps 3", {"env_name": "countdown", "max_steps": 3, "group_size": 16}),
        ("--config configs/cispo.py --model_dir models/tiny/", {"env_name": "countdown", "objective": "cispo"}),
        ("--env_name poem", {"env_name": "poem", "lr": 1e-6}),
        ("--config configs/poem.py", {"env_name": "poem"}),
        ("--model_dir Qwen/Qwen3-1.7B", {"env_name": "poem", "lr": 1e-6}),
    ],
)
def test_models_tiny_without_an_environment_is_the_demo(line, expected, capsys):
    settings = to_dict(parse(grpo.Config, line.split(), spellings=LMPO, implied=demo_of_tiny))
    assert expected.items() <= settings.items()
    said = capsys.readouterr().out.splitlines()
    demo = to_dict(parse(grpo.Config, f"--config configs/demo.py {line}".split(), spellings=LMPO))
    is_demo = expected["env_name"] == "countdown"
    assert (settings == demo) == is_demo
    assert len(said) == is_demo
    assert all("--config configs/demo.py" in line for line in said)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--do_group_filer 0", "did you mean --do_group_filter"),
        ("--lr --group_size 3", "--lr needs a value"),
        ("--group_size 3 4", "'4' belongs to no option"),
        ("--lr -1", "lr must not be negative"),
        ("--config ~no-such-user/x", "no preset ~no-such-user/x"),
        ("--config demo", "did you mean configs/demo.py?"),
        ("--LR 1e-5", "did you mean --lr?"),
        ("--group 4", "did you mean --group_size?"),
        ("--do_group_filter yes", "--do_group_filter is 'yes': give one of 0, 1, true, false"),
        ("--sharding grpo", "--config configs/grpo.py is a preset"),
        ("--greedy 0 --sharding fsdp", "--greedy 0 contradicts --sharding fsdp: remove one of them"),
        ("--greedy yes", "greedy must be one of 0, 1"),
        ("--greedy --lr 1", "--greedy needs a value"),
    ],
)
@both
def test_mistakes_end_with_one_sentence(settings, line, words, capsys):
    assert words in mistake(line, capsys, settings)


def test_presets_of_papers_have_no_entropy_bonus():
    presets = {file.stem: file.read_text() for file in (ROOT / "configs").glob("*.py")}
    objectives = {name for name, text in presets.items() if '"objective": ' in text}
    assert len(objectives) == 17
    for name in objectives:
        config = parse(grpo.Config, ["--config", f"configs/{name}.py"])
        assert (config.objective.policy.entropy_coef > 0) == (name == "ppo"), name


def test_one_chip_is_set_up_for_the_device_that_is_found(monkeypatch, capsys):
    """For each that its table names; others are refused. A preset joins the job once."""
    # The preset sets the variable for the whole process: it is put back.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    line = "--config configs/one_chip.py"
    assert mistake(line, capsys, grpo.Config).startswith(
        "error: configs/one_chip.py is for Tesla T4, NVIDIA L4, TPU v5 lite, TPU v6 lite, and this is cpu: "
    )
    chips = runpy.run_path(str(ROOT / "configs/one_chip.py"))["CHIPS"]
    for kind, remat in chips.items():
        # A device that is not here.
        monkeypatch.setattr(startup, "find_devices", lambda kind=kind: [SimpleNamespace(device_kind=kind)])
        assert read(line, grpo.Config).memory.remat == remat
        assert kind in PEAKS
    joined = []
    # One process of a job, which this test has not.
    monkeypatch.setattr(jax.distributed, "initialize", lambda **settings: joined.append(settings))
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    startup.join_processes.cache_clear()
    read(line, grpo.Config), startup.join_devices()
    startup.join_processes.cache_clear()
    assert len(joined) == 1


@pytest.mark.parametrize("command", [grpo.Config, eval.EvalCommand, sampling.SamplingCommand])
def test_numbers_that_no_array_holds_are_refused_by_name(command, capsys):
    """All options times NaN, infinity, what float32 rounds to either or to 0, and seeds that JAX takes for others."""
    hostile = {float: ["nan", "inf", "-1e39", "1e-40"], int: [2**31, -(2**31), 2**32, 2**64, "9" * 5000]}
    cases = [(known.name, x) for known in options_of(command).values() for x in hostile.get(known.type, [])]
    assert len(cases) >= 50
    for name, value in cases:
        assert f"--{name}" in mistake(f"--{name}={value}", capsys, command)
    assert make_config(command, seed=2**31 - 1, temperature=1e-30)
    with pytest.raises(UserError, match="--seed must be of type int, and is a float"):
        make_config(command, seed=1.0)


def test_numbers_of_environments_are_those_of_options():
    for text in ("nan", "inf", "1e39", "1e-40", str(2**64), "9" * 5000):
        with pytest.raises(UserError, match="--env_options: call_cost is"):
            EnvConfig("calculator", f"call_cost={text}").options("calculator")
    with pytest.raises(UserError, match="--test_env_name: num_generation_tokens is"):
        limits = HeldOutConfig(f"calculator(num_generation_tokens={2**40})")
        resolve_environments(EnvConfig("calculator"), limits, SamplingConfig())


LINES = {  # of a preset, and the words of its sentence
    "a.yaml": [
        ("lr: " + "[" * 10**5, "a.yaml is not YAML"),
        ("lr: !!python/object/apply:os.system ['true']", "line 1"),
        ("group_sise: 3", "did you mean --group_size"),
        ("ckpt_dir: 3", "quotes"),
        ("- lr", "names and values"),
        ("config: other.yaml", "no option config"),
        ("greedy: maybe", "greedy must be one of 0, 1"),
        ("do_group_filter: [1]", "type bool"),
        (b"lr: 1\xff", "not UTF-8"),
    ],
    "a.py": [
        ("def get_config(:", "a.py, line 1: SyntaxError"),
        ("\n\nimport no_such_module", "a.py, line 3: ModuleNotFoundError"),
        ("def get_config():\n    return {}['lr']", "a.py, line 2: KeyError: 'lr'"),
        ("def get_config(x):\n    return {}", "a.py: TypeError"),
        ("get_config = 1", "a.py defines no get_config(): write def get_config(): "),
        ("def get_config():\n    return [1]", "names and values"),
    ],
}


@pytest.mark.parametrize(("name", "text", "words"), [(name, *case) for name, cases in LINES.items() for case in cases])
def test_a_preset_that_is_wrong_is_one_sentence(name, text, words, tmp_path, capsys):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    message = mistake(f"--config {tmp_path / name}", capsys)
    assert words in message
    assert str(tmp_path / name) in message
    assert len(message) < 500


def help_text(line: str, capsys, settings: type) -> str:
    with pytest.raises(SystemExit) as end:
        read(line, settings)
    assert end.value.code == 0
    return capsys.readouterr().out


@both
def test_help_describes_common_options_and_names_others(settings, capsys):
    text = help_text("--help", capsys, settings)
    assert "\n  --group_size int = 8\n" in text
    assert "\n  The training loop: --lr --do_group_filter --ckpt_dir\n" in text
    described = {name for name in options_of(settings) if f"\n  --{name} " in text}
    assert described == {"group_size"}
    assert "spellings" not in text


def test_help_shows_the_values_of_a_command(tmp_path, capsys):
    (tmp_path / "low.yaml").write_text("lr: 0.5")
    implied = lambda options: {"sharding": "fsdp", "lr": 3.0}  # noqa: E731
    with pytest.raises(SystemExit, match="^0$"):
        read(f"--ckpt_dir all --help all --config {tmp_path / 'low.yaml'} --group_size=3", implied=implied)
    text = capsys.readouterr().out
    texts = "ckpt_dir str = 'all'", "sharding str = 'fsdp'"
    for shown in ("lr float = 0.5", "group_size int = 3", "temperature float = 1.0", *texts):
        assert f"\n  --{shown}\n" in text


@both
@pytest.mark.parametrize("line", ["--help all", "--help=all", "--helpfull"])
def test_help_lists_each_option_once_under_its_class(settings, line, capsys):
    text = help_text(line, capsys, settings)
    order = [
        "Trains.",
        "Options needed most often",
        "--group_size int = 8",
        "The training",
        "--lr float = 1e-06",
        "How replies",
        "--temperature",
        "--sharding str = 'dp'",
        "kvfrans/lmpo's spellings",
        "--greedy",
        "Presets in configs/",
        "--config configs/rloo.py",
        "each completion against the mean of the others",
    ]
    assert [text.index(word) for word in order] == sorted(text.index(word) for word in order)
    assert all(text.count(f"\n  --{name} ") == 1 for name in options_of(settings))
    assert "of the parameters [dp | fsdp]" in text, "a new default keeps the help and the choices"


# Flags of another program


@both
def test_spellings_are_rewritten_and_leave_no_trace(settings, tmp_path):
    assert read("--greedy 1", settings) == make_config(settings, sharding="fsdp")
    assert read("--greedy 1 --sharding fsdp", settings) == make_config(settings, sharding="fsdp")
    assert "greedy" not in to_dict(read("--greedy 0", settings))
    (tmp_path / "old.yaml").write_text("greedy: 1")
    found = read(f"--config {tmp_path / 'old.yaml'}", settings)
    assert found == make_config(settings, sharding="fsdp")
    (tmp_path / "old.json").write_text('{"greedy": "", "lr": 1}')  # config.json of an old run
    assert read(f"--config {tmp_path / 'old.json'}", settings) == make_config(settings, lr=1.0)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("--num_samples 0", sampling.SamplingCommand),
        ("--port 0", PageCommand),
        ("--port 65536", PageCommand),
        ("--rollouts=", ReplayCommand),
    ],
)
def test_a_chat_has_samples_and_a_port(line, command, capsys):
    assert line.split()[-2 if " " in line else 0].rstrip("=") in mistake(line, capsys, command)


def test_lmpos_flags_are_options_of_training():
    options = options_of(grpo.Config)
    assert not LMPO.keys() & options.keys()
    for flag, (target, *values) in LMPO.items():
        for switch, value in zip("10", values, strict=True):
            config = parse(grpo.Config, [f"--{flag}", switch], spellings=LMPO)
            assert to_dict(config)[target] == (options[target].default if value is None else value)


@pytest.mark.parametrize(("config", "num_defaults"), [(grpo.Config, 20), (DPOConfig, 4)])
def test_page_for_users_of_trl_names_options_with_their_defaults(config, num_defaults):
    page = (ROOT / "docs/from_trl.md").read_text(encoding="utf-8")
    (of_pairs,) = re.findall(r"^## Preferences\n.*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    page = of_pairs if config is DPOConfig else page.replace(of_pairs, "")
    options = options_of(config)
    assert set(re.findall(r"--(\w+)", page)) <= options.keys() | {"config"}
    defaults = dict(re.findall(r"`--(\w+)` \(`?([^`)]+)`?\)", page))
    data = ["--data=pairs.jsonl"] * (config is DPOConfig)
    values = to_dict(parse(config, [*data, *(f"--{name}={value}" for name, value in defaults.items())]))
    assert len(defaults) > num_defaults
    found = {name: values[name] for name in defaults}
    assert found == {name: options[name].default for name in defaults}
    for name, value in re.findall(r"`--(\w+) (\w+)`", page):
        assert value in options[name].choices


def test_ctrl_c_ends_a_command_in_one_line(capsys):
    with pytest.raises(SystemExit) as end, user_errors():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C\n"


def test_missing_file_is_named_without_the_error_number(capsys, tmp_path):
    with pytest.raises(SystemExit) as end, user_errors():
        sampling.read_prompts(str(tmp_path / "x.jsonl"))
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/x.jsonl: No such file or directory\n"


def test_passwords_in_addresses_are_hidden():
    addresses = {
        "http://me:pa/ss@host:5000/x": "http://me:***@host:5000/x",
        "postgresql://u:p@ss@h/db": "postgresql://u:***@h/db",
        "path=x,url=https://:tok@h/,y=a@b": "path=x,url=https://:***@h/,y=a@b",
        "https://h/x?token=abc&y=1": "https://h/x?token=***&y=1",
    }
    assert {address: hide_passwords(address) for address in addresses} == addresses
    plain = ["http://host:5000/a@b", "sqlite:///m.db", "models/tiny", "user@host:x", 5, None]
    assert [hide_passwords(value) for value in plain] == plain
