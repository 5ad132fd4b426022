"""Makes models/player: a 0.85M-parameter Qwen3 that plays games of several turns by their rules, but badly.

    python models/make_player.py            # 30 minutes on two cores; resumes where it was stopped

1. Tokenizer: as that of models/tiny, with the signs of calls of the calculator, and a ChatML template without thinking.
2. Pre-training: next-token prediction on episodes of envs/guess.py, envs/calculator.py, envs/tictactoe.py and
   envs/gridworld.py, what the environment says included. Most are played carelessly, a few by an expert: numbers from
   the middle of what is left, the calculator for each expression, moves that a search finds.

What it leaves for RL to find: play each turn as the few experts do. Problems of the test splits never occur.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from absl import app, flags
from transformers import PreTrainedTokenizerFast

from envs import calculator, gridworld, guess, tictactoe
from envs.base import DIALECTS, INLINE, Env, Problem, Reply, Step
from models.pretraining import Document, make_tokenizer, pretrain
from models.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
STEPS = 4000
TURN_WEIGHT = 2.0  # of the loss on turns of the policy
OTHER_WEIGHT = 0.5  # and on what is said to it
MAX_TURNS = 8
EXPERTS = 0.15  # share of the episodes
RULE_BREAKS = 0.02  # share of the careless turns that are no move at all
FORGETTING = 0.5  # share of the careless guesses that leave out what was said to those before
RIGHT_SUMS = 0.3  # share of the careless sums
SIGNS = DIALECTS["python"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


class Game(NamedTuple):
    """An environment, its share of the documents, and a turn of a careless player or an expert."""

    env: Env
    share: float
    play: Callable[..., str]


def play_guess(problem: Problem, episode: guess.GuessEpisode, is_expert: bool, rng: random.Random) -> str:
    """Returns a number: the middle of what is left, or any."""
    low, high = episode.low, episode.high
    if is_expert:
        return str((low + high + rng.randint(0, 1)) // 2)
    if rng.random() < FORGETTING:
        low, high = problem.answer.low, problem.answer.high
    return str(rng.randint(low, high))


def play_calculator(
    problem: Problem, episode: calculator.CalculatorEpisode, is_expert: bool, rng: random.Random
) -> str:
    """Returns a call, an answer behind one, or an answer without one, which is often wrong."""
    expression = problem.messages[0]["content"].removesuffix(" = ?")
    if is_expert and not episode.num_calls:
        return SIGNS.opening + expression + SIGNS.closing
    value = int(problem.answer)
    if not is_expert and rng.random() > RIGHT_SUMS:
        value += rng.choice([-10, -2, -1, 1, 2, 10])
    return str(value)


def play_tictactoe(
    problem: Problem, episode: tictactoe.TicTacToeEpisode, is_expert: bool, rng: random.Random
) -> str:
    """Returns a cell: one that keeps the value of the position, or any that is free."""
    if is_expert:
        return rng.choice(tictactoe.best_moves(episode.board, "x"))
    return rng.choice(tictactoe.free_cells(episode.board))


def play_gridworld(
    problem: Problem, episode: gridworld.GridworldEpisode, is_expert: bool, rng: random.Random
) -> str:
    """Returns a direction: one that leads nearer to the goal, or any."""
    moves = gridworld.best_moves(episode.lake, episode.cell) if is_expert else list(gridworld.MOVES)
    return rng.choice(moves)


GAMES = {
    "guess": Game(guess.Guess(prompt="bare", min_size=8), 0.35, play_guess),
    "calculator": Game(
        calculator.Calculator(prompt="bare", dialect="python", max_number=50, max_operations=2), 0.2, play_calculator
    ),
    "random": Game(tictactoe.TicTacToe(prompt="bare", opponent="random"), 0.1, play_tictactoe),
    "minimax": Game(tictactoe.TicTacToe(prompt="bare", opponent="minimax"), 0.2, play_tictactoe),
    "gridworld": Game(gridworld.Gridworld(prompt="bare"), 0.15, play_gridworld),
}


class Writer:
    """Writes documents: episodes as the policy sees them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = Tokenizer(tokenizer)

    def write(self, numbers: range, rng: random.Random) -> list[Document]:
        """Returns documents with these numbers."""
        games = rng.choices(list(GAMES.values()), [game.share for game in GAMES.values()], k=len(numbers))
        return [self.episode(game, i, rng) for game, i in zip(games, numbers, strict=True)]

    def episode(self, game: Game, i: int, rng: random.Random) -> Document:
        """Returns an episode played by a careless player or an expert."""
        problem = game.env.problem(i % game.env.num_tasks)
        episode = game.env.episode(problem, rng.getrandbits(32))
        is_expert = rng.random() < EXPERTS
        ids = self.tokenizer.chat(problem.messages)
        weights = [OTHER_WEIGHT] * len(ids)
        for _ in range(min(MAX_TURNS, game.env.max_turns)):
            text = game.play(problem, episode, is_expert, rng)
            if not is_expert and rng.random() < RULE_BREAKS:
                text = rng.choice(["0", "x", "no"])
            turn = self.turn(text)
            ids += turn
            weights += [TURN_WEIGHT] * len(turn)
            step = episode.act(Reply(text, self.tokenizer.calls(turn, SIGNS.opening, SIGNS.closing)))
            if step.done:
                break
            observation = self.observation(step)
            ids += observation
            weights += [OTHER_WEIGHT] * len(observation)
        return Document(ids, weights)

    def turn(self, text: str) -> list[int]:
        """Returns the tokens of a turn, which a call or the stop token ends."""
        ids = self.tokenizer.encode(text)
        return ids if text.endswith(SIGNS.closing) else [*ids, self.tokenizer.stop_ids[0]]

    def observation(self, step: Step) -> list[int]:
        """Returns the tokens of what the environment says."""
        if step.messages[0]["role"] == INLINE:
            return self.tokenizer.results(step.messages, SIGNS.result_opening, SIGNS.result_closing)
        return self.tokenizer.bridge(step.messages).ids


def make_corpus() -> list[str]:
    """Returns the texts that the tokenizer is trained on: every number, and what is said in games."""
    corpus = [" ".join(map(str, range(100)))] * 1000
    for game in GAMES.values():
        for i in range(300):
            corpus += [message["content"] for message in game.env.problem(i).messages]
    corpus += ["higher", "lower", "number?", "user\nassistant\nsystem", *gridworld.MOVES] * 300
    return corpus


def main(_):
    tags = [*SIGNS, *DIALECTS["qwen"][:2], "<think>", "</think>"]
    tokenizer = make_tokenizer(make_corpus(), tags, CHAT_TEMPLATE)
    pretrain(Path(FLAGS.out), tokenizer, Writer(tokenizer).write, FLAGS.steps, FLAGS.seed)


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("out", str(HERE / "player"), "folder to write")
    flags.DEFINE_integer("steps", STEPS, "optimiser steps")
    flags.DEFINE_integer("seed", 0, "of the initial parameters")
    app.run(main)
