"""Rows while they are sampled: their tokens, how far each of them is, and what listeners get and return.

B rows, R some of them, A columns after the prompt, s steps of a segment.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt32

from core.records import Completions
from models.architecture import Decoder
from models.distribution import Distribution


class Segment(NamedTuple):
    """The completions of a scheduler after a segment of its decode steps."""

    first_row: int  # number of its first row in the call
    tokens: Int[np.ndarray, "B A"]
    num_sampled: int  # columns of tokens, so far
    lengths: Int[np.ndarray, "B"]  # tokens of completions; above `num_sampled` if a row goes on


class Turn(NamedTuple):
    """A reply of a row, whole or so far."""

    row: int  # number in the call
    tokens: Int[np.ndarray, "A"]
    logprobs: Float[np.ndarray, "A"]
    num_left: int  # tokens that still fit into the row
    is_truncated: bool  # it has reached a limit without a stop
    context: list[int]  # ids before it, with the prompt


class Stops(NamedTuple):
    """What ends a reply, besides what ends all."""

    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()


class Next(NamedTuple):
    """What follows a reply: tokens to append, after which the row continues; without tokens, its end."""

    tokens: Sequence[int] = ()
    finished: bool = False  # the row ended in another way than by the limit of tokens
    begins: bool = False  # the tokens are the prompt of a row, which begins anew
    key: UInt32[np.ndarray, "2"] | None = None  # of a row that begins
    num_kept: int | None = None  # tokens of the reply that stay; None: all
    limit: int = 0  # tokens of the next reply; 0: the sampler's limit
    stops: Stops | None = None
    distribution: Distribution | None = None  # None: the sampler's


class Rows:
    """Arrays of rows, filled segment by segment; rows of a prompt are adjacent. An empty prompt is given later."""

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[list[int]],
        num_rows: int,
        num_columns: int,
        distribution: Distribution,
    ):
        self.prompts = [prompt for prompt in prompts for _ in range(num_rows // len(prompts))]
        support_size = distribution.support_size(model.vocab_size)
        self.prompt_lengths = np.array([len(prompt) for prompt in self.prompts])
        self.tokens = np.zeros((num_rows, num_columns), np.int32)
        self.logprobs = np.zeros((num_rows, num_columns), np.float32)
        self.mask = np.zeros((num_rows, num_columns), bool)
        self.support = np.zeros((num_rows, num_columns, support_size), np.int32)
        self.routes = np.zeros((num_rows, num_columns, *model.route_shape), np.int16)
        self.num_tokens = np.zeros(num_rows, int)  # after the prompt
        self.num_launched = np.zeros(num_rows, int)  # tokens, with those of segments whose results are not read yet
        self.num_cached = np.zeros(num_rows, int)  # tokens of prompt and completion in the cache
        self.num_lost = np.zeros(num_rows, int)  # cached tokens, when the row was put aside
        self.num_recomputed = np.zeros(num_rows, int)
        self.num_observed = np.zeros(num_rows, int)  # tokens of an environment
        self.slot_steps = np.zeros(num_rows)
        self.versions = np.zeros(num_rows, int)  # results of segments for an earlier version are ignored
        self.starts = np.zeros(num_rows, int)  # first columns of the replies that are sampled
        self.limits = np.full(num_rows, num_columns)  # columns before which these replies end
        self.capacities = np.full(num_rows, num_columns)  # columns that rows may fill: a longer prompt leaves fewer
        self.is_sampling = self.prompt_lengths > 0  # if not, the row waits for what follows its reply, or is over
        self.is_over = np.zeros(num_rows, bool)
        self.finished = np.zeros(num_rows, bool)
        self.stops: dict[int, Stops] = {}  # of rows whose reply has its own
        self.distributions: dict[int, Distribution] = {}

    def add(
        self,
        rows: Int[np.ndarray, "R"],
        starts: Int[np.ndarray, "R"],
        counts: Int[np.ndarray, "R"],
        results: Sequence[np.ndarray],
    ) -> None:
        """Writes the first `counts` tokens that were sampled for rows, from the columns `starts` on."""
        i, j = np.nonzero(np.arange(results[0].shape[1]) < counts[:, None])
        places = rows[i], starts[i] + j
        for array, new in zip((self.tokens, self.logprobs, self.support, self.routes), results, strict=True):
            array[places] = new[i, j]
        self.mask[places] = True
        self.num_tokens[rows] += counts

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Appends tokens to a row that were not sampled."""
        start = int(self.num_tokens[row])
        self.tokens[row, start : start + len(tokens)] = tokens
        self.num_tokens[row] = self.num_launched[row] = start + len(tokens)

    def take_back(self, row: int, num_tokens: int) -> None:
        """Takes a row back to its first tokens: what was launched after them does not belong to it."""
        for column in (self.mask, self.logprobs, self.support, self.routes):
            column[row, num_tokens : self.num_tokens[row]] = 0
        self.num_tokens[row] = self.num_launched[row] = num_tokens
        self.num_cached[row] = min(self.num_cached[row], self.prompt_lengths[row] - 1 + num_tokens)
        self.versions[row] += 1

    def restart(self, row: int, prompt: list[int]) -> None:
        """Gives a row a prompt; what it held is forgotten."""
        for numbers in (self.num_tokens, self.num_launched, self.num_cached, self.num_lost, self.starts):
            numbers[row] = 0
        self.versions[row] += 1
        self.prompts[row], self.prompt_lengths[row] = prompt, len(prompt)

    def lose(self, rows: Sequence[int]) -> None:
        """Forgets the cache of rows that were put aside: it is computed again from their tokens."""
        self.num_lost[rows], self.num_cached[rows] = self.num_cached[rows], 0

    def begin_reply(self, row: int, limit: int, following: Next) -> None:
        """Begins the next reply of a row, which ends before the column `limit`."""
        self.starts[row], self.limits[row], self.is_sampling[row] = self.num_tokens[row], limit, True
        for own, value in (self.stops, following.stops), (self.distributions, following.distribution):
            own.pop(row, None)
            own.update({row: value} if value else {})

    def turn(self, row: int, first_row: int, is_truncated: bool = False) -> Turn:
        """Returns the reply of a row so far; `first_row`: number of the first row in the call."""
        start, stop = int(self.starts[row]), int(self.num_tokens[row])
        context = [*self.prompts[row], *self.tokens[row, :start].tolist()]
        columns = self.tokens[row, start:stop].copy(), self.logprobs[row, start:stop].copy()
        return Turn(first_row + row, *columns, int(self.capacities[row]) - stop, is_truncated, context)

    def last_tokens(self, rows: Int[np.ndarray, "R"]) -> Int[np.ndarray, "R"]:
        """Returns the last known token of each row."""
        of_prompts = np.array([self.prompts[row][-1] for row in rows], np.int32)
        return np.where(self.num_tokens[rows], self.tokens[rows, self.num_tokens[rows] - 1], of_prompts)

    def completions(self) -> Completions:
        """Returns each row's completion after its prompt."""
        lengths = self.prompt_lengths + self.num_tokens
        columns = np.arange(lengths.max()) - self.prompt_lengths[:, None]  # 0: the first of the completion
        is_completion = (columns >= 0) & (columns < self.num_tokens[:, None])
        source = np.clip(columns, 0, self.tokens.shape[1] - 1)

        def behind_prompt(x: np.ndarray) -> np.ndarray:
            axes = (...,) + (None,) * (x.ndim - 2)
            moved = np.take_along_axis(x, source[axes], axis=1)
            return np.where(is_completion[axes], moved, np.zeros((), x.dtype))

        tokens = behind_prompt(self.tokens)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
        return Completions(
            tokens=tokens,
            mask=behind_prompt(self.mask),
            logprobs=behind_prompt(self.logprobs),
            lengths=lengths,
            prompt_lengths=self.prompt_lengths,
            finished=self.finished,
            slot_steps=self.slot_steps,
            num_observed=self.num_observed,
            num_recomputed=self.num_recomputed,
            support=behind_prompt(self.support) if self.support.size else None,
            routes=behind_prompt(self.routes) if self.routes.size else None,
        )
