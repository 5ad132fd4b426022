"""The table of environments. To add one: write envs/yours.py with a subclass of Env, and a line below."""

import contextlib
import dataclasses
import importlib
import inspect
import re

from envs.base import Env
from envs.style import Style, Styled
from utils.settings.arguments import Value
from utils.settings.checks import check_number
from utils.settings.errors import UserError, most_similar

Options = dict[str, Value]

REWARDS = {"reward": "", "reward_weights": ""}  # options of every environment of one turn
STYLE = {field.name: field.default for field in dataclasses.fields(Style)}  # of every environment
REGRADED = "regraded"  # option that --test_env_name sets: environments that grade the same replies
HELD_OUT = ("test", "valid")  # splits besides "train"; they end the names of environments
# name: (module, class, options set by the name). A module is imported only when its environment is made, so grading
# libraries are needed only if they are used. Each name also exists with "-test", for its held-out problems, and with
# "-valid" if the class has such a split, for choosing checkpoints or settings by score.
ENVS = {
    "countdown": ("envs.countdown", "Countdown", {}),
    "countdown3": ("envs.countdown", "Countdown", {"numbers": 3}),
    "countdown6": ("envs.countdown", "Countdown", {"numbers": 6}),
    "countdown34": ("recipes.games.countdown_data", "CountdownData", {}),
    "poem": ("envs.poem", "Poem", {}),
    "gsm8k": ("envs.gsm8k", "Gsm8k", {}),
    "deepscaler": ("envs.mathematics", "Mathematics", {"data_set": "deepscaler"}),
    "aime": ("envs.mathematics", "Mathematics", {"data_set": "aime"}),
    "aime25": ("envs.mathematics", "Mathematics", {"data_set": "aime25"}),
    "amc": ("envs.mathematics", "Mathematics", {"data_set": "amc"}),
    "amc23": ("envs.mathematics", "Mathematics", {"data_set": "amc23"}),
    "math500": ("envs.mathematics", "Mathematics", {"data_set": "math500"}),
    "guess": ("recipes.games.guess", "Guess", {}),
    "tictactoe": ("recipes.games.tictactoe", "TicTacToe", {}),
    "gridworld": ("recipes.games.gridworld", "Gridworld", {}),
    "wordle": ("recipes.games.wordle", "Wordle", {}),
    "calculator": ("recipes.games.calculator", "Calculator", {}),
    "python": ("recipes.python_tool.python_tool", "Python", {}),
    "search": ("recipes.search.search", "Search", {}),
    "reasoning_gym": ("recipes.reasoning_gym.reasoning", "ReasoningGym", {}),
    "dataset": ("envs.own.dataset", "Dataset", {}),
    "agent": ("recipes.agents.agent", "Agent", {}),
}


def make_env(name: str, **options: Value) -> Env:
    """Returns the environment of this name, in any case, with options of its constructor, `Style` and REWARDS.

    "X-test" and "X-valid" are the held-out splits of X. Raises: UserError for an unknown name or option.
    """
    base_name, split = split_name(name)
    env_class, preset = find_class(name)
    if split not in env_class.splits:
        raise UserError(
            f"environment {base_name} has no -{split}: choose one of its splits, {', '.join(env_class.splits)}"
        )
    regraded = parse_environments(str(options.pop(REGRADED, "")))
    own = own_options(name)
    check_options(base_name, options, own | STYLE | REWARDS)
    env = env_class(split=split, **preset | {key: x for key, x in options.items() if key in own})
    if env.tokens_per_turn < 0:
        raise UserError(
            f"environment {base_name} needs tokens_per_turn >= 0: raise it, or give 0 for no limit of its own"
        )
    if rewards := {key: x for key, x in options.items() if key in REWARDS.keys() - own}:
        from envs.own.functions import with_rewards

        env = with_rewards(env, base_name, **rewards)
    if regraded:
        from envs.regraded import Regraded

        env = Regraded(env, {label: make_env(name, **options | given) for label, (_, given) in regraded.items()})
    style = {key: x for key, x in options.items() if key in STYLE}
    return Styled(env, Style(**style)) if style else env


def find_class(name: str) -> tuple[type[Env], Options]:
    """Returns the class of an environment and the options that its name sets. Raises UserError for an unknown name."""
    base_name, _ = split_name(name)
    if base_name not in ENVS:
        held_out = [f"{known}-{split}" for known in ENVS for split in HELD_OUT]
        close = most_similar(base_name, [*ENVS, *held_out])
        hint = f" (did you mean {close}?)" if close else ""
        every = ", ".join(ENVS)
        raise UserError(f"there is no environment {base_name!r}{hint}: choose one of {every}, each also with -test")
    module, class_name, preset = ENVS[base_name]
    return getattr(importlib.import_module(module), class_name), preset


def split_name(name: str) -> tuple[str, str]:
    """Returns the environment and the split that a name stands for: "X-test" is the test split of x."""
    base_name, dash, split = name.lower().rpartition("-")
    return (base_name, split) if dash and split in HELD_OUT else (name.lower(), "train")


def test_name(name: str) -> str:
    """Returns the name of an environment's test split; its own name if that is held out already."""
    base_name, split = split_name(name)
    return f"{base_name}-{split if split in HELD_OUT else 'test'}"


def option_names(name: str) -> set[str]:
    """Returns the options that an environment takes. Raises UserError for an unknown name."""
    return {*own_options(name), *STYLE, *REWARDS}


def own_options(name: str) -> Options:
    """Returns the options of an environment's own constructor, with defaults. Raises UserError for an unknown name."""
    env_class, _ = find_class(name)
    return {key: x.default for key, x in inspect.signature(env_class).parameters.items() if key != "split"}


def parse_environments(text: str, flag: str = "--test_env_name") -> dict[str, tuple[str, Options]]:
    """Returns names and options by label: "gsm8k(form=any), aime" has the labels "gsm8k(form=any)" and "aime"."""
    found = {}
    for label in filter(None, map(str.strip, re.split(r",(?![^()]*\))", text))):
        match = re.fullmatch(r"([\w-]+)(?:\((.*)\))?", label)
        if not match:
            raise UserError(f"{flag}: {label!r} is not an environment: give NAME or NAME(option=value)")
        if label in found:
            raise UserError(f"{flag} has {label} twice: remove one")
        found[label] = match[1], parse_options(match[2] or "", flag)
    return found


def parse_options(text: str, flag: str = "--env_options") -> Options:
    """Returns options of a command line: "numbers=3,prompt=bare" gives {"numbers": 3, "prompt": "bare"}."""
    options: Options = {}
    for item in filter(None, map(str.strip, text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise UserError(f"{flag} {text!r}: {item!r} is not name=value, as in numbers=3,prompt=bare")
        if key in options:
            raise UserError(f"{flag} {text!r} has {key} twice: remove one")
        options[key] = parse_value(value)
        if type(options[key]) in (int, float):
            check_number(f"{flag}: {key}", options[key])
    return options


def parse_value(text: str) -> Value:
    """Returns an int, a float or a bool (true, false), the first that the text can be read as; otherwise the text."""
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def check_options(name: str, options: Options, defaults: Options) -> None:
    """Raises UserError for an option that has no default, and for a value that is not of its default's type."""
    for key, value in options.items():
        if key not in defaults:
            close = most_similar(key, defaults)
            hint = f" (did you mean {close}?)" if close else ""
            raise UserError(f"environment {name} has no option {key!r}{hint}: choose one of {', '.join(defaults)}")
        expected = type(defaults[key])
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise UserError(
                f"environment {name}: option {key} takes {expected.__name__}, not {value!r}: correct the value"
            )
