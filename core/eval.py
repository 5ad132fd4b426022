"""Scores checkpoints on environments; several checkpoints on several environments become a table.

    python core/eval.py --model_dir runs/countdown/step60    # on the environment, and with the sampling, of the run
    python core/eval.py --env_name aime,math500 --model_dir Qwen/Qwen3-1.7B,runs/deepscaler --num_eval_samples 16
"""

import gc
import shlex
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.rollout import evaluate, make_worker
from core.run.rollouts import write_samples
from core.sampler import SamplingConfig
from envs import split_name, test_name
from envs.base import DIALECTS, Env, Problem, Reply
from envs.prompts import Encode, prompt_lengths
from envs.scoring.shaping import RewardConfig
from envs.settings import (
    EnvConfig,
    RolloutSettings,
    also_evaluated,
    as_held_out,
    check_code,
    check_files,
    resolve_settings,
)
from models.checkpoint import find_checkpoints, find_local, load_model
from models.memory import sampling_room
from models.messages import tool_schema
from utils.devices.sharding import Layout
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.evaluation.tables import Result, check_writable, write_results
from utils.metrics.logger import printable
from utils.runs.origin import read_settings
from utils.settings.arguments import Value
from utils.settings.config import changed_options, options_of, parse, to_dict
from utils.settings.errors import SET_BY, describe_error, shorten, user_errors
from utils.settings.groups import ComputeConfig, EvalConfig
from utils.settings.options import group, option
from utils.settings.presets import demo_of_tiny

SHOWN_LENGTH = 1 << 14  # tokens of a prompt that --show prints, whatever --prompt_length is
# Arguments of example calls, by the types of JSON's schema; "1" of all others, which is also an expression, and code.
ARGUMENTS = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True)
class OutputConfig:
    """Model and output."""

    model_dir: str = option(
        "models/tiny",
        "Models to evaluate, separated by commas: Hugging Face folders, hub ids or run folders (all their steps)",
        essential=True,
    )
    json: str = option(
        "", "File for the scores: one JSON object, or a list of them for several checkpoints; empty: not written"
    )
    save_samples: str = option("", "JSONL file for prompts and completions, one object per problem; empty: not written")
    show: int = option(
        0, "Print this many problems with the rewards of example replies, instead of evaluating; 0: evaluate"
    )
    seed: int = option(0, "Seed of sampling")


