"""Compiles every program of a run before its first step: minutes at its start, and no step waits for the compiler."""

from dataclasses import replace
from typing import Any

import jax

from utils.evaluation.preview import prompt_lengths
from utils.metrics.terminal import waiting
from utils.training.batching import bucket, draw_sizes, power_below
from utils.training.state import fingerprint


@waiting("compiling ahead")
def precompile(config: Any, players: dict[str, Any], learner: Any, state: Any) -> tuple[dict[str, Any], Any]:
    """Returns players by role ("env" trains) and learner, all compiled for prompts of the lengths that were looked at.

    Those are all prompts of an environment, or 1,000 of a large one; all prompts are padded as the longest one from now
    on, so that there are few shapes.
    """
    jax.random.fold_in(jax.random.key(config.seed), 0), fingerprint(state)
    lengths = {role: prompt_lengths(player.env, player.encode, player.tasks) for role, player in players.items()}
    players = {
        role: replace(player, sampler=replace(player.sampler, prompt_columns=bucket(max(lengths[role]) - 1)))
        for role, player in players.items()
    }
    player, shortest, longest = players["env"], min(lengths["env"]), max(lengths["env"])
    largest = player.num_prompts(config.groups_per_batch, config.group_size)
    refills = draw_sizes(largest) if config.most_groups > largest else []
    for num_prompts in {largest, *refills, config.most_groups % largest} - {0}:
        player.rehearse(state.params, num_prompts, config.group_size)
    for role in players.keys() - {"env"}:
        tester, num_tasks = players[role], players[role].num_eval_tasks(config.num_eval_tasks)
        tester.rehearse(state.params, num_tasks, config.num_eval_samples)
        if config.test_greedy and role == "test_env":
            tester.greedy().rehearse(state.params, num_tasks, 1)
    learner = replace(learner, first=power_below(shortest))
    for width in {bucket(n): None for n in range(shortest + 1, longest + config.num_generation_tokens + 1)}:
        learner.rehearse(state, width)
    return players, learner
