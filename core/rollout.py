"""Rolls out a policy in an environment: prompts, completions, rewards.

Evaluations do the same with held-out problems: mean@n, pass@k, maj@n with 95% intervals.

N tasks, G samples of each, B rows (see core/records.py), A completion columns.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Float, Int

from core.chains.attach import attach
from core.chains.replies import Replies
from core.records import Episodes
from core.sampler import Sampler, SamplingConfig, make_sampler, sample_keys
from envs.base import Env, Problem
from envs.prompts import Tasks, find_tasks
from envs.scoring.scorer import Scorer, ScoringStream
from envs.scoring.shaping import RewardConfig, add_truncation_penalty, reward_names
from envs.scoring.trial import try_rewards
from envs.settings import RolloutSettings
from models.architecture import Decoder
from models.memory import Room, describe_rollout, out_of_memory, pages_that_fit
from models.names import Key, Params, Policy, Weights
from models.tokenizer import Tokenizer
from utils.batching import bucket
from utils.devices.sharding import Layout
from utils.evaluation.estimates import mean_and_ci, task_estimates
from utils.metrics.terminal import waiting
from utils.settings.errors import UserError
from utils.settings.groups import EvalConfig
from utils.threefry import make_key

MOST_ROWS_ON_CPU = 128  # at once, unless the settings name more
Estimates = dict[str, Float[np.ndarray, "N"]]  # estimates of each task, whose means are the metrics


@dataclass(frozen=True)
class RolloutWorker:
    """Plays the tasks of an environment with given weights, and grades the replies."""

    env: Env
    name: str  # environment, with its split
    tokenizer: Tokenizer
    sampler: Sampler
    scorer: Scorer
    layout: Layout
    fitting_ids: Int[np.ndarray, "N"] | None = None  # problems whose prompts are short enough; None: all
    make_replies: type[Replies] = Replies  # for several turns, Conversations of core/chains/turns.py
    notes: tuple[str, ...] = ()  # about its prompts, printed at the start

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.scorer.close()

    @property
    def num_tasks(self) -> int:
        return self.env.num_tasks if self.fitting_ids is None else len(self.fitting_ids)

    @property
    def max_new_tokens(self) -> int:
        return self.sampler.max_new_tokens

    @property
    def row_length(self) -> int:
        """Returns the columns of the longest row."""
        return bucket(self.sampler.max_prompt_tokens + self.sampler.max_new_tokens)

    def with_room(self, room: Room, num_rows: int) -> Self:
        """Returns a worker on the mesh that samples, with slots for the rows that the settings name, or that fit.

        `num_rows`: rows of a step.
        """
        (layout, num_bytes), sampler = room, self.sampler.on(room.layout)
        if layout.is_cpu:  # other programs need its memory, too
            num_bytes, num_rows = num_bytes // 4, min(num_rows, MOST_ROWS_ON_CPU)
        asked = sampler.paging.num_slots // self.layout.row_shards * layout.row_shards
        longest = sampler.max_prompt_tokens + sampler.max_new_tokens
        paging = pages_that_fit(num_bytes, sampler.model, layout, sampler.paging, longest, asked or num_rows)
        notes = *self.notes, *describe_rollout(sampler.model, self.layout, layout)
        return replace(self, sampler=replace(sampler, paging=paging), layout=layout, notes=notes)

    def load_weights(self, params: Policy) -> Weights:
        """Returns the weights that `play` samples from: cast and laid out for decoding, once for many calls."""
        return self.sampler.load_weights(params)

    def encode(self, problem: Problem) -> list[int]:
        """Returns the prompt of a problem, token ids."""
        return encode_prompt(self.tokenizer, problem)

    def num_eval_tasks(self, num_tasks: int) -> int:
        """Returns the problems of an evaluation of `num_tasks`; 0: all, -1: as many as the environment suggests."""
        suggested = self.env.num_eval_tasks if num_tasks < 0 else num_tasks
        return min(suggested or self.num_tasks, self.num_tasks)

    def play(
        self, weights: Weights, tasks: Tasks, num_samples: int, key: Key, positions: Tasks | None = None
    ) -> Episodes:
        """Samples `num_samples` completions of each task and grades them; results do not depend on the slots.

        `tasks` are indices into the problems whose prompts fit. A row's key is made from `key`, the number of its
        sample, and the position of its group. Without `positions`, a task's number in the environment is its position.
        """
        clock = time.perf_counter()
        task_ids = tasks if self.fitting_ids is None else self.fitting_ids[tasks]
        positions = task_ids if positions is None else positions
        problems = [self.env.problem(int(i)) for i in task_ids]
        keys = sample_keys(key, positions, num_samples)
        num_slots = self.sampler.paging.num_slots // self.layout.row_shards
        with ScoringStream(self.scorer, num_samples) as stream:
            replies = self.make_replies(self.env, self.tokenizer, self.layout, problems, task_ids, keys, stream)
            prompts = [self.encode_prompt(number, problem) for number, problem in replies.prompts()]
            with waiting("sampling", len(keys), "rows") as wait, out_of_memory("inference_batch_per_device", num_slots):
                completions = replies.sample(self.sampler, weights, prompts, keys, wait)
            sampled = time.perf_counter()
            rewards, failures = replies.finish()
        failed = np.array([reward is None for reward in rewards])
        known = {"return", "correct_answer"} & reward_names(self.scorer.parts, self.env)
        episodes = Episodes(
            task_ids=np.repeat(task_ids, num_samples),
            scores=collect_scores(rewards, known),
            failed=failed,
            failures=failures,
            times={"rollout": sampled - clock, "score": time.perf_counter() - sampled},
            load=self.sampler.paging.take_load(),
            positions=np.repeat(positions, num_samples),
            **replies.records(completions),
        )
        is_truncated = ~episodes.finished & ~failed
        return replace(
            episodes, scores=add_truncation_penalty(episodes.scores, is_truncated, self.env.truncation_penalty)
        )

    def encode_prompt(self, number: int, problem: Problem) -> list[int]:
        """Returns the prompt of the problem with this number. Raises: UserError if the prompt is too long."""
        prompt, limit = self.encode(problem), self.sampler.max_prompt_tokens
        if len(prompt) > limit:
            raise UserError(
                f"the prompt of problem {number} of {self.name} has {len(prompt)} tokens, more than {limit}: raise "
                "--prompt_length (to continue a run, with --resume force), or lower --num_generation_tokens if the "
                "model has no more positions"
            )
        return prompt


def collect_scores(rewards: Sequence[Mapping[str, float] | None], known: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns an array [B] for each part of the rewards, and for `known` ones; 0 for a row without this part."""
    names = set(known).union(*(reward or {} for reward in rewards))
    scores = {}
    for name in sorted(names):
        values = [(reward or {}).get(name, 0.0) for reward in rewards]
        scores[name] = np.array(values, np.float32)
    return scores


