"""Environments of a run and how each is played: resolved once from settings, environment and training."""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from envs import (
    ENVS,
    REGRADED,
    REWARDS,
    Options,
    make_env,
    option_names,
    own_options,
    parse_environments,
    parse_options,
    split_name,
    test_name,
)
from envs.base import ANSWER_STARTS, Env, ForcedAnswer, shown_form
from utils.settings.arguments import Value
from utils.settings.errors import UserError, shorten
from utils.settings.options import option

LIMITS = ("num_generation_tokens", "force_answer_at")  # options of the sampler that --test_env_name can set, too
INHERITED = ("form", "system", "thinking", "prefix", "plain")  # by a test environment, from training
GRADING = {"form", "partial"}  # options by which the same replies are graded again
CODE = {"reward": "", "episode": "", "agent": "", "sandbox": "on"}  # options that run code: the value that runs none
CODE_INSIDE = re.compile(rf"\b({'|'.join(CODE)})\s*=\s*([^,()]*)")  # such an option in a text of options, nested or not
FILES = ("data_dir", *REWARDS, "episode", "agent")  # flags of environments with such options


@dataclass(frozen=True)
class EnvConfig:
    """Environment."""

    env_name: str = option("poem", f"Environment: {', '.join(ENVS)}", essential=True)
    env_options: str = option(
        "",
        "Options of the environment, as name=value separated by commas, for example numbers=3,max_number=15; an "
        "unknown name lists them all",
        essential=True,
    )
    data_dir: str = option(
        "", "Folder of the environment's data files; empty: the Hugging Face hub or its cache", resumable=True
    )
    reward: str = option(
        "",
        "Reward functions instead of the environment's grader, as FILE.py:FUNCTION separated by commas; the return is "
        "their sum",
    )
    reward_weights: str = option(
        "", "Factors of the functions of --reward in their sum, separated by commas; empty: 1 each"
    )
    episode: str = option(
        "",
        "Class that turns each row of the environment dataset into an episode of several turns, as FILE.py:CLASS: a "
        "class for TRL's environment_factory, or one with reset and step",
    )
    agent: str = option(
        "",
        "Program of the environment agent, which talks to the policy at OPENAI_BASE_URL: a command, or "
        "FILE.py:FUNCTION",
    )

    def __post_init__(self):
        if self.reward_weights and not self.reward:
            raise UserError("--reward_weights has no effect without --reward: name the functions by --reward")

    @staticmethod
    def settle(options: Mapping[str, Value], presets: Mapping[str, str]) -> dict[str, Value]:
        """Returns --env_options of a preset without those that an --env_name above it does not take, and prints which.

        Raises: UserError for options that the preset's own environment does not take, and for code in a config.json.
        """
        for file in sorted({file for file in presets.values() if file and Path(file).suffix != ".py"}):
            check_code(file, {name: value for name, value in options.items() if presets.get(name) == file})
        name, text, preset = options.get("env_name"), options.get("env_options"), presets.get("env_options")
        if not (name and text and preset):
            return {}
        environments = [other for other, _ in parse_environments(str(name), "--env_name").values()]
        names, given = set().union(*map(option_names, environments)), parse_options(str(text))
        written = text_of({key: value for key, value in given.items() if key not in names})
        if not written:
            return {}
        if presets.get("env_name") == preset:
            every = ", ".join(sorted(names))
            raise UserError(f"{preset}: environment {name} has no option for {written}: choose one of {every}")
        print(f"{preset}: --env_options {written} is dropped, because environment {name} has no such option")
        return {"env_options": text_of({key: value for key, value in given.items() if key in names})}

    def options(self, name: str) -> Options:
        """Returns an environment's options; one of another kind inherits style, files, rewards if it has no grader."""
        names = option_names(name)
        flags = {key: getattr(self, key) for key in FILES if key in names and getattr(self, key)}
        options = parse_options(self.env_options) | flags
        if split_name(name)[0] == split_name(self.env_name)[0]:
            return options
        inherited = names & {*INHERITED, *FILES} - (REWARDS.keys() - own_options(name))
        return {key: value for key, value in options.items() if key in inherited}


def text_of(options: Options) -> str:
    """Returns options as a command line has them."""
    return ",".join(f"{name}={value}" for name, value in options.items())


def code_settings(settings: Mapping[str, Value]) -> dict[str, str]:
    """Returns the settings that run code, by an option of an environment inside of them too."""
    found = {}
    for name, text in settings.items():
        options = [(name, text), *CODE_INSIDE.findall(text)] if isinstance(text, str) else []
        if any(value.strip() not in ("", CODE.get(option, value)) for option, value in options):
            found[name] = text
    return found


