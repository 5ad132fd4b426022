"""Scores checkpoints on environments; several checkpoints on several environments become a table.

    python core/eval.py --model_dir runs/countdown/step60    # on the environment, and with the sampling, of the run
    python core/eval.py --env_name aime,math500 --model_dir Qwen/Qwen3-1.7B,runs/deepscaler --num_eval_samples 16

A list of --env_name may have options in parentheses: gsm8k,gsm8k(form=any) grades each reply in two ways.
"""

import gc
import os
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

from core.records import Episodes
from core.rollout import RolloutWorker, evaluate, make_worker
from core.sampler import SamplingConfig
from envs import parse_environments, split_name
from envs.base import DIALECTS, Env, Problem, Reply
from envs.prompts import Encode, prompt_lengths
from envs.scoring.shaping import RewardConfig
from envs.settings import (
    EnvConfig,
    RolloutSettings,
    as_held_out,
    check_code,
    check_files,
    resolve_held_out,
)
from models.checkpoint import find_checkpoints, find_local, load_model
from models.memory import sampling_room
from models.messages import tool_schema
from utils.devices.sharding import Layout
from utils.devices.startup import DeviceConfig, ending_together, make_layout
from utils.evaluation.tables import Result, check_writable, write_results
from utils.metrics.jsonl import JSON, json_value
from utils.metrics.logger import printable
from utils.runs.origin import read_settings
from utils.settings.arguments import Value
from utils.settings.config import changed_options, options_of, parse, to_dict
from utils.settings.errors import SET_BY, UserError, describe_error, shorten, user_errors
from utils.settings.groups import ComputeConfig, EvalConfig, ModelConfig
from utils.settings.options import group, option
from utils.settings.presets import demo_of_tiny

SHOWN_LENGTH = 1 << 14  # tokens of a prompt that --show prints, whatever --prompt_length is
# Arguments of example calls, by the types of JSON's schema; "1" of all others, which is also an expression, and code.
ARGUMENTS = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True)
class OutputConfig(ModelConfig):
    """Output."""

    json: str = option(
        "", "File for the scores: one JSON object, or a list of them for several checkpoints; empty: not written"
    )
    save_samples: str = option("", "JSONL file for prompts and completions, one object per problem; empty: not written")
    show: int = option(
        0, "Print this many problems with the rewards of example replies, instead of evaluating; 0: evaluate"
    )


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

    For models/tiny they are the demo's. Settings that do not change results, such as rows per call, are not inherited.
    Raises: UserError for one that runs code and that the options do not name.
    """
    run, trained = find_run(str(options.get("model_dir", "")))
    trained, known = trained or demo_of_tiny(options), options_of(EvalCommand)
    name_source(run, {"test_env_name", *trained} - known.keys())  # only the run can have set them
    trained = as_held_out(trained)
    trained_on = str(trained.get("env_name", ""))
    played = parse_environments(str(options.get("env_name", trained_on)), "--env_name").values()
    if not trained_on or {split_name(name)[0] for name, _ in played} != {split_name(trained_on)[0]}:
        return {}
    groups = {name: field.group for name, field in known.items() if field.group == "env" or not field.resumable}
    inherited = {name: x for name, x in trained.items() if groups.get(name) in ("env", "sampling")}
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
    changed, trained = changed_options(EvalCommand, options), settings_of_run(options)
    same = [name for name, x in trained.items() if name in changed and x == options[name]]
    words = [word for name in same for word in (f"--{name}", str(options[name]))]
    return f"as in {find_run(config.output.model_dir)[0]}: {shlex.join(words)}" if words else ""


def evaluate_checkpoint(
    config: EvalCommand, name: str, folder: Path, environments: list[RolloutSettings], layout: Layout
) -> list[Result]:
    """Returns a checkpoint's results on each environment; with --show, prints problems instead."""
    model, params, tokenizer = load_model(folder, layout, **config.compute.arguments, param_dtype=config.compute.dtype)
    num_tasks, num_samples = config.eval.num_eval_tasks, config.eval.num_eval_samples
    sampling, results = config.sampling, []
    if config.output.show:
        sampling = replace(sampling, prompt_length=max(sampling.prompt_length, SHOWN_LENGTH))
    for settings in environments:
        with make_worker(settings, sampling, config.rewards, model, tokenizer, layout) as worker:
            if config.output.show:
                if layout.is_main:
                    shown = show(worker.env, worker.encode, tokenizer.hf.decode, config.output.show)
                    print(*worker.notes, shown, sep="\n")
                continue
            room = sampling_room(model, layout, params, worker.row_length, config.devices.rollout_tp)
            worker = worker.with_room(room, worker.num_eval_tasks(num_tasks) * num_samples)  # noqa: PLW2901
            if layout.is_main:
                print(*(f"{note}\n" for note in worker.notes), sep="", end="", flush=True)
            metrics, episodes, estimates = evaluate(worker, params, num_tasks, num_samples, config.output.seed)
        results.append(Result(name, settings.label, metrics, episodes.task_ids[::num_samples], estimates))
        if layout.is_main:
            print(results[-1].format_metrics(config.sampling.temperature), flush=True)
            if config.output.save_samples:
                write_samples(config.output.save_samples, results[-1], worker, episodes)
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
    quantiles = [f"{percent}% {int(np.percentile(lengths, percent))}" for percent in (5, 50, 95, 99)]
    lines.append(f"======== prompts: {env.num_tasks:,}; tokens: {', '.join(quantiles)}, longest {max(lengths)}")
    text = "\n".join(lines)
    return printable(text, max_chars=len(text))


