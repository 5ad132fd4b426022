"""Gridworld: a walk to a goal between holes, FrozenLake in text (gymnasium.farama.org), without slipping.

Cells are numbered row by row from the top left. Every map has a path to its goal; the shortest is the
optimum.
"""

import random
import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from envs.base import Env, Episode, Problem, Step, check_choice, choose_split
from utils.settings.errors import UserError

MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}  # rows down, columns to the right
MOVE = re.compile(r"(?<![\w'’])(?:up|down|left|right|[udlr])(?!\w)", re.IGNORECASE)  # not the d of "I'd"
PROMPTS = {
    "bare": "Go to G.\n{map}",
    "full": "You are at P on a map with holes (H) and free cells (.). Walk to the goal G and never onto a hole: after "
    "each answer I show you the map. Moves are up, down, left and right; at the edge you stay where you are. Answer "
    "with moves only, at most {moves_per_turn}.\n\n{map}",
}
NUM_TASKS = {"train": 100_000, "test": 512}


class Lake(NamedTuple):
    """A map with as many rows as columns."""

    size: int
    start: int
    goal: int
    holes: frozenset[int]


@dataclass(eq=False)
class Gridworld(Env):
    """Pays 1 at the goal, less `cost` for each step beyond the shortest path; 0 in a hole and after `max_turns`.

    One in five maps is for the test split.
    """

    is_generated = True
    tokens_per_action = 640

    split: str = "train"
    size: int = 4  # rows, and columns
    num_holes: int = 4
    min_steps: int = 2  # of the shortest path
    max_turns: int = 12
    moves_per_turn: int = 1  # the last ones of a reply
    cost: float = 0.05
    prompt: str = "full"
    tokens_per_turn: int = 8

    def __post_init__(self):
        check_choice("prompt", self.prompt, PROMPTS)
        if not 2 <= self.size <= 20 or not 0 <= self.num_holes <= self.size**2 - 2:
            raise UserError(
                "Gridworld needs size from 2 to 20, and num_holes from 0 to size * size - 2: correct --env_options"
            )
        if self.min_steps < 1 or self.max_turns < 2 or self.moves_per_turn < 1:
            raise UserError("Gridworld needs min_steps, moves_per_turn >= 1, and max_turns >= 2: correct --env_options")
        self.num_tasks = NUM_TASKS[self.split]
        self.problem(0)  # options that leave a split without a map fail here

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"gridworld {self.split} {index}")
        max_steps = self.max_turns * self.moves_per_turn
        for _ in range(1_000):
            start, goal, *holes = rng.sample(range(self.size**2), self.num_holes + 2)
            lake = Lake(self.size, start, goal, frozenset(holes))
            text = format_map(lake, lake.start)
            is_test = choose_split(text) == "test"
            num_steps = distances(lake).get(lake.start, 0)
            if is_test == (self.split == "test") and self.min_steps <= num_steps <= max_steps:
                prompt = PROMPTS[self.prompt].format(map=text, moves_per_turn=self.moves_per_turn)
                return Problem([{"role": "user", "content": prompt}], lake)
        raise UserError(f"no map of Gridworld is left for the {self.split} split: change size, num_holes or min_steps")

    def episode(self, problem: Problem, seed: int) -> Episode:
        return GridworldEpisode(problem.answer, self.moves_per_turn, self.cost)

    def examples(self, problem: Problem) -> dict[str, str]:
        path = shortest_path(problem.answer)
        if len(path) > self.moves_per_turn:
            return {}
        return {"right": " ".join(path), "wrong": "stay"}

    def answer(self, text: str) -> str | None:
        return None  # a move is no vote


class GridworldEpisode(Episode):
    """A walk: the last moves of a reply are made, up to the goal or a hole."""

    def __init__(self, lake: Lake, moves_per_turn: int, cost: float):
        self.lake = lake
        self.moves_per_turn = moves_per_turn
        self.cost = cost
        self.cell = lake.start
        self.num_steps = 0
        self.num_needed = distances(lake)[lake.start]

    def step(self, reply: str) -> Step:
        words = MOVE.findall(reply)
        if not words:
            return Step([{"role": "user", "content": format_map(self.lake, self.cell)}], info={"invalid": 1.0})
        num_before = self.num_steps
        for word in words[-self.moves_per_turn :]:
            self.cell = next_cell(self.lake, self.cell, word[0].lower())
            self.num_steps += 1
            if self.cell == self.lake.goal or self.cell in self.lake.holes:
                break
        info = {"steps": float(self.num_steps - num_before)}
        if self.cell == self.lake.goal:
            num_wasted = self.num_steps - self.num_needed
            reward = max(0.0, 1 - self.cost * num_wasted)
            return Step([], reward, done=True, info={**info, "correct_answer": 1.0})
        if self.cell in self.lake.holes:
            return Step([], done=True, info=info)
        return Step([{"role": "user", "content": format_map(self.lake, self.cell)}], info=info)


def format_map(lake: Lake, cell: int) -> str:
    """Returns a map with the policy (P) at this cell."""
    signs = ["."] * lake.size**2
    for hole in lake.holes:
        signs[hole] = "H"
    signs[lake.goal] = "G"
    signs[cell] = "P"
    rows = [" ".join(signs[start : start + lake.size]) for start in range(0, len(signs), lake.size)]
    return "\n".join(rows)


def next_cell(lake: Lake, cell: int, move: str) -> int:
    """Returns the cell behind a step; at the edge the same."""
    row, column = divmod(cell, lake.size)
    down, right = MOVES[move]
    last = lake.size - 1
    row = min(max(row + down, 0), last)
    column = min(max(column + right, 0), last)
    return row * lake.size + column


def distances(lake: Lake) -> dict[int, int]:
    """Returns the steps to the goal from each cell that has a path to it, by breadth-first search from the goal."""
    steps = {lake.goal: 0}
    queue = deque([lake.goal])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            neighbor = next_cell(lake, cell, move)
            if neighbor not in steps and neighbor not in lake.holes:
                steps[neighbor] = steps[cell] + 1
                queue.append(neighbor)
    return steps


def best_moves(lake: Lake, cell: int) -> list[str]:
    """Returns the moves that bring a cell nearer to the goal."""
    steps = distances(lake)
    return [move for move in MOVES if steps.get(next_cell(lake, cell, move)) == steps[cell] - 1]


def shortest_path(lake: Lake) -> list[str]:
    """Returns the moves of a shortest path from the start to the goal."""
    moves = []
    cell = lake.start
    while cell != lake.goal:
        moves.append(best_moves(lake, cell)[0])
        cell = next_cell(lake, cell, moves[-1])
    return moves
