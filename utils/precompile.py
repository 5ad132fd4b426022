"""Compiles every program of a run before its first step: minutes at its start, and no step waits for the compiler."""

from dataclasses import replace
from typing import Any

import jax

from utils.batching import bucket, power_below
from utils.progress import waiting
from utils.show import prompt_lengths
from utils.train_state import fingerprint


@waiting("compiling ahead")
def precompile(config: Any, players: list, learner: Any, state: Any) -> tuple[list, Any]:
    """Players and learner for which all is compiled, as long as no prompt is shorter or longer than those looked at.

    Those are all prompts of an environment, or 1,000 of a large one; all prompts are padded as the longest one from now
    on, so that there are few shapes.
    """
    jax.random.fold_in(jax.random.key(config.seed), 0), fingerprint(state)
    lengths = [prompt_lengths(player.env, player.encode, player.tasks) for player in players]
    players = [
        replace(player, sampler=replace(player.sampler, prompt_columns=bucket(max(each) - 1)))
        for player, each in zip(players, lengths, strict=True)
    ]
    player, shortest, longest = players[0], min(lengths[0]), max(lengths[0])
    draw, most = player.num_prompts(config.groups_per_batch, config.group_size), config.most_groups
    for num_prompts in {draw, most % draw} - {0}:
        player.rehearse(state.params, num_prompts, config.group_size)
    for tester in players[1:]:
        num_tasks = tester.num_eval_tasks(config.num_eval_tasks)
        tester.rehearse(state.params, num_tasks, config.num_eval_samples)
        if config.test_greedy:
            tester.greedy().rehearse(state.params, num_tasks, 1)
    learner = replace(learner, first=power_below(shortest))
    for width in {bucket(n): None for n in range(shortest + 1, longest + config.num_generation_tokens + 1)}:
        learner.rehearse(state, width)
    return players, learner
