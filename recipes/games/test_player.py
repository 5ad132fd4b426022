"""Documents that models/player was trained on: the tokens of a run, turn by turn."""

import random
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest

from core.chains.turns import Conversations
from core.sampler import Turn
from envs.scoring.scorer import Scorer, ScoringStream
from recipes.games.make_player import CELLS, CHAT_TEMPLATE, GAMES, TAGS, TURN_WEIGHT, Writer, make_corpus
from runs.pretraining import make_tokenizer, pad_documents
from utils.devices.sharding import single_device

OPTIONS = {
    "guess": {"min_size": 16},
    "calculator": {"dialect": "python", "max_number": 50, "max_operations": 2},
    "random": {},
    "minimax": {"opponent": "minimax"},
    "gridworld": {},
}


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(make_tokenizer(make_corpus(), TAGS, CHAT_TEMPLATE, CELLS))


@pytest.mark.parametrize("name", GAMES)
def test_documents_are_what_a_run_sees(name, writer):
    game = GAMES[name]
    env_name = "tictactoe" if name in ("random", "minimax") else name
    options = {"prompt": "bare", **OPTIONS[name]}
    with Scorer(env_name, options, num_workers=1) as scorer:
        for i in range(20):
            document = writer.episode(game, i, random.Random(i))
            problem = game.env.problem(i)
            keys = np.uint32([[0, random.Random(i).getrandbits(32)]])
            with ScoringStream(scorer) as stream:
                arguments = game.env, writer.tokenizer, single_device(), [problem], np.array([i]), keys, stream
                tokens = play(Conversations(*arguments), document, len(writer.tokenizer.chat(problem.messages)))
            assert document.ids[: len(tokens)] == tokens
            assert TURN_WEIGHT not in document.weights[len(tokens) :], "what is said to the last turn that is allowed"


def play(conversations: Conversations, document, num_prompt_tokens: int) -> list[int]:
    """The prompt and the turns of a document, with what the environment says to them."""
    tokens = document.ids[:num_prompt_tokens]
    parts = groupby(zip(document.ids, document.weights, strict=True), key=itemgetter(1))
    for weight, part in parts:
        if weight == TURN_WEIGHT:
            turn = [token for token, _ in part]
            conversations.on_end(Turn(0, np.array(turn), np.zeros(len(turn)), 1000, False, []))
            tokens += [*turn, *conversations.observe({0}, is_blocking=True)[0].tokens]
    return tokens


def test_padding_has_no_weight(writer):
    documents = writer.write(range(48), random.Random(0))
    tokens, weights = pad_documents(documents)
    lengths = [len(document.ids) for document in documents]
    assert tokens.shape == weights.shape
    assert tokens.shape[1] % 16 == 0
    assert [int((row > 0).sum()) for row in weights] == lengths
