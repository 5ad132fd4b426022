"""Least seconds of sampling, against loops."""

from dataclasses import replace

import numpy as np
import pytest

from bench.limits import Limits, decode_seconds
from models.architecture import Decoder
from utils.batching import RowSizes

MODEL = Decoder(512, 128, 384, 3, 4, 2, 32, remat="none", unroll=True)


@pytest.mark.parametrize("window", [0, 4])
def test_seconds_of_decoding_are_those_of_a_loop_over_its_tokens(window):
    """In float64: two rows of a prompt, one with an observation, and a row without a completion."""
    kinds = ("full_attention", "sliding_attention", "full_attention") if window else ()
    model = replace(MODEL, layer_types=kinds, sliding_window=window)
    limits = Limits(0.75, 1.0)  # two rows are bound by products with weights, one row by their bytes
    prompts = np.array([0, 0, 1])
    prompt_lengths = np.array([3, 3, 5])
    lengths = np.array([7, 8, 5])
    drawn = [
        [3, 4, 5, 6],
        [3, 6, 7],
        [],
    ]  # the second row's columns 4 and 5 are an observation
    head = 512 * 128
    layers = 3 * (128 * (2 * 128 + 2 * 64) + 3 * 128 * 384 + 2 * 128 + 2 * 32) + 128
    expected = 0.0
    at_once = {(prompts[row], c, c) for row in range(3) for c in range(1, prompt_lengths[row])}
    read, products = np.zeros(3), np.zeros(3)  # of attention, by layer
    seen = [lambda c: range(c), lambda c: range(max(0, c - window) if window else 0, c), lambda c: range(c)]
    for step in range(4):
        live = [(row, columns[step]) for row, columns in enumerate(drawn) if step < len(columns)]
        expected += max(2 * layers * len(live) / 0.75, 4 * layers)
        expected += max(2 * head * len(live) / 0.75, 4 * (head + 512 * len(live)))
        for layer, of_column in enumerate(seen):
            keys = {(prompts[row] if c < 3 else (row, "own"), c) for row, column in live for c in of_column(column)}
            read[layer] += len(keys) * 2 * 2 * 32 * 4
            products[layer] += sum(len(of_column(column)) for _, column in live) * 4 * 4 * 32
    at_once |= {("observed", 4, 4), ("observed", 5, 5)}
    expected += np.maximum(products / 0.75, read).sum() + len(at_once) * 2 * layers / 0.75
    expected += sum(len(of_column(c)) * 4 * 4 * 32 for of_column in seen for *_, c in at_once) / 0.75
    is_target = np.zeros((3, 16), bool)
    for row, columns in enumerate(drawn):
        is_target[row, columns] = True
    for width in (8, 16):
        rows = RowSizes(prompts, prompt_lengths, lengths, is_target[:, :width])
        assert decode_seconds(model, rows, limits) == pytest.approx(expected, rel=1e-12)