def check_code(file: str, settings: Mapping[str, Value]) -> None:
    """Raises UserError for the first of the settings in a file that runs code."""
    for name, value in code_settings(settings).items():
        raise UserError(
            f"{file} sets --{name} {value}, which runs code, and only a command may name code: if you trust it, add "
            f"--{name} {shlex.quote(value)}"
        )


def as_held_out(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the settings of a run by which its environment is played on held-out problems."""
    settings = dict(settings)
    if own := settings.pop("test_env_options", ""):  # of an earlier version, as `also_eval`
        settings["test_env_name"] = f"{settings.get('test_env_name', '')}({own})"
    if others := settings.pop("also_eval", ""):
        settings["test_env_name"] = f"{settings.get('test_env_name', '')},{others}"
    tests = parse_environments(str(settings.get("test_env_name", "")))
    name, own = next(iter(tests.values()), ("", {}))
    if not own or split_name(name)[0] != split_name(str(settings.get("env_name", "")))[0]:
        return settings
    limits = {key: own.pop(key) for key in LIMITS if key in own}
    options = parse_options(str(settings.get("env_options", ""))) | own
    return {**settings, **limits, "env_options": text_of(options), "test_env_name": name}


@dataclass(frozen=True)
class HeldOutConfig:
    """Held-out problems."""

    test_env_name: str = option(
        "",
        "Environments of held-out problems, evaluated before, during and after training, separated by commas; X-test: "
        "the test split of X; X-test(numbers=3): with options that differ from --env_options, num_generation_tokens "
        "and force_answer_at too. One that differs from another in form or partial only, as gsm8k(form=any), grades "
        "its replies again. Empty: none",
        essential=True,
    )


@dataclass(frozen=True)
class RolloutSettings:
    """An environment, and how it is played."""

    name: str  # with its split, as countdown-test
    options: Options  # options of the environment
    env: Env = field(compare=False)
    max_new_tokens: int  # completion limit
    force_answer_at: int  # tokens before the limit at which an unfinished reply gets `forced_answer`; 0: never
    forced_answer: ForcedAnswer
    written: str = ""  # with options, as in --test_env_name

    @property
    def label(self) -> str:
        """Returns the name of its scores and data: an environment may be played in several ways."""
        return self.written or self.name

    @property
    def manner(self) -> str:
        """Returns how it is played, in words."""
        problem = self.env.problem(0)
        system = " ".join(system_prompt(problem.messages).split())
        forced = f"{self.forced_answer.start.strip()} forced {self.force_answer_at} tokens before it"
        facts = [
            f"completions of at most {self.max_new_tokens} tokens",
            forced if self.force_answer_at > 0 else "",
            f"form {self.env.form}",
            f"thinking {'on' if problem.thinking else 'off'}",
            f"prefix {problem.prefix!r}" if problem.prefix else "",
            f"system prompt {shorten(system, 60)}" if system else "",
            "no chat template" if problem.plain else "",
            f"graded also as {self.options[REGRADED]}" if REGRADED in self.options else "",
        ]
        return ", ".join(filter(None, facts))


def describe_environments(environments: Collection[RolloutSettings]) -> list[str]:
    """Returns how environments are played, alike ones on a line, and each fact on their rows once."""
    names: dict[str, list[str]] = {}
    for played in environments:
        names.setdefault(played.manner, []).append(played.label)
    lines = [f"{' and '.join(alike)}: {manner}" for manner, alike in names.items()]
    facts: list[str] = []
    for played in environments:
        new = [fact for fact in played.env.note.split("; ") if fact not in facts]
        facts += new
        lines += ["; ".join(new)] * any(new)
    return lines


def system_prompt(messages: Iterable[Mapping[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages if message["role"] == "system")


def resolve_environments(config: EnvConfig, held_out: HeldOutConfig, sampling: Any) -> dict[str, RolloutSettings]:
    """Returns how environments are played, by role: "env" trains, "test_env" and "test_env.LABEL" are held out."""
    training = resolve_settings(config, config.env_name, sampling.num_generation_tokens, sampling.force_answer_at)
    limits = training.max_new_tokens, training.force_answer_at
    environments = {"env": training} | by_role(resolve_held_out(config, held_out.test_env_name, *limits))
    check_files(config, [settings.name for settings in environments.values()])
    for test in environments.values():
        if test.written and test.env.distinct_rows:  # perhaps of another file than --env_options names
            from envs.data.splits import remove_overlap

            if num_seen := remove_overlap(training.env.distinct_rows, test.env.distinct_rows)[1]:
                raise UserError(
                    f"--test_env_name {test.label} has problems of {num_seen:,} rows that are trained on: remove these "
                    "rows, or give its test_path in --env_options, which removes them"
                )
    return environments


def by_role(environments: Iterable[RolloutSettings]) -> dict[str, RolloutSettings]:
    """Returns held-out environments by role: "test_env" is the first, another one "test_env.LABEL"."""
    return {f"test_env.{x.label}" if i else "test_env": x for i, x in enumerate(environments)}


def resolve_held_out(
    config: EnvConfig, text: str, num_generation_tokens: int, force_answer_at: int, is_inherited: bool = True
) -> list[RolloutSettings]:
    """Returns how the environments of a list such as "gsm8k-test,gsm8k(form=any)" are played.

    One without a split has that of an environment of its name before it, or the test split. If it differs from that one
    in GRADING only, each reply is graded in both ways. is_inherited: the list is --test_env_name, with limits of
    training; if not, it is --env_name. Raises: UserError.
    """
    flag, played = "--test_env_name" if is_inherited else "--env_name", []
    for label, (name, own) in parse_environments(text, flag).items():
        base_name, split = split_name(name)
        known = {split_name(other.name)[0]: other.name for other in played}
        name = known.get(base_name, test_name(name)) if split == "train" else test_name(name)
        same = next((i for i, other in enumerate(played) if other.name == name), None)
        training = config if is_inherited else replace(config, env_name=name)
        try:
            if same is not None and played[same].env.max_turns == 1 and GRADING.issuperset(own):
                played[same] = regraded(played[same], own, label)
                continue
            settings = resolve_settings(training, name, num_generation_tokens, force_answer_at, own, is_inherited)
        except UserError as error:
            raise UserError(f"{flag} {label}: {error}" if own else str(error)) from error
        played.append(replace(settings, written=label if own else ""))
    return played


def resolve_settings(
    config: EnvConfig,
    name: str,
    num_generation_tokens: int,
    force_answer_at: int,
    overrides: Options = MappingProxyType({}),
    is_inherited: bool = False,
) -> RolloutSettings:
    """Returns how an environment is played; `overrides`: own options and LIMITS; `is_inherited`: limits of training."""
    for key in LIMITS:
        if type(overrides.get(key, 0)) is not int:
            raise UserError(f"{key} is a number of tokens, not {overrides[key]!r}: give an integer")
    options = config.options(name) | {key: value for key, value in overrides.items() if key not in LIMITS}
    env = make_env(name, **options)
    limit = overrides.get("num_generation_tokens", num_generation_tokens)
    limit = env.tokens_per_action if limit < 0 else limit
    answer = forced_answer(env)
    force = overrides.get("force_answer_at", force_answer_at)
    is_requested = force > 0 and (not is_inherited or "force_answer_at" in overrides)
    if is_requested and not answer.start:
        raise UserError(
            f"--force_answer_at {force}: the prompts of {name} do not ask for an answer in a fixed form, so none can "
            "be forced: leave the option out"
        )
    force = env.force_answer_at if force < 0 else force
    if not is_requested and not (answer.start and 0 < force < limit):
        force = 0
    return RolloutSettings(name, options, env, limit, force, answer)


def regraded(settings: RolloutSettings, own: Options, label: str) -> RolloutSettings:
    """Returns an environment that grades each reply by other options, too. Raises UserError if they are its own."""
    if own.items() <= settings.options.items():
        raise UserError(f"{settings.name} is already graded this way: name another form, or remove it")
    labels = ",".join(filter(None, [str(settings.options.get(REGRADED, "")), label]))
    options = settings.options | {REGRADED: labels}
    return replace(settings, options=options, env=make_env(settings.name, **options))


def forced_answer(env: Env) -> ForcedAnswer:
    """Returns the beginning of an answer in the environment's form, or in that of its prompts; may be empty."""
    signs = {form: start.strip(" {") for form, start in ANSWER_STARTS.items()}
    if env.form in ANSWER_STARTS:
        return ForcedAnswer(ANSWER_STARTS[env.form], (signs[env.form],))
    form = shown_form(env.problem(0).messages)
    return ForcedAnswer(ANSWER_STARTS.get(form, ""), tuple(signs.values()))


def check_files(config: EnvConfig, names: Iterable[str]) -> None:
    """Raises UserError for a flag of FILES that none of the environments takes."""
    for flag in FILES:
        if getattr(config, flag) and not any(flag in option_names(name) for name in names):
            named = ", ".join(names) or "an empty --env_name"
            remedy = ", or give --env_name dataset" if flag in CODE else ""
            raise UserError(f"--{flag} {getattr(config, flag)}: no environment of {named} takes it: remove it{remedy}")