def encode_prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    """Returns the prompt of a problem, token ids."""
    return tokenizer.chat(problem.messages, problem.thinking, problem.prefix, problem.plain, problem.tools)


def make_worker(
    settings: RolloutSettings,
    sampling: SamplingConfig,
    rewards: RewardConfig,
    model: Decoder,
    tokenizer: Tokenizer,
    layout: Layout,
    failures_dir: str | Path = "",
) -> RolloutWorker:
    """Returns a worker for an environment. Replies whose grader failed are written to `failures_dir`, if it is given.

    Raises: UserError if no prompt is short enough.
    """
    env, encode = settings.env, partial(encode_prompt, tokenizer)
    chained = attach(make_sampler(sampling, model, tokenizer, layout, settings.max_new_tokens), settings, encode)
    limit, room = chained.sampler.max_prompt_tokens, ""
    if limit < sampling.prompt_length:
        room = f"{settings.name}: prompts of at most {limit} tokens, as the model has {model.num_positions:,} positions"
    remedy = "lower --num_generation_tokens" if room else "raise --prompt_length"
    tasks, dropped = find_tasks(settings.name, env, encode, limit, remedy)
    scorer = Scorer(
        settings.name,
        settings.options,
        num_workers=rewards.num_score_workers,
        timeout=rewards.score_timeout,
        failures_dir=failures_dir,
    )
    warnings = [f"warning: {settings.name}: {warning}" for warning in try_rewards(scorer, env)]
    for line in (room, dropped, *warnings):
        if line and layout.is_main:
            print(line)
    return RolloutWorker(
        env=env,
        name=settings.label,
        tokenizer=tokenizer,
        scorer=scorer,
        layout=layout,
        fitting_ids=tasks,
        **chained._asdict(),
    )


def evaluate(
    worker: RolloutWorker, params: Params, num_tasks: int, num_samples: int, seed: int = 0
) -> tuple[dict[str, float], Episodes, Estimates]:
    """Returns scores on the first problems, the episodes, and the estimates of each task.

    Scores are means over tasks, with half-widths of their 95% intervals (`_ci`). `num_tasks`: number of problems; 0:
    all, -1: as many as the environment suggests.
    """
    tasks = np.arange(worker.num_eval_tasks(num_tasks))
    episodes = worker.play(worker.load_weights(params), tasks, num_samples, make_key(seed))
    scores = {name: x.reshape(len(tasks), num_samples) for name, x in episodes.scores.items()}
    votes = [worker.env.vote(text) for text in episodes.texts] if num_samples > 1 else []
    estimates = task_estimates(scores, votes)
    metrics = {"num_tasks": len(tasks), "num_samples": num_samples}
    for name, x in estimates.items():
        metrics |= mean_and_ci(name, x)
    metrics["length"] = float(episodes.completion_lengths.mean())
    metrics["finished"] = float(episodes.finished.mean())
    if episodes.failed.any():
        metrics["reward_failures"] = int(episodes.failed.sum())
    return metrics, episodes, estimates


@waiting("held-out problems")
def evaluate_held_out(
    workers: Mapping[str, RolloutWorker], params: Params, config: EvalConfig, seed: int
) -> tuple[dict[str, float], Episodes]:
    """Returns held-out scores as metrics, and the episodes of the test environment.

    Metrics begin with "test_env/", or with "test_env.LABEL/" for further environments; "times/test" are the seconds.
    """
    clock, metrics, examples = time.perf_counter(), {}, {}
    for role in (role for role in workers if role.startswith("test_env")):
        scores, examples[role], _ = evaluate(
            workers[role], params, config.num_eval_tasks, config.num_eval_samples, seed
        )
        # A reply that is graded again has scores of its own names: LABEL/return.
        metrics |= {f"{role}{'.' if '/' in name else '/'}{name}": x for name, x in scores.items()}
    metrics["times/test"] = time.perf_counter() - clock
    return metrics, examples["test_env"]
