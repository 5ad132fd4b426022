"""Conversations that a program began anew: rows beside those of a rollout, with the advantage of their program's row.

They count in no baseline. In a token mean they count by their tokens, as if the program had one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from core.records import Batch, Completions
from utils.batching import concatenate, select_rows


def with_forks(batch: Batch, forks: Sequence[Completions | None]) -> Batch:
    """Returns the batch with the forks of its rows behind them. `forks`: those of each row of the step's episodes."""
    found = [(place, forks[row]) for place, row in enumerate(np.asarray(batch.row).tolist()) if forks[row] is not None]
    if not found:
        return batch
    new = concatenate([completions for _, completions in found])
    parents = np.repeat([place for place, _ in found], [len(completions.lengths) for _, completions in found])
    behind = Batch(
        tokens=new.tokens,
        mask=new.mask,
        sample_logprobs=new.logprobs,
        rewards=np.full(len(parents), np.nan, np.float32),
        lengths=new.lengths,
        prompt_lengths=new.prompt_lengths,
        finished=new.finished,
        support=new.support,
        routes=new.routes,
        row=np.asarray(batch.row)[parents],
        token_rewards=None if batch.token_rewards is None else np.zeros(new.tokens.shape, np.float32),
        reward_parts={name: np.full(len(parents), np.nan, np.float32) for name in batch.reward_parts},
        parents=parents,
        extras=new.extras,
        group_size=batch.group_size,
    )
    return concatenate([replace(batch, parents=np.full(len(batch), -1)), behind])


def follow_parents(batch: Batch, compute: Callable[[Batch], Batch]) -> Batch:
    """Returns the batch with advantages: computed without forks, which then take those of their programs' last tokens.

    Forks of rows that are dropped are dropped. With a critic, which gives each token a value of its own, all are.
    """
    is_fork = batch.parents >= 0
    whole = compute(replace(select_rows(batch, np.flatnonzero(~is_fork)), parents=None))
    kept = {row: place for place, row in enumerate(whole.row.tolist())}
    forks = select_rows(batch, np.flatnonzero(is_fork & np.isin(batch.row, list(kept))))
    if not len(forks) or whole.returns is not None:
        return whole
    places = np.array([kept[row] for row in forks.row.tolist()])
    last = whole.mask.shape[1] - 1 - whole.mask[:, ::-1].argmax(axis=1)
    advantages = np.where(forks.mask, whole.advantages[places, last[places]][:, None], 0)
    forks = replace(forks, advantages=np.float32(advantages), token_rewards=None, reward_parts={}, parents=None)
    return concatenate([whole, forks])
