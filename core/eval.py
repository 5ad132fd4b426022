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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from core.sampling import Rollouts, Sampler, SamplingConfig, make_sampler
from envs import ENVS, make_env, parse_options, test_name
from envs.base import Env, Problem
from models.checkpoint import find_model, load_model
from models.distribution import Distribution
from models.qwen3 import Qwen
from models.tokenizer import Tokenizer
from utils.batching import concatenate
from utils.comparison import Result, find_checkpoints, finish, open_files, write_samples
from utils.config import fail, option, parse, user_errors
from utils.estimates import mean_and_ci, task_estimates
from utils.logger import writable
from utils.memory import out_of_memory
from utils.progress import waiting
from utils.rewards import RewardConfig, add_truncation_penalty
from utils.scoring import Scorer, Stream
from utils.sharding import Layout, LayoutConfig, ending_together, make_layout
from utils.show import show, tasks_that_fit


@dataclass(frozen=True)
class EvalConfig(RewardConfig):
    """Environment and evaluation."""

    env_name: str = option("poem", f"environment: {', '.join(ENVS)}")
    env_options: str = option("", "its options, for example numbers=3,max_number=15; a wrong one lists them all")
    num_eval_tasks: int = option(512, "problems of the fixed evaluation set: the first ones of the test split")
    num_eval_samples: int = option(1, "completions of each, for pass@k and best-of-n up to this number")

    def __post_init__(self):
        RewardConfig.__post_init__(self)
        if min(self.num_eval_tasks, self.num_eval_samples) < 1:
            raise ValueError("--num_eval_tasks and --num_eval_samples must be positive")


@dataclass(frozen=True)
class Episodes:
    """What was played: rows of one task stand side by side."""

    rollouts: Rollouts
    ids: Int[np.ndarray, "B"]  # task of each row
    texts: list[str]  # as scored: the prompt's assistant prefix and the completion
    scores: dict[str, Float[np.ndarray, "B"]]  # zero for rows that `failed`
    failed: Bool[np.ndarray, "B"]  # rows without rewards: the reward timed out, raised or crashed
    failures: dict[str, int]  # rewards that timed out or raised, in this process's share
    times: dict[str, float]  # seconds
    by_task: dict[str, Float[np.ndarray, "N"]] | None = None  # estimates of each task, by `evaluate`


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


def make_player(config, name: str, env: Env, model: Qwen, tokenizer: Tokenizer, layout: Layout) -> Player:
    """A player of environment `name`, with the environment's limits where the settings leave them open.

    `config` holds EvalConfig and SamplingConfig; replies whose scoring failed are kept in its `save_dir`, if any.

    Raises: ValueError when no prompt is short enough.
    """
    limit = env.tokens_per_action if config.num_generation_tokens < 0 else config.num_generation_tokens
    force = config.force_answer_at
    if force < 0:  # the environment's, which a short limit leaves no room for
        force = env.force_answer_at if 0 < env.force_answer_at < limit else 0
    sampler = make_sampler(config, model, tokenizer, layout, limit, force)
    tasks = find_tasks(config, name, env, tokenizer, layout)
    scorer = Scorer(
        name, env_options(config, name), num_workers=config.num_score_workers, timeout=config.score_timeout,
        max_error_share=config.max_error_share, failures_dir=getattr(config, "save_dir", None),
    )  # fmt: skip
    rows_per_call = config.inference_batch_per_device * layout.row_shards
    return Player(env, tokenizer, sampler, scorer, layout, rows_per_call, tasks, name)


def find_tasks(
    config: SamplingConfig, name: str, env: Env, tokenizer: Tokenizer, layout: Layout
) -> Int[np.ndarray, "N"] | None:
    """Returns the numbers of the problems whose prompts fit into --prompt_length; None: all. Prints how many do not.

    Raises: ValueError when no prompt is short enough.
    """
    limit = config.prompt_length
    tasks = tasks_that_fit(env, partial(encode, tokenizer), limit)
    if tasks is None:
        return None
    if not tasks.size:
        raise ValueError(f"all prompts of {name} have more than {limit} tokens: raise --prompt_length")
    num_dropped = env.num_tasks - tasks.size
    if num_dropped and layout.is_main:
        first = np.setdiff1d(np.arange(num_dropped + 1), tasks)[0]
        print(f"{name}: {num_dropped:,} prompts of more than {limit} tokens are left out, from problem {first} on")
    return tasks


def env_options(config: EvalConfig, name: str) -> dict:
    """The options of an environment; a test environment of another kind than --env_name shares --data_dir alone."""
    if test_name(name) == test_name(config.env_name):
        return parse_options(config.env_options) | config.env_flags
    return {"data_dir": config.data_dir} if config.data_dir else {}


def evaluate(player: Player, params: Any, num_tasks: int, num_samples: int, seed: int = 0) -> tuple[dict, Episodes]:
    """Scores on the first `num_tasks` problems: means over tasks, and half-widths of their 95% intervals (`_ci`)."""
    ids = np.arange(min(num_tasks, player.num_tasks))
    episodes = player.play(params, ids, num_samples, jax.random.key(seed))
    scores = {name: x.reshape(len(ids), num_samples) for name, x in episodes.scores.items()}
    by_task = task_estimates(scores, [player.env.answer(text) for text in episodes.texts])
    metrics = {"num_tasks": len(ids), "num_samples": num_samples}
    for name, x in by_task.items():
        metrics |= mean_and_ci(name, x)
    rollouts = episodes.rollouts
    metrics["length"] = float((rollouts.lengths - rollouts.prompt_lengths).mean())
    metrics["finished"] = float(rollouts.finished.mean())
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


def play_checkpoint(config: Command, name: str, folder: Path, envs: dict[str, Env], layout: Layout) -> list[Result]:
    """What a checkpoint reaches on each environment; with --show, a look at the environments instead."""
    with user_errors():
        given = {"param_dtype": config.dtype, "kv_dtype": config.kv_dtype}
        model, params, tokenizer = load_model(folder, layout, config.dtype, **given)
    results = []
    for env_name, env in envs.items():
        with user_errors():
            player = make_player(replace(config, env_name=env_name), env_name, env, model, tokenizer, layout)
        with player.scorer:
            if config.show:
                print(show(env, player.encode, tokenizer.hf.decode, config.show))
                continue
            metrics, episodes = evaluate(player, params, config.num_eval_tasks, config.num_eval_samples, config.seed)
        results.append(Result(name, env_name, metrics, episodes.ids[:: config.num_eval_samples], episodes.by_task))
        if layout.is_main:
            print(writable(results[-1].describe(config.temperature), sys.stdout), flush=True)
        if layout.is_main and config.save_samples:
            write_samples(config.save_samples, results[-1], player, episodes)
    return results


def main(config: Command):
    with user_errors():
        layout = make_layout(config)
        names = dict.fromkeys(test_name(name.strip()) for name in config.env_name.split(","))
        envs = {name: make_env(name, **env_options(replace(config, env_name=name), name)) for name in names}
        checkpoints = [found for name in config.model_dir.split(",") for found in find_checkpoints(name, find_model)]
        if layout.is_main:
            open_files(config.json, config.save_samples)
    if config.show:
        return play_checkpoint(config, *checkpoints[0], envs, layout)
    results = [result for found in checkpoints for result in play_checkpoint(config, *found, envs, layout)]
    if layout.is_main:
        finish(results, config.seed, config.json)


if __name__ == "__main__":
    with ending_together():
        aliases = {"ckpt_dir": "model_dir", "num_epochs": "num_eval_samples"}
        main(parse(Command, sys.argv[1:], __doc__, aliases)[0])
