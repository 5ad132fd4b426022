"""Plays an environment and scores what was played; several checkpoints on several environments become a table.

    python core/eval.py --env_name countdown --model_dir ~/checkpoints/countdown/step60
    python core/eval.py --env_name aime,math500 --model_dir Qwen/Qwen3-1.7B,runs/deepscaler --num_eval_samples 16

Letters: N tasks, G samples of each, B = N G rows, T row length.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from core.sampling import ForcedAnswer, Rollouts, Sampler, SamplingConfig, make_sampler
from envs import ENVS, Options, Value, make_env, option_names, parse_options, split_name, test_name
from envs.base import ANSWER_STARTS, Env, Problem
from models.checkpoint import find_model, load_model
from models.distribution import Distribution
from models.qwen3 import Qwen
from models.tokenizer import Tokenizer
from utils.devices.memory import out_of_memory
from utils.devices.sharding import Layout, LayoutConfig, ending_together, make_layout
from utils.evaluation.estimates import mean_and_ci, task_estimates
from utils.evaluation.preview import shorten, show, tasks_that_fit
from utils.evaluation.tables import Result, find_checkpoints, finish, open_files, write_samples
from utils.metrics.logger import writable
from utils.metrics.terminal import waiting
from utils.rewards.scorer import Scorer, Stream
from utils.rewards.shaping import RewardConfig, add_truncation_penalty
from utils.settings.config import option, parse
from utils.settings.errors import UserError, fail, user_errors
from utils.training.batching import concatenate

LIMITS = ("num_generation_tokens", "force_answer_at")  # that --test_env_options can set, too
STYLE = ("form", "system", "thinking", "prefix", "plain")  # options that a test environment takes over from training
FILES = ("data_dir", "reward")  # flags that go to each environment with such an option


@dataclass(frozen=True)
class EvalConfig(RewardConfig):
    """Environment and evaluation."""

    env_name: str = option("poem", f"environment: {', '.join(ENVS)}")
    env_options: str = option("", "its options, for example numbers=3,max_number=15; a wrong one lists them all")
    num_eval_tasks: int = option(-1, "first problems of the test split to evaluate; 0: all, -1: 512, or all of gsm8k")
    num_eval_samples: int = option(1, "completions of each, for pass@k and best-of-n up to this number")

    def __post_init__(self):
        RewardConfig.__post_init__(self)
        if self.num_eval_tasks < -1 or self.num_eval_samples < 1:
            raise UserError("--num_eval_tasks starts at -1, --num_eval_samples at 1")


@dataclass(frozen=True)
class Episodes:
    """What was played: rows of one task stand side by side."""

    rollouts: Rollouts
    ids: Int[np.ndarray, "B"]  # task of each row
    texts: list[str]  # as scored: the prompt's assistant prefix and the completion
    scores: dict[str, Float[np.ndarray, "B"]]  # zero for rows that `failed`
    failed: Bool[np.ndarray, "B"]  # rows without rewards: the reward timed out, raised or crashed
    failures: dict[str, int]  # numbers of rewards that timed out or raised, by kind
    times: dict[str, float]  # seconds
    by_task: dict[str, Float[np.ndarray, "N"]] | None = None  # estimates of each task, by `evaluate`


@dataclass(frozen=True)
class RolloutSettings:
    """How an environment is played: resolved once from options, environment and, for a test environment, training."""

    name: str  # with its split, as countdown-test
    options: Options  # of the environment
    env: Env = field(compare=False)
    max_new_tokens: int  # completion limit
    force_answer_at: int  # tokens before the limit at which an unfinished reply gets `forced_answer`; 0: never
    forced_answer: ForcedAnswer
    form: str  # in which answers stand
    system: str  # system prompt of the first problem, as the next three
    thinking: bool
    prefix: str
    plain: bool  # without chat template

    @property
    def split(self) -> str:
        return split_name(self.name)[1]

    def describe(self) -> str:
        """Returns one line for people."""
        forced = f"{self.forced_answer.start.strip()} forced {self.force_answer_at} tokens before it"
        system = shorten(" ".join(self.system.split()), 60)
        parts = [
            f"{self.name}: {self.split} split",
            f"completions of at most {self.max_new_tokens} tokens",
            forced if self.force_answer_at else "no forced answer",
            f"form {self.form}",
            f"thinking {'on' if self.thinking else 'off'}",
            f"prefix {self.prefix!r}" if self.prefix else "no prefix",
            f"system prompt {system}" if self.system else "no system prompt",
            "no chat template" if self.plain else "",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Player:
    """A model's way through an environment: prompts, samples, scores."""

    env: Env
    tokenizer: Tokenizer
    sampler: Sampler
    scorer: Scorer
    layout: Layout
    rows_per_call: int
    tasks: Int[np.ndarray, "N"] | None = None  # numbers of the problems whose prompts are short enough; None: all
    name: str = ""  # of the environment

    @property
    def num_tasks(self) -> int:
        return self.env.num_tasks if self.tasks is None else len(self.tasks)

    def encode(self, problem: Problem) -> list[int]:
        """The prompt of a problem, token ids."""
        return encode(self.tokenizer, problem)

    def prompts(self, ids: Int[np.ndarray, "N"], problems: list[Problem]) -> list[list[int]]:
        """The prompts of problems with these numbers, token ids. Ends the command where one is too long."""
        limit, prompts = self.sampler.max_prompt_tokens, [self.encode(problem) for problem in problems]
        for i, prompt in zip(ids, prompts, strict=True):
            if len(prompt) > limit:
                fail(
                    f"the prompt of problem {i} of {self.name} has {len(prompt)} tokens, more than --prompt_length "
                    f"{limit}: raise it (and give --resume force where a run is to go on)"
                )
        return prompts

    def num_prompts(self, most: int, num_samples: int) -> int:
        """Prompts that are sampled from in one call, where up to `most` are to be."""
        return max(1, min(most, self.rows_per_call // num_samples))

    def num_eval_tasks(self, wanted: int) -> int:
        """Returns the problems of an evaluation of `wanted` ones; 0: all, -1: as many as the environment says."""
        num_tasks = self.env.num_eval_tasks if wanted < 0 else wanted
        return min(num_tasks or self.num_tasks, self.num_tasks)

    def greedy(self) -> "Player":
        return replace(self, sampler=replace(self.sampler, distribution=Distribution(temperature=0.0)))

    def rehearse(self, params: Any, num_tasks: int, num_samples: int) -> None:
        """Compiles all that `play` can need for so many tasks."""
        per_call = self.num_prompts(num_tasks, num_samples)
        for num_prompts in {per_call, num_tasks % per_call} - {0}:
            self.sampler.rehearse(params, num_prompts, num_samples)

    def play(
        self, params: Any, ids: Int[np.ndarray, "N"], num_samples: int, key, places: Int[np.ndarray, "N"] | None = None
    ) -> Episodes:
        """Samples `num_samples` completions of each task and scores them; results do not depend on `rows_per_call`.

        The draws of a task are those of its number under `key`, or of its place in the run where `places` are given.
        """
        clock, parts, per_call = time.perf_counter(), [], self.num_prompts(len(ids), num_samples)
        places = ids if places is None else places
        ids = ids if self.tasks is None else self.tasks[ids]
        problems = [self.env.problem(int(i)) for i in ids]
        all_prompts = self.prompts(ids, problems)
        ids = np.repeat(ids, num_samples)
        texts, mine, failures = {}, self.layout.part(len(ids)), {}

        def hear(call: int, first: int, tokens, t: int, lengths) -> None:
            """Takes rows that have come to their end, and has this process's share of them scored meanwhile."""
            wait.watch(call, first, tokens, t, lengths)
            ended = {call + first + b: b for b in np.flatnonzero(lengths <= t).tolist()}
            new = {row: b for row, b in ended.items() if row not in texts}
            for row, b in new.items():
                texts[row] = problems[row // num_samples].prefix + self.tokenizer.decode(tokens[b, : lengths[b]])
            stream.add({row: (int(ids[row]), texts[row]) for row in new if row in mine})

        def score(share: range) -> list[dict[str, float] | None]:
            scored = stream.finish()
            jobs, outcomes = ([scored[row][i] for row in share] for i in (0, 1))
            rewards, counts = self.scorer.judge(jobs, outcomes)
            failures.update(counts)
            return rewards

        with Stream(self.scorer) as stream:
            with waiting("sampling", len(ids), "rows") as wait:
                for start in range(0, len(problems), per_call):
                    sampler = replace(self.sampler, watch=partial(hear, start * num_samples))
                    prompts = all_prompts[start : start + per_call]
                    with out_of_memory("inference_batch_per_device", self.rows_per_call // self.layout.row_shards):
                        parts.append(sampler(params, prompts, places[start : start + per_call], num_samples, key))
            rollouts, sampled = concatenate(parts), time.perf_counter()
            with waiting(f"scoring {len(texts):,} replies"):
                rewards = self.layout.share(score, len(texts))
        failures = {kind: self.layout.total(count) for kind, count in failures.items()}
        texts = [texts[row] for row in range(len(ids))]
        failed = np.array([reward is None for reward in rewards])
        rewards = [reward or {} for reward in rewards]
        names = sorted({"return", "correct_answer"}.union(*rewards))
        scores = {name: np.array([reward.get(name, 0.0) for reward in rewards], np.float32) for name in names}
        if self.env.truncation_penalty:
            is_truncated = ~rollouts.finished & ~failed
            scores = add_truncation_penalty(scores, is_truncated, self.env.truncation_penalty)
        times = {"rollout": sampled - clock, "score": time.perf_counter() - sampled}
        return Episodes(rollouts, ids, texts, scores, failed, failures, times)


def encode(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Returns the prompt of a problem, token ids."""
    return tokenizer.chat(problem.messages, problem.thinking, problem.prefix, problem.plain)


def resolve_settings(
    config: EvalConfig,
    name: str,
    training: RolloutSettings | None = None,
    overrides: Mapping[str, Value] = MappingProxyType({}),
) -> RolloutSettings:
    """Returns how an environment is played; `config` is a SamplingConfig, too.

    A test environment of `training` takes over its limits, and its style by `env_options`. `overrides` are what
    --test_env_options says otherwise: options of the environment, num_generation_tokens and force_answer_at.

    Raises: UserError for what the environment does not take.
    """
    for key in LIMITS:
        if type(overrides.get(key, 0)) is not int:
            raise UserError(f"--test_env_options: {key} is a number of tokens, not {overrides[key]!r}")
    options = env_options(config, name) | {key: value for key, value in overrides.items() if key not in LIMITS}
    env = make_env(name, **options)

    limit = training.max_new_tokens if training else config.num_generation_tokens
    limit = overrides.get("num_generation_tokens", limit)
    limit = env.tokens_per_action if limit < 0 else limit

    force = training.force_answer_at if training else config.force_answer_at
    force = overrides.get("force_answer_at", force)
    is_asked_for = force > 0 and (training is None or "force_answer_at" in overrides)
    force = env.force_answer_at if force < 0 else force
    answer = forced_answer(env)
    if is_asked_for and not answer.start:
        raise UserError(f"--force_answer_at {force}: the prompts of {name} ask for no form of answer to be forced")
    if not is_asked_for and (not answer.start or not 0 < force < limit):
        force = 0

    problem = env.problem(0)
    system = "\n".join(message["content"] for message in problem.messages if message["role"] == "system")
    style = (system, problem.thinking, problem.prefix, problem.plain)
    return RolloutSettings(name, options, env, limit, force, answer, env.form, *style)


def env_options(config: EvalConfig, name: str) -> Options:
    """Returns the options of an environment, as --env_options and other flags set them.

    A test environment of another kind than --env_name takes over the options of style that it has. Files go to each
    environment that reads such files.
    """
    names = option_names(name)
    flags = {key: value for key, value in config.env_flags.items() if key in names or key not in FILES}
    options = parse_options(config.env_options) | flags
    if split_name(name)[0] == split_name(config.env_name)[0]:
        return options
    return {key: value for key, value in options.items() if key in names and key in (*STYLE, *FILES)}


def check_files(config: EvalConfig, names: Iterable[str]) -> None:
    """Raises UserError for --data_dir or --reward where none of the environments takes it."""
    for flag in FILES:
        if getattr(config, flag) and not any(flag in option_names(name) for name in names):
            raise UserError(f"--{flag}: no environment of {', '.join(names)} has such an option")


def forced_answer(env: Env) -> ForcedAnswer:
    """Returns the beginning of an answer in the form of the environment, an empty one where it asks for no form.

    In the form `any` a reply may give its answer in every form, and the one that the prompt shows is forced.
    """
    signs = {form: start.strip(" {") for form, start in ANSWER_STARTS.items()}
    if env.form in ANSWER_STARTS:
        return ForcedAnswer(ANSWER_STARTS[env.form], (signs[env.form],))
    prompt = "".join(message["content"] for message in env.problem(0).messages)
    form = next((form for form, sign in signs.items() if sign in prompt), "")
    return ForcedAnswer(ANSWER_STARTS.get(form, ""), tuple(signs.values()))


def make_player(
    config: EvalConfig, settings: RolloutSettings, model: Qwen, tokenizer: Tokenizer, layout: Layout
) -> Player:
    """Returns a player of an environment.

    `config` is a SamplingConfig, too; replies whose scoring failed are kept in its `save_dir`, if any.

    Raises: UserError when no prompt is short enough.
    """
    env, answer = settings.env, settings.forced_answer
    answer = replace(answer, opening=reply_opening(tokenizer, env.problem(0)))
    limits = settings.max_new_tokens, settings.force_answer_at
    sampler = make_sampler(config, model, tokenizer, layout, *limits, answer)
    tasks = find_tasks(config, settings.name, env, tokenizer, layout)
    scorer = Scorer(
        settings.name, settings.options, num_workers=config.num_score_workers, timeout=config.score_timeout,
        max_error_share=config.max_error_share, failures_dir=getattr(config, "save_dir", None),
    )  # fmt: skip
    rows_per_call = config.inference_batch_per_device * layout.row_shards
    return Player(env, tokenizer, sampler, scorer, layout, rows_per_call, tasks, settings.name)


def reply_opening(tokenizer: Tokenizer, problem: Problem) -> str:
    """Returns what stands behind the last message of a prompt: the end of the chat template, and the prefix."""
    prompt = tokenizer.decode(encode(tokenizer, problem))
    _, message, opening = prompt.rpartition(problem.messages[-1]["content"].strip())
    return opening if message else problem.prefix


def find_tasks(
    config: SamplingConfig, name: str, env: Env, tokenizer: Tokenizer, layout: Layout
) -> Int[np.ndarray, "N"] | None:
    """Returns the numbers of the problems whose prompts fit into --prompt_length; None: all. Prints how many do not.

    Raises: UserError when no prompt is short enough.
    """
    limit = config.prompt_length
    tasks = tasks_that_fit(env, partial(encode, tokenizer), limit)
    if tasks is None:
        return None
    if not tasks.size:
        raise UserError(f"all prompts of {name} have more than {limit} tokens: raise --prompt_length")
    num_dropped = env.num_tasks - tasks.size
    if num_dropped and layout.is_main:
        first = np.setdiff1d(np.arange(env.num_tasks), tasks)[0]
        print(f"{name}: {num_dropped:,} prompts of more than {limit} tokens are left out, from problem {first} on")
    return tasks


def evaluate(player: Player, params: Any, num_tasks: int, num_samples: int, seed: int = 0) -> tuple[dict, Episodes]:
    """Scores on the first problems: means over tasks, and half-widths of their 95% intervals (`_ci`).

    `num_tasks`: how many; 0: all, -1: as many as the environment says.
    """
    ids = np.arange(player.num_eval_tasks(num_tasks))
    episodes = player.play(params, ids, num_samples, jax.random.key(seed))
    scores = {name: x.reshape(len(ids), num_samples) for name, x in episodes.scores.items()}
    by_task = task_estimates(scores, [player.env.answer(text) for text in episodes.texts])
    metrics = {"num_tasks": len(ids), "num_samples": num_samples}
    for name, x in by_task.items():
        metrics |= mean_and_ci(name, x)
    rollouts = episodes.rollouts
    metrics["length"] = float((rollouts.lengths - rollouts.prompt_lengths).mean())
    metrics["finished"] = float(rollouts.finished.mean())
    if episodes.failed.any():
        metrics["reward_failures"] = int(episodes.failed.sum())
    return metrics, replace(episodes, by_task=by_task)


@dataclass(frozen=True)
class Command(EvalConfig, SamplingConfig, LayoutConfig):
    """Model and output."""

    env_name: str = option("poem", f"environments with commas between, to play their test splits: {', '.join(ENVS)}")
    model_dir: str = option("models/tiny", "Hugging Face folders, hub ids or run folders, separated by commas")
    json: str = option("", "file to write the scores to: one JSON object, or a list for several checkpoints")
    save_samples: str = option("", "file to write prompts and completions to, one JSON object for each problem")
    show: int = option(0, "print so many problems with what example replies score, and evaluate nothing")
    seed: int = option(0, "of the draws")
    dtype: str = option("", "of the matmuls; empty: bfloat16, float32 on CPU", ["", "bfloat16", "float32"])

    def __post_init__(self):
        EvalConfig.__post_init__(self)
        SamplingConfig.__post_init__(self)


def play_checkpoint(
    config: Command, name: str, folder: Path, environments: list[RolloutSettings], layout: Layout
) -> list[Result]:
    """What a checkpoint reaches on each environment; with --show, a look at the environments instead."""
    with user_errors():
        given = {"param_dtype": config.dtype, "kv_dtype": config.kv_dtype}
        model, params, tokenizer = load_model(folder, layout, config.dtype, **given)
    results = []
    for settings in environments:
        with user_errors():
            player = make_player(config, settings, model, tokenizer, layout)
        with player.scorer:
            if config.show:
                print(show(player.env, player.encode, tokenizer.hf.decode, config.show))
                continue
            metrics, episodes = evaluate(player, params, config.num_eval_tasks, config.num_eval_samples, config.seed)
        ids = episodes.ids[:: config.num_eval_samples]
        results.append(Result(name, settings.name, metrics, ids, episodes.by_task))
        if layout.is_main:
            print(writable(results[-1].describe(config.temperature), sys.stdout), flush=True)
        if layout.is_main and config.save_samples:
            write_samples(config.save_samples, results[-1], player, episodes)
    return results


def main(config: Command):
    with user_errors():
        layout = make_layout(config)
        names = dict.fromkeys(test_name(name.strip()) for name in config.env_name.split(","))
        environments = [resolve_settings(replace(config, env_name=name), name) for name in names]
        check_files(config, names)
        checkpoints = [found for name in config.model_dir.split(",") for found in find_checkpoints(name, find_model)]
        if layout.is_main:
            open_files(config.json, config.save_samples)
    if layout.is_main:
        print(writable("\n".join(settings.describe() for settings in environments), sys.stdout), flush=True)
    if config.show:
        return play_checkpoint(config, *checkpoints[0], environments, layout)
    results = [result for found in checkpoints for result in play_checkpoint(config, *found, environments, layout)]
    if layout.is_main:
        finish(results, config.seed, config.json)


if __name__ == "__main__":
    with ending_together():
        aliases = {"ckpt_dir": "model_dir", "num_epochs": "num_eval_samples"}
        main(parse(Command, sys.argv[1:], __doc__, aliases)[0])
