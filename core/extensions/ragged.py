"""Chains whose rows go on at lengths of their own, as those of conversations do.

S sampler slots, s columns of a segment.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from core.sampler import Chain, decode_segment


class RaggedChain(Chain):
    """Completions in turns: a row draws until its turn ends, each from its own column on."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        num_rows = len(self.keys)
        self.num_tokens = np.zeros(num_rows, int)  # behind the prompt
        self.turn_starts = np.zeros(num_rows, int)
        self.is_drawing = np.ones(num_rows, bool)

    def turn_limits(self) -> Int[np.ndarray, "B"]:
        """Returns the column of each row before which its turn must end."""
        return np.full(len(self.num_tokens), self.sampler.max_new_tokens)

    def end_turn(self, row: int, is_cut_off: bool) -> None:
        """Takes a row whose turn ended with its last token, or at its limit."""
        raise NotImplementedError

    def next_columns(self) -> Int[np.ndarray, "S"]:
        """Returns the column of each slot's next token."""
        return np.int32(self.num_tokens[np.maximum(self.slots, 0)])

    def grow_for(self, num_tokens: int) -> None:
        """Widens the cache for `num_tokens` more of the longest row that draws."""
        longest = int(self.num_tokens[self.is_drawing].max()) + num_tokens
        self.grow(min(longest, self.sampler.max_new_tokens))

    def draw_segment(self, steps: int) -> None:
        """Draws the next tokens of all rows whose turn it is."""
        self.grow_for(steps)
        self.add_columns(self.decode(steps), np.full(len(self.slots), steps), num_passes=steps)

    def decode(self, steps: int, program: Callable[..., tuple] = decode_segment) -> Sequence[np.ndarray]:
        """Returns what a segment draws for each slot, on the host."""
        rows = np.maximum(self.slots, 0)
        settings = self.sampler.model, self.sampler.distribution, steps
        arguments = self.weights_of(rows), self.prompt_cache, self.cache
        state = self.layout.put((self.next_columns(), self.starts, self.last_tokens[rows], self.keys[rows]))
        self.cache, columns = program(*settings, *arguments, *state)
        return self.layout.fetch(columns)

    def add_columns(
        self, columns: Sequence[np.ndarray], counts: Int[np.ndarray, "S"], num_passes: int
    ) -> Int[np.ndarray, "R"]:
        """Adds the first `counts` tokens that were drawn for each drawing row; returns the slots of these rows."""
        drawing = np.flatnonzero(self.slots >= 0)
        drawing = drawing[self.is_drawing[self.slots[drawing]]]
        for slot in drawing.tolist():
            row = int(self.slots[slot])
            self.drawn.slot_steps[row] += len(self.slots) * num_passes / len(drawing)
            self.add_drawn(row, [x[slot, : counts[slot]] for x in columns])
        return drawing

    def add_drawn(self, row: int, columns: Sequence[np.ndarray]) -> None:
        """Adds tokens that were drawn for a row, up to the end of its turn."""
        drawn = self.drawn
        start, turn_start = int(self.num_tokens[row]), int(self.turn_starts[row])
        limit = int(self.turn_limits()[row])
        stop = min(start + len(columns[0]), limit)
        arrays = drawn.tokens, drawn.logprobs, drawn.support, drawn.routes
        for array, column in zip(arrays, columns, strict=True):
            array[row, start:stop] = column[: stop - start]
        turn = drawn.tokens[row, turn_start:stop]
        end = self.sampler.completion_end(turn, start - turn_start, stop - turn_start)
        stop = turn_start + end if end else stop
        drawn.mask[row, start:stop] = True
        self.num_tokens[row] = stop
        self.last_tokens[row] = drawn.tokens[row, stop - 1]
        if end or stop == limit:
            self.is_drawing[row] = False
            self.end_turn(row, is_cut_off=not end)