def example_calls(env: Env, problem: Problem) -> list[Reply]:
    """Returns an example call of each announced tool, with the required arguments of its schema."""
    calls = []
    for tool in problem.tools if env.dialect else ():  # tools without a dialect are shown only
        function, arguments = tool_schema(tool)["function"], {}
        for name in function["parameters"].get("required", []):
            schema = function["parameters"]["properties"][name]
            kind = schema.get("type")
            by_type = ARGUMENTS.get(kind[0] if isinstance(kind, list) else kind, "1")
            arguments[name] = schema["enum"][0] if "enum" in schema else by_type
        call = json.dumps({"name": function["name"], "arguments": arguments})
        dialect = DIALECTS[env.dialect]
        calls.append(Reply(dialect.opening + call + dialect.closing, (call,)))
    return calls


def opened(env: Env, problem: Problem) -> Problem:
    """Returns a problem with the opening of its episodes."""
    if not env.opens:
        return problem
    episode = env.episode(problem, seed=0)
    episode.close()
    return replace(problem, messages=list(episode.opening))


def format_example(env: Env, problem: Problem, name: str, reply: Reply) -> str:
    """Returns a reply, and on a second line its scores, or what the environment replies to it as a first turn."""
    text = problem.prefix + reply.text.removeprefix(problem.prefix)
    try:
        if env.max_turns == 1:
            scores, said = env.score(problem, text), ""
        else:
            episode = env.episode(problem, seed=0)
            step = episode.act(reply._replace(text=text))
            episode.close()
            said = "the end" if step.done else " / ".join(message["content"] for message in step.messages)
            scores, said = {"reward": step.reward, **step.info}, f": {shorten(said)}"
        outcome = ", ".join(f"{key} {value:g}" for key, value in scores.items()) + said
    except Exception as error:  # raised by a reward or a class of the user
        outcome = f"fails: {describe_error(error)}"
    return f"{name:>10} {shorten(reply.text)}\n{'':10} {outcome}"


def main(config: EvalCommand) -> None:
    layout = make_layout(config.devices, config.output.model_dir)
    limits = config.sampling.num_generation_tokens, config.sampling.force_answer_at
    environments = resolve_held_out(config.env, config.env.env_name, *limits, is_inherited=False)
    if not environments:
        raise UserError("--env_name is empty: name an environment")
    check_files(config.env, [settings.name for settings in environments])
    names = config.output.model_dir.split(",")
    checkpoints = [checkpoint for name in names for checkpoint in find_checkpoints(name)]
    if layout.is_main:
        check_writable(config.output.json, config.output.save_samples)
        lines = inheritance_note(config), *(f"{played.label}: {played.manner}" for played in environments)
        print("\n".join(filter(None, lines)), flush=True)
    results = []
    for name, folder in checkpoints[:1] if config.output.show else checkpoints:
        results += evaluate_checkpoint(config, name, folder, environments, layout)
    if layout.is_main and results:
        write_results(results, config.output.seed, config.output.json)


def write_samples(file: str, result: Result, worker: RolloutWorker, episodes: Episodes) -> None:
    """Appends one JSON object for each problem: its number, the prompt as the model saw it, reference, completions."""
    num_samples = len(episodes.task_ids) // len(result.ids)
    completions, env = episodes.completions, worker.env
    with Path(os.path.expanduser(file)).open("a") as lines:
        for position, task in enumerate(result.ids.tolist()):
            rollouts = range(position * num_samples, (position + 1) * num_samples)
            row, answer = episodes.first_rows[rollouts[0]], env.problem(task).answer
            prompt = completions.tokens[row, : completions.prompt_lengths[row]]
            record = {
                "model_dir": result.model_dir,
                "env_name": result.env_name,
                "task": task,
                "prompt": worker.tokenizer.hf.decode(prompt.tolist()),
                "reference": json_value(answer),
                "completions": [sample(env, episodes, i) for i in rollouts],
            }
            lines.write(json.dumps(record, default=str, skipkeys=True) + "\n")


def sample(env: Env, episodes: Episodes, row: int) -> dict[str, JSON]:
    """Returns the text, the answer, the scores and the length in tokens of a completion."""
    value, correct = round(float(episodes.scores["return"][row]), 6), episodes.scores.get("correct_answer")
    return {
        "text": episodes.texts[row],
        "answer": env.answer(episodes.texts[row]),
        "return": None if np.isnan(value) else value,
        **({"correct": bool(correct[row] > 0)} if correct is not None else {}),
        "length": int(episodes.completion_lengths[row]),
        "finished": bool(episodes.finished[row]),
        **({"conversation": episodes.conversations[row]} if episodes.conversations else {}),
    }


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse_command(sys.argv[1:]))