@dataclass(frozen=True)
class EvalCommand:
    """Evaluation of checkpoints."""

    output: OutputConfig = group(OutputConfig)
    env: EnvConfig = group(EnvConfig)
    eval: EvalConfig = group(EvalConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    rewards: RewardConfig = group(RewardConfig)
    compute: ComputeConfig = group(ComputeConfig)
    devices: DeviceConfig = group(DeviceConfig)


def parse_command(argv: Sequence[str]) -> EvalCommand:
    """Returns the settings of a command line; the defaults are the settings of the run that is evaluated."""
    aliases = {"ckpt_dir": "model_dir", "num_epochs": "num_eval_samples"}
    return parse(EvalCommand, argv, __doc__, aliases, implied=settings_of_run)


def settings_of_run(options: Mapping[str, Value]) -> dict[str, Value]:
    """Returns environment and sampling of the run that is evaluated, unless the options name other environments.

    For models/tiny they are the demo's. Settings that do not change results, such as rows per call, are not taken over.
    Raises: UserError for one that runs code and that the options do not name.
    """
    run, trained = find_run(str(options.get("model_dir", "")))
    if not trained:
        trained = demo_of_tiny(options)
    others = trained.keys() - options_of(EvalCommand).keys()  # such as test_env_options: only the run can have set them
    name_source(run, others)
    trained = as_held_out(trained)
    env_name = str(trained.get("env_name", ""))
    if not env_name or split_name(str(options.get("env_name", env_name)))[0] != split_name(env_name)[0]:
        return {}
    fields = options_of(EvalCommand).values()
    env = {field.name for field in fields if field.group == "env"}
    sampling = {field.name for field in fields if field.group == "sampling" and not field.resumable}
    inherited = {name: x for name, x in trained.items() if name in env | sampling}
    taken = {name: value for name, value in inherited.items() if name not in options}
    check_code(f"{run}/config.json", taken)
    name_source(run, taken)
    return inherited


def find_run(model_dir: str) -> tuple[str, dict[str, Value]]:
    """Returns the folder and the settings of the first run that one of the models is of; both empty without any.

    The config.json of a run records its origin, and the run holds the model. Raises: UserError if that file is damaged.
    """
    folders = filter(None, [find_local(name.strip()) for name in model_dir.split(",")])
    for path in [path for folder in folders for path in (folder, folder.absolute().parent)]:
        if (path / "best").is_dir() or any(path.glob("step*/")):
            settings, origin = read_settings(path / "config.json")
            if "env_name" in settings and origin:
                return str(path), settings
    return "", {}


def name_source(run: str, names: Iterable[str]) -> None:
    """Registers the run's file as the source of these settings, for errors about them."""
    if run:
        SET_BY.update(dict.fromkeys(names, f"{run}/config.json"))


def inheritance_note(config: EvalCommand) -> str:
    """Returns a line with the settings that are taken from the run that is evaluated and differ from defaults."""
    options = to_dict(config)
    changed = changed_options(EvalCommand, options)
    trained = settings_of_run(options)
    same = {name: x for name, x in trained.items() if name in changed and x == options[name]}
    words = [word for name, x in same.items() for word in (f"--{name}", str(x))]
    return f"as in {find_run(config.output.model_dir)[0]}: {shlex.join(words)}" if words else ""


def evaluate_checkpoint(
    config: EvalCommand, name: str, folder: Path, environments: list[RolloutSettings], layout: Layout
) -> list[Result]:
    """Returns a checkpoint's results on each environment; with --show, prints problems instead."""
    model, params, tokenizer = load_model(folder, layout, **config.compute.arguments, param_dtype=config.compute.dtype)
    sampling, results = config.sampling, []
    if config.output.show:
        sampling = replace(sampling, prompt_length=max(sampling.prompt_length, SHOWN_LENGTH))
    for settings in environments:
        with make_worker(settings, sampling, config.rewards, model, tokenizer, layout) as worker:
            num_rows = worker.num_eval_tasks(config.eval.num_eval_tasks) * config.eval.num_eval_samples
            room = sampling_room(model, layout, params, worker.row_length, config.devices.rollout_tp)
            worker = worker.with_room(room, num_rows)  # noqa: PLW2901
            if layout.is_main:
                for note in worker.notes:
                    print(note, flush=True)
            if config.output.show:
                print(show(worker.env, worker.encode, tokenizer.hf.decode, config.output.show))
                continue
            num_samples = config.eval.num_eval_samples
            metrics, episodes, estimates = evaluate(
                worker, params, config.eval.num_eval_tasks, num_samples, config.output.seed
            )
        result = Result(
            model_dir=name,
            env_name=settings.label,
            metrics=metrics,
            ids=episodes.task_ids[::num_samples],
            by_task=estimates,
        )
        results.append(result)
        if layout.is_main:
            print(result.format_metrics(config.sampling.temperature), flush=True)
        if layout.is_main and config.output.save_samples:
            write_samples(config.output.save_samples, result, worker, episodes)
    return results


def show(env: Env, encode: Encode, decode: Callable[[list[int]], str], count: int) -> str:
    """Returns the first `count` problems with the scores of example replies, and quantiles of prompt lengths in tokens.

    `decode` also shows special tokens. Control characters in the data are dropped, since a terminal obeys them.
    """
    lines = ["no model is run: these are problems, and example replies with their scores"]
    lines += [env.note] if env.note else []
    for index in range(min(count, env.num_tasks)):
        problem = env.problem(index)
        lines.append(f"======== problem {index}")
        lines.append(decode(encode(opened(env, problem))))
        lines.append(f"-------- reference {shorten(problem.answer)}")
        lines += [format_example(env, problem, "call", call) for call in example_calls(env, problem)]
        replies = {**env.examples(problem), "empty": ""}
        lines += [format_example(env, problem, name, Reply(text)) for name, text in replies.items()]
    lengths = prompt_lengths(env, encode)
    quantiles = []
    for percent in (5, 50, 95, 99):
        quantile = np.percentile(lengths, percent)
        quantiles.append(f"{percent}% {int(quantile)}")
    summary = f"tokens: {', '.join(quantiles)}, longest {max(lengths)}"
    lines.append(f"======== prompts: {env.num_tasks:,}; {summary}")
    text = "\n".join(lines)
    return printable(text, max_chars=len(text))


def example_calls(env: Env, problem: Problem) -> list[Reply]:
    """Returns an example call of each announced tool, with the required arguments of its schema."""
    calls = []
    for tool in problem.tools if env.dialect else ():  # tools without a dialect are shown only
        function = tool_schema(tool)["function"]
        schema = function["parameters"]
        arguments = {name: example_argument(schema["properties"][name]) for name in schema.get("required", [])}
        call = json.dumps({"name": function["name"], "arguments": arguments})
        dialect = DIALECTS[env.dialect]
        calls.append(Reply(dialect.opening + call + dialect.closing, (call,)))
    return calls


def example_argument(schema: Mapping[str, object]) -> object:
    """Returns a value of an argument: the first allowed value, or one of its type."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    return ARGUMENTS.get(kind[0] if isinstance(kind, list) else kind, "1")


def opened(env: Env, problem: Problem) -> Problem:
    """Returns a problem with the opening of its episodes."""
    if not env.opens:
        return problem
    episode = env.episode(problem, seed=0)
    episode.close()
    return replace(problem, messages=list(episode.opening))


def format_example(env: Env, problem: Problem, name: str, reply: Reply) -> str:
    """Returns a reply and its scores, on two lines."""
    text = problem.prefix + reply.text.removeprefix(problem.prefix)
    try:
        outcome = describe_outcome(env, problem, reply._replace(text=text))
    except Exception as error:  # raised by a reward or a class of the user
        outcome = f"fails: {describe_error(error)}"
    indent = " " * 10
    return f"{name:>10} {shorten(reply.text)}\n{indent} {outcome}"


def describe_outcome(env: Env, problem: Problem, reply: Reply) -> str:
    """Returns a line: the scores of a reply, or what the environment answers to it as a first turn."""
    if env.max_turns == 1:
        return describe_scores(env.score(problem, reply.text))
    episode = env.episode(problem, seed=0)
    step = episode.act(reply)
    episode.close()
    said = "the end" if step.done else " / ".join(message["content"] for message in step.messages)
    return f"{describe_scores({'reward': step.reward, **step.info})}: {shorten(said)}"


def describe_scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in scores.items())


def resolve_test_environments(config: EvalCommand) -> list[RolloutSettings]:
    """Returns how the test split of each environment of --env_name and --also_eval is played."""
    names = dict.fromkeys(test_name(name.strip()) for name in config.env.env_name.split(","))
    check_files(config.env, names)
    num_tokens, force_answer_at = config.sampling.num_generation_tokens, config.sampling.force_answer_at
    environments = [
        resolve_settings(replace(config.env, env_name=name), name, num_tokens, force_answer_at) for name in names
    ]
    return also_evaluated(config.env, environments, config.eval.also_eval, num_tokens, force_answer_at)


def training_note(folder: Path, env: EnvConfig) -> str:
    """Returns the --env_options of the run that saved a checkpoint if they differ for this environment, or no text."""
    trained, _ = read_settings(folder.parent / "config.json")
    names = {split_name(name.strip())[0] for name in env.env_name.split(",")}
    is_other_env = split_name(str(trained.get("env_name", "")))[0] not in names
    options = trained.get("env_options", "")
    if is_other_env or options == env.env_options:
        return ""
    return f"{folder.parent} was trained with --env_options {options!r}, which differ from those of this evaluation"


def main(config: EvalCommand) -> None:
    layout = make_layout(config.devices, config.output.model_dir)
    environments = resolve_test_environments(config)
    names = config.output.model_dir.split(",")
    checkpoints = [checkpoint for name in names for checkpoint in find_checkpoints(name)]
    if layout.is_main:
        check_writable(config.output.json, config.output.save_samples)
        notes = dict.fromkeys(training_note(folder, config.env) for _, folder in checkpoints)
        lines = [inheritance_note(config), *(settings.describe() for settings in environments), *notes]
        print("\n".join(filter(None, lines)), flush=True)
    if config.output.show:
        checkpoints = checkpoints[:1]
    results = []
    for name, folder in checkpoints:
        results += evaluate_checkpoint(config, name, folder, environments, layout)
    if layout.is_main and results:
        write_results(results, config.output.seed, config.output.json)


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse_command(sys.argv[1:]))
