"""Tic-tac-toe: the policy plays x, from positions in which it can at least draw, against o.

A board is a text of nine characters: x, o, and the number of each free cell, from 1 at the top left to 9 at the bottom
right. Perfect play wins or draws every game; from the empty board it draws against a perfect opponent.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

from envs.base import Env, Episode, Problem, Step, check_choice, choose_split
from utils.settings.errors import UserError

WIN = 1.0  # rewards of x
DRAW = 0.5
LOSS = 0.0
OUTCOMES = {WIN: "win", DRAW: "draw", LOSS: "loss"}
EMPTY = "123456789"
ROWS = ((0, 1, 2), (3, 4, 5), (6, 7, 8))  # indices of cells
COLUMNS = ((0, 3, 6), (1, 4, 7), (2, 5, 8))
DIAGONALS = ((0, 4, 8), (2, 4, 6))
ROTATED = (6, 3, 0, 7, 4, 1, 8, 5, 2)  # the index from which each cell of a rotated board comes
MIRRORED = (2, 1, 0, 5, 4, 3, 8, 7, 6)
NUMBER = re.compile(r"[0-9]+")
OPPONENTS = ("random", "minimax")
PROMPTS = {
    "bare": "Play x.\n{board}",
    "full": "We play tic-tac-toe: you are x, I am o, and it is your move. Free cells show their number. Answer with "
    "the number of a free cell only.\n\n{board}",
}
NUM_TASKS = {"train": 100_000, "test": 512}


@dataclass(eq=False)
class TicTacToe(Env):
    """Reward 1 for a win, 0.5 for a draw. A result is correct if perfect play against perfect play gets no more.

    A problem is a position after `max_plies` random moves or fewer, half of them begun by o. One in five positions, up
    to rotation and reflection, is for the test split. No training game begins there, but it may pass through one.
    """

    is_generated = True
    tokens_per_action = 256

    split: str = "train"
    opponent: str = "random"  # random, or minimax: a random one of the best moves
    max_plies: int = 5
    max_turns: int = 7  # the five moves of x on an empty board, and two that are illegal
    prompt: str = "full"
    tokens_per_turn: int = 8

    def __post_init__(self):
        check_choice("opponent", self.opponent, OPPONENTS)
        check_choice("prompt", self.prompt, PROMPTS)
        if not 0 <= self.max_plies <= 8 or self.max_turns < 5:
            raise UserError("TicTacToe needs max_plies from 0 to 8, and max_turns >= 5: correct --env_options")
        self.num_tasks = NUM_TASKS[self.split]
        self.problem(0)  # options that leave a split without a position fail here

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"tictactoe {self.split} {index}")
        for _ in range(10_000):
            board = EMPTY
            for plies_left in range(rng.randint(0, self.max_plies), 0, -1):  # the last one by o
                board = board.replace(rng.choice(free_cells(board)), "xo"[plies_left % 2])
            is_test = choose_split(canonical(board)) == "test"
            is_playable = final_reward(board) is None and minimax_value(board, "x") >= DRAW  # x can at least draw
            if is_test == (self.split == "test") and is_playable:
                prompt = PROMPTS[self.prompt].format(board=format_board(board))
                return Problem([{"role": "user", "content": prompt}], board)
        raise UserError(f"no position of TicTacToe is left for the {self.split} split: raise max_plies")

    def episode(self, problem: Problem, seed: int) -> Episode:
        return TicTacToeEpisode(problem.answer, self.opponent, seed)

    def examples(self, problem: Problem) -> dict[str, str]:
        board = problem.answer
        winning = [cell for cell in free_cells(board) if final_reward(board.replace(cell, "x")) == WIN]
        return {"right": winning[0], "wrong": "0"} if winning else {}

    def answer(self, text: str) -> str | None:
        return None  # a move is no vote


class TicTacToeEpisode(Episode):
    """A game: the last number of a reply is the cell of x."""

    def __init__(self, board: str, opponent: str, seed: int):
        self.board = board
        self.opponent = opponent
        self.value = minimax_value(board, "x")
        self.rng = random.Random(seed)

    def step(self, reply: str) -> Step:
        numbers = NUMBER.findall(reply)
        if not numbers or numbers[-1] not in free_cells(self.board):
            return Step([{"role": "user", "content": format_board(self.board)}], info={"invalid": 1.0})
        self.board = self.board.replace(numbers[-1], "x")
        if final_reward(self.board) is None:
            cells = best_moves(self.board, "o") if self.opponent == "minimax" else free_cells(self.board)
            self.board = self.board.replace(self.rng.choice(cells), "o")
        reward = final_reward(self.board)
        if reward is None:
            return Step([{"role": "user", "content": format_board(self.board)}])
        is_correct = reward >= self.value
        info = {"correct_answer": float(is_correct), OUTCOMES[reward]: 1.0}
        return Step([], reward, done=True, info=info)


def format_board(board: str) -> str:
    """Returns a board as three lines of three cells."""
    rows = [" ".join(board[start : start + 3]) for start in (0, 3, 6)]
    return "\n".join(rows)


def free_cells(board: str) -> list[str]:
    """Returns the legal moves."""
    return [cell for cell in board if cell.isdigit()]


def final_reward(board: str) -> float | None:
    """Returns the reward of x in a game that is over, None in one that is not."""
    for line in ROWS + COLUMNS + DIAGONALS:
        cells = {board[i] for i in line}
        if len(cells) == 1:
            return WIN if "x" in cells else LOSS
    return None if free_cells(board) else DRAW


@cache
def minimax_value(board: str, player: str) -> float:
    """Returns the reward of x if both sides play perfectly and `player` is to move."""
    reward = final_reward(board)
    if reward is not None:
        return reward
    values = [move_value(board, cell, player) for cell in free_cells(board)]
    return max(values) if player == "x" else min(values)


def move_value(board: str, cell: str, player: str) -> float:
    """Returns the reward of x if `player` takes this cell and both sides play perfectly from then on."""
    opponent = "o" if player == "x" else "x"
    return minimax_value(board.replace(cell, player), opponent)


def best_moves(board: str, player: str) -> list[str]:
    """Returns the moves that keep the value of the position."""
    value = minimax_value(board, player)
    return [cell for cell in free_cells(board) if move_value(board, cell, player) == value]


def canonical(board: str) -> str:
    """Returns one text for the eight boards that are the same up to rotation and reflection."""
    board = re.sub("[1-9]", ".", board)
    images = []
    for _ in range(4):
        board = "".join(board[i] for i in ROTATED)
        images += [board, "".join(board[i] for i in MIRRORED)]
    return min(images)
