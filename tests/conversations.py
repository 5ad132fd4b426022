"""Conversations of the small model with a made-up environment. Letters: G samples of a prompt."""

import random
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import jax
import numpy as np

from core.records import Completions
from core.sampler import Next, Sampler, Turn
from models.architecture import Decoder
from tests.helpers import MODEL, assert_close, depth, random_params

LIMIT, WIDTH = 120, 160  # tokens behind a prompt; of a row of the reference, which holds every row here
TURN, MAX_TURNS = 7, 5
SEED = 2
IDS = (11, 4, 290, 5)
G = 4
PROMPTS = [np.random.default_rng(i).integers(0, MODEL.vocab_size, n).tolist() for i, n in enumerate((3, 12, 1, 9))]
STOPS = tuple(range(15, MODEL.vocab_size, 20))
OPERATIONS = depth(MODEL, WIDTH)
LOGIT = 12.0


def answer(turns: list[list[int]], num_left: int) -> Next:
    """What a made-up environment says: a few tokens or many, by the turns so far."""
    rng = random.Random(str(turns))
    if len(turns) == MAX_TURNS or rng.random() < 0.1:
        return Next(finished=True)
    tokens = [rng.randrange(MODEL.vocab_size) for _ in range(rng.choice((1, 3, 15, 16, 17, 70)))]
    return Next(tokens) if len(tokens) < num_left else Next()


class Script:
    """An environment whose answers come after `latency(row, number of the turn)` questions."""

    def __init__(self, latency: Callable[[int, int], int] = lambda row, turn: 0, tokens_per_turn: int = TURN):
        self.latency, self.tokens_per_turn = latency, tokens_per_turn
        self.turns, self.left, self.delay = defaultdict(list), {}, {}

    def on_end(self, turn: Turn) -> None:
        self.turns[turn.row].append(turn.tokens.tolist())
        self.left[turn.row] = -1 if turn.is_truncated and not turn.num_left else turn.num_left
        self.delay[turn.row] = self.latency(turn.row, len(self.turns[turn.row]))

    def on_wait(self, rows, is_idle, seconds, num_sampling):
        found = {}
        while rows and not found:
            found = {row: answer(self.turns[row], self.left[row]) for row in rows if not self.delay[row]}
            self.delay.update({row: max(0, self.delay[row] - 1) for row in rows})
            if not is_idle:
                break
        return found

    def sampler(self, model: Decoder, **settings) -> Sampler:
        hooks = {"on_end": self.on_end, "on_wait": self.on_wait, "tokens_per_turn": self.tokens_per_turn}
        return Sampler(model, LIMIT, STOPS, **{"segment": 4} | hooks | settings)


def draw_all(script: Script | None = None, model=MODEL, prompts=PROMPTS, ids=IDS, **settings) -> Completions:
    sampler = (script or Script()).sampler(model, **settings)
    weights = sampler.load_weights(random_params(model))
    return sampler.generate(weights, prompts, np.array(ids), G, jax.random.key(SEED))


@cache
def conversations(model=MODEL) -> Completions:
    return draw_all(model=model)


def rows_of(r: Completions, ids=IDS) -> dict[tuple[int, int], tuple]:
    """What is known of each row, by (task, sample)."""
    names = [(i, sample) for i in ids for sample in range(G)]
    rows = zip(names, r.tokens, r.mask, r.logprobs, r.prompt_lengths, r.lengths, r.finished, strict=True)
    return {name: (x[:n].tolist(), m[:n].tolist(), p[start:n], bool(end)) for name, x, m, p, start, n, end in rows}


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() <= expected.keys()
    for name, (tokens, mask, logprobs, finished) in found.items():
        assert (tokens, mask, finished) == (expected[name][0], expected[name][1], expected[name][3]), name
        assert_close(logprobs, expected[name][2], OPERATIONS, LOGIT)
