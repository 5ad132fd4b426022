"""Makes models/player: a 0.85M-parameter Qwen3 that plays games of several turns by their rules, but badly.

    python recipes/games/make_player.py   # 40 minutes on two cores

1. Tokenizer: as that of models/tiny, with the signs of calls of the calculator, and a ChatML template without thinking.
2. Pre-training: next-token prediction on episodes of guess, calculator, tictactoe and gridworld,
   what the environment says included. Turns begin with what the player sees: "23-50:" for the
   numbers that are left, "3+5-:" for the cells that complete a line of its own (+) and of the opponent's (-). What
   follows is careless in most episodes, and in a few that of an expert: the middle, a call of the calculator, the best
   move. A few documents are lists of ranges with their middles.

What it leaves for RL to find: choose as the few experts do. Problems of the test splits never occur.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    import utils.settings.packages  # noqa: F401 (says what to install)

from absl import app, flags
from transformers import PreTrainedTokenizerFast

from envs.base import DIALECTS, INLINE, Env, Problem, Reply, Step
from envs.tools.episode import ToolEpisode
from models.tokenizer import Tokenizer
from recipes.games import calculator, gridworld, guess, tictactoe
from runs.pretraining import SPLIT, Document, make_muon, make_tokenizer, pretrain

MODELS = Path(__file__).resolve().parents[2] / "models"
STEPS = 3000
TURN_WEIGHT = 2.0  # of the loss on turns of the policy
OTHER_WEIGHT = 0.5  # and on what is said to it
RULE_BREAKS = 0.01  # share of the careless turns that are no move at all
NEAR_THE_END = 0.9  # share of the careless guesses that are in the last eighth of what is left, on either side
RIGHT_SUMS = 0.3  # share of the careless sums
SHARE_DRILLS = 0.1
LINE_SIGNS = {"+": "x", "-": "o"}
SIGNS = DIALECTS["python"]
TAGS = (*SIGNS, *DIALECTS["qwen"][:2], "<think>", "</think>")
CELLS = r" ?\p{N}(?!\p{N})|" + SPLIT  # a free cell of a board is one token, as a taken one
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


class Game(NamedTuple):
    """An environment, its share of the episodes, that of experts among its players, and a turn of a player."""

    env: Env
    share: float
    experts: float
    play: Callable[..., str]


def play_guess(problem: Problem, episode: guess.GuessEpisode, is_expert: bool, rng: random.Random) -> str:
    """Returns the numbers that are left, and the middle one or any."""
    low, high = episode.low, episode.high
    seen = f"{low}-{high}:"
    if is_expert:
        return seen + str((low + high) // 2)
    width = (high - low) // 8
    if rng.random() < NEAR_THE_END:
        low, high = rng.choice([(low, low + width), (high - width, high)])
    return seen + str(rng.randint(low, high))


def play_calculator(problem: Problem, episode: ToolEpisode, is_expert: bool, rng: random.Random) -> str:
    """Returns a call, an answer behind one, or an answer without one (often wrong)."""
    expression = problem.messages[0]["content"].removesuffix(" = ?")
    if is_expert and not episode.num_calls:
        return SIGNS.opening + expression + SIGNS.closing
    value = int(problem.answer)
    if not is_expert and rng.random() > RIGHT_SUMS:
        value += rng.choice([-10, -2, -1, 1, 2, 10])
    return str(value)


def play_tictactoe(problem: Problem, episode: tictactoe.TicTacToeEpisode, is_expert: bool, rng: random.Random) -> str:
    """Returns the cells that complete a line, of x and of o, and a free cell: a best one, or any."""
    board = episode.board
    cells = tictactoe.free_cells(board)
    seen = ""
    for cell in cells:
        rewards = {sign: tictactoe.final_reward(board.replace(cell, player)) for sign, player in LINE_SIGNS.items()}
        signs = [sign for sign, reward in rewards.items() if reward in (tictactoe.WIN, tictactoe.LOSS)]  # it wins
        seen += "".join([cell, *signs]) if signs else ""
    choice = tictactoe.best_moves(board, "x") if is_expert else cells
    return f"{seen}:{rng.choice(choice)}"


def play_gridworld(problem: Problem, episode: gridworld.GridworldEpisode, is_expert: bool, rng: random.Random) -> str:
    """Returns a direction: one that leads nearer to the goal, or any."""
    moves = gridworld.best_moves(episode.lake, episode.cell) if is_expert else list(gridworld.MOVES)
    return rng.choice(moves)


def drill(rng: random.Random) -> str:
    """Returns ranges with their middles."""
    ranges = []
    while len(ranges) < 12:
        low = rng.randint(1, 99)
        high = min(99, low + rng.randint(0, 30))
        ranges.append(f"{low}-{high}:{(low + high) // 2}")
    return ",".join(ranges)


SUMS = dict(prompt="bare", dialect="python", max_number=50, max_operations=2)
GAMES = {
    "guess": Game(guess.Guess(prompt="bare", min_size=16), 0.3, 0.15, play_guess),
    "calculator": Game(calculator.Calculator(**SUMS), 0.2, 0.4, play_calculator),
    "random": Game(tictactoe.TicTacToe(prompt="bare", opponent="random"), 0.1, 0.2, play_tictactoe),
    "minimax": Game(tictactoe.TicTacToe(prompt="bare", opponent="minimax"), 0.3, 0.2, play_tictactoe),
    "gridworld": Game(gridworld.Gridworld(prompt="bare"), 0.1, 0.3, play_gridworld),
}


class Writer:
    """Writes documents: episodes as the policy sees them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = Tokenizer(tokenizer)

    def write(self, numbers: range, rng: random.Random) -> list[Document]:
        """Returns documents with these numbers."""
        games = rng.choices(list(GAMES.values()), [game.share for game in GAMES.values()], k=len(numbers))
        return [self.document(game, i, rng) for game, i in zip(games, numbers, strict=True)]

    def document(self, game: Game, i: int, rng: random.Random) -> Document:
        """Returns an episode, or a drill."""
        if rng.random() < SHARE_DRILLS:
            ids = self.tokenizer.encode(drill(rng))
            return Document(ids, [TURN_WEIGHT] * len(ids))
        return self.episode(game, i, rng)

    def episode(self, game: Game, i: int, rng: random.Random) -> Document:
        """Returns an episode played by a careless player or an expert."""
        problem = game.env.problem(i % game.env.num_tasks)
        episode = game.env.episode(problem, rng.getrandbits(32))
        is_expert = rng.random() < game.experts
        ids = self.tokenizer.chat(problem.messages)
        weights = [OTHER_WEIGHT] * len(ids)
        for _ in range(game.env.max_turns):
            text = game.play(problem, episode, is_expert, rng)
            if not is_expert and rng.random() < RULE_BREAKS:
                text = rng.choice(["0", "x", "no"])
            turn = self.turn(text)
            ids += turn
            weights += [TURN_WEIGHT] * len(turn)
            step = episode.act(Reply(text, self.tokenizer.calls(turn, SIGNS.opening, SIGNS.closing)))
            if step.done:
                break
            observation = self.observation(problem.messages, step)
            ids += observation
            weights += [OTHER_WEIGHT] * len(observation)
        return Document(ids, weights)

    def turn(self, text: str) -> list[int]:
        """Returns the tokens of a turn, which a call or the stop token ends."""
        ids = self.tokenizer.encode(text)
        return ids if text.endswith(SIGNS.closing) else [*ids, self.tokenizer.stop_ids[0]]

    def observation(self, messages: list[dict[str, str]], step: Step) -> list[int]:
        """Returns the tokens of an observation."""
        if step.messages[0]["role"] == INLINE:
            return self.tokenizer.results(step.messages, SIGNS.result_opening, SIGNS.result_closing)
        return self.tokenizer.bridge(messages, step.messages).ids


def make_corpus() -> list[str]:
    """Returns the texts that the tokenizer is trained on: every number, and the games' observations."""
    corpus = [" ".join(map(str, range(100)))] * 1000
    for game in GAMES.values():
        for i in range(300):
            corpus += [message["content"] for message in game.env.problem(i).messages]
    rng = random.Random(0)
    corpus += [drill(rng) for _ in range(100)]
    corpus += ["higher", "lower", "number?", "user\nassistant\nsystem", *gridworld.MOVES] * 300
    return corpus


def main(_):
    tokenizer = make_tokenizer(make_corpus(), TAGS, CHAT_TEMPLATE, CELLS)
    pretrain(Path(FLAGS.out), tokenizer, Writer(tokenizer).write, FLAGS.steps, FLAGS.seed, make_muon(FLAGS.steps))


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("out", str(MODELS / "player"), "folder to write")
    flags.DEFINE_integer("steps", STEPS, "optimizer steps")
    flags.DEFINE_integer("seed", 0, "of the initial parameters")
    app.run(main)
