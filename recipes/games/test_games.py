"""Games of several turns: an optimal player, which sees only the messages, earns the optimum; hostile replies nothing.

The reference players share no code with the environments: bisection, minimax over pairs of bit masks, and distances by
relaxation over (row, column).
"""

import itertools
import random
import re
import time
from collections.abc import Callable
from functools import cache
from math import ceil, inf, log2

import numpy as np
import pytest

from envs import make_env
from envs.base import Env, Problem, Step
from recipes.games.gridworld import GridworldEpisode, Lake
from recipes.games.tictactoe import TicTacToeEpisode
from recipes.games.wordle import WORDS, WordleEpisode, feedback
from utils.settings.errors import UserError

Player = Callable[[str], str]  # returns the reply to the last message
Game = tuple[float, list[str], list[Step]]  # return, replies and steps of an episode
NUM_PROBLEMS = 200
ALL_WORDS = WORDS.read_text().split()
SPLITS = ("", "-test")
OUTCOMES = {1.0: "win", 0.5: "draw", 0.0: "loss"}
OPTIONS = {
    "guess": {},
    "tictactoe": {"opponent": "random"},
    "tictactoe minimax": {"opponent": "minimax"},
    "gridworld": {},
    "gridworld runs": {"moves_per_turn": 3},
    "wordle": {},
}


def make_game(case: str, split: str = "", **options: int | str) -> Env:
    """Returns an environment with the options of a case."""
    name = case.split(" ")[0]
    return make_env(name + split, prompt="bare", **OPTIONS[case], **options)


def play(env: Env, problem: Problem, player: Player, seed: int = 0) -> Game:
    """Plays an episode to its end or to `max_turns`."""
    episode = env.episode(problem, seed)
    message = problem.messages[-1]["content"]
    replies = []
    steps = []
    while len(replies) < env.max_turns:
        replies.append(player(message))
        steps.append(episode.step(replies[-1]))
        if steps[-1].done:
            break
        message = steps[-1].messages[-1]["content"]
    else:
        steps.append(episode.truncate())
    return sum(step.reward for step in steps), replies, steps


def is_correct(steps: list[Step]) -> bool:
    """True if the last step says so."""
    return steps[-1].info.get("correct_answer") == 1.0


# players


class Bisection:
    """Guesses the middle of what is left."""

    def __call__(self, message: str) -> str:
        if message == "higher":
            self.low = self.guess + 1
        elif message == "lower":
            self.high = self.guess - 1
        else:
            self.low, self.high = map(int, re.findall("[0-9]+", message))
            self.size = self.high - self.low + 1
        self.guess = (self.low + self.high) // 2
        return str(self.guess)


WINNING = [0b111, 0b111000, 0b111000000, 0b001001001, 0b010010010, 0b100100100, 0b100010001, 0b001010100]


@cache
def negamax(own: int, other: int) -> int:
    """Returns the result for the side to move: 1, 0 or -1; a bit for each stone."""
    if any(other & line == line for line in WINNING):
        return -1
    if own | other == 0b111111111:
        return 0
    return max(-negamax(other, own | bit) for bit in bits_left(own, other))


def bits_left(own: int, other: int) -> list[int]:
    """Returns the free cells."""
    return [1 << i for i in range(9) if not (own | other) >> i & 1]


def read_board(message: str) -> tuple[int, int]:
    """Returns the stones of x and of o on the board at the end of a message."""
    cells = message.split()[-9:]
    x, o = (sum(1 << i for i, cell in enumerate(cells) if cell == stone) for stone in "xo")
    assert all(cell in (str(i), "x", "o") for i, cell in enumerate(cells, 1))
    return x, o


def solve(problem: Problem) -> float:
    """Returns the reward of perfect play against perfect play."""
    x, o = read_board(problem.messages[-1]["content"])
    return (1 + negamax(x, o)) / 2


def minimax_player(message: str) -> str:
    x, o = read_board(message)
    best = max(bits_left(x, o), key=lambda bit: -negamax(o, x | bit))
    return str(best.bit_length())


Place = tuple[int, int]  # row and column
Places = dict[str, set[Place]]  # by the sign on the map


def read_map(message: str) -> Places:
    """Returns the places of each sign on the map at the end of a message."""
    rows = [line.split() for line in message.splitlines() if re.fullmatch("[.HGP]( [.HGP])*", line)]
    places = {sign: set() for sign in ".HGP"}
    for i, row in enumerate(rows):
        for j, sign in enumerate(row):
            places[sign].add((i, j))
    return places


STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def steps_to_goal(places: Places) -> dict[Place, float]:
    """Returns the steps to the goal from each place that is no hole, by relaxing until nothing changes."""
    open_places = places["."] | places["P"] | places["G"]
    steps = dict.fromkeys(open_places, inf)
    steps |= dict.fromkeys(places["G"], 0)
    for _ in open_places:
        for place in open_places:
            around = [steps.get(neighbor(place, word), inf) for word in STEPS]
            steps[place] = min(steps[place], 1 + min(around))
    return steps


def neighbor(place: Place, word: str) -> Place:
    """Returns the place behind a step, which may be beyond the edge."""
    down, right = STEPS[word]
    return place[0] + down, place[1] + right


def path_player(message: str) -> str:
    places = read_map(message)
    steps = steps_to_goal(places)
    [place] = places["P"]
    return min(STEPS, key=lambda word: steps.get(neighbor(place, word), inf))


def signs_by_counting(guess: str, word: str) -> str:
    """Returns the signs of a guess, each found on its own: a letter is yellow if the word has one more of it.

    More than those at their places, and than those at wrong places before it.
    """
    signs = ""
    for i, letter in enumerate(guess):
        places = [j for j in range(5) if guess[j] == letter]
        green = [j for j in places if word[j] == letter]
        before = [j for j in places if j < i and j not in green]
        if i in green:
            signs += "G"
        else:
            signs += "Y" if word.count(letter) > len(green) + len(before) else "-"
    return signs


def random_player(case: str, seed: int, share_invalid: float = 0.0) -> Player:
    """Returns a player of random legal moves, some of them replaced by no move."""
    rng = random.Random(seed)
    numbers = []  # of the last message that shows any

    def player(message: str) -> str:
        numbers[:] = re.findall("[0-9]+", message) or numbers
        if rng.random() < share_invalid:
            return "?"
        if case == "guess":
            return str(rng.randint(*map(int, numbers)))
        return rng.choice(ALL_WORDS if case == "wordle" else numbers or list(STEPS))

    return player


# the optimum


@pytest.mark.parametrize("split", SPLITS)
def test_bisection_never_needs_more_than_log2_guesses(split):
    env = make_game("guess", split)
    for i in range(NUM_PROBLEMS):
        player = Bisection()
        total, replies, steps = play(env, env.problem(i), player)
        assert is_correct(steps) and len(replies) <= ceil(log2(player.size + 1))
        assert total == 1 - env.cost * (len(replies) - 1)
        assert steps[-1].info["guesses"] == len(replies)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", ["tictactoe", "tictactoe minimax"])
def test_minimax_never_loses_and_gets_the_value_from_minimax(case, split):
    env = make_game(case, split)
    for i in range(NUM_PROBLEMS):
        problem = env.problem(i)
        value = solve(problem)
        total, _, steps = play(env, problem, minimax_player, seed=i)
        assert value >= 0.5 and (total == value or case == "tictactoe" and total > value)
        assert steps[-1].info == {"correct_answer": 1.0, OUTCOMES[total]: 1.0}


def test_a_result_below_the_value_is_not_correct():
    env = make_game("tictactoe")
    seen = set()
    for i in range(NUM_PROBLEMS):
        problem = env.problem(i)
        value = solve(problem)
        total, _, steps = play(env, problem, random_player("tictactoe", i), seed=i)
        assert steps[-1].info == {"correct_answer": float(total >= value), OUTCOMES[total]: 1.0}
        seen.add((total, value))
    assert seen == {(total, value) for total in (0.0, 0.5, 1.0) for value in (0.5, 1.0)}


@pytest.mark.parametrize("split", SPLITS)
def test_shortest_paths_earn_full_marks(split):
    env = make_game("gridworld", split)
    for i in range(NUM_PROBLEMS):
        problem = env.problem(i)
        places = read_map(problem.messages[-1]["content"])
        [start] = places["P"]
        num_steps = steps_to_goal(places)[start]
        assert 2 <= num_steps <= env.max_turns and len(places["H"]) == 4
        total, replies, steps = play(env, problem, path_player)
        assert total == 1 and is_correct(steps)
        assert len(replies) == sum(step.info["steps"] for step in steps) == num_steps


def test_a_detour_costs_and_a_hole_ends_the_walk():
    env = make_game("gridworld", moves_per_turn=12)
    seen = set()
    for i in range(50):
        problem = env.problem(i)
        right = env.examples(problem)["right"]
        assert env.episode(problem, 0).step(right.upper())[1:3] == (1.0, True)
        for detour in ("up down", "left right"):
            step = env.episode(problem, 0).step(f"{detour} {right}")
            seen.add((round(step.reward, 9), step.done, step.info.get("correct_answer", 0.0)))
    assert (0.9, True, 1.0) in seen, "two steps more"
    assert (0.0, True, 0.0) in seen, "through a hole"
    assert {reward for reward, *_ in seen} <= {0.9, 0.95, 1.0, 0.0}


# laws


SNIPPETS = ["٣", "³", "५", "1e9", "0x5", "05", "5.", "-1", "\0", "", "İ", "LEFT", "I'd", "u" * 99, "9" * 8000, "CRANE"]
MOVES = ["up", "d", "l", "right", "5", "9", "0", "10", "x"]


def hostile_reply(rng: random.Random) -> str:
    """Returns text that a broken or a scheming model may write: up to 100,000 characters."""
    characters = "".join(chr(rng.choice((rng.randrange(32), rng.randrange(0xD800)))) for _ in range(20))
    number = rng.getrandbits(rng.choice((4, 64, 9000)))
    kinds = [characters, f"{number:x}", str(number % 10**99), rng.choice(SNIPPETS), *rng.choices(MOVES, k=3)]
    text = rng.choice(" \n,").join(rng.choices(kinds, k=3))
    return text * (100_000 // (len(text) + 1)) if rng.random() < 0.01 else text


@pytest.mark.parametrize("case", OPTIONS)
def test_hostile_replies_raise_nothing_and_take_milliseconds(case):
    env, rng = make_game(case), random.Random(case)
    episode, num_turns, seconds, num_invalid = env.episode(env.problem(0), 0), 0, [], 0.0
    for i in range(1000):
        reply = hostile_reply(rng)
        start = time.process_time()
        step = episode.step(reply)
        seconds.append(time.process_time() - start)
        num_invalid += step.info.get("invalid", 0.0)
        assert 0 <= step.reward <= 1
        assert step.done or not step.reward and len(step.messages[0]["content"]) < 100
        num_turns += 1
        if step.done or num_turns == env.max_turns:
            episode, num_turns = env.episode(env.problem(i % env.num_tasks), i), 0
    assert 10 < num_invalid < 990, "some are moves"
    assert sum(seconds) < 1
    assert max(seconds) < 0.25, "for 100,000 characters; they take 10 ms where nothing else runs"


@pytest.mark.parametrize("case", OPTIONS)
def test_an_episode_is_a_function_of_problem_seed_and_replies(case):
    env, new_env = make_game(case), make_game(case)
    num_truncated = num_changed = 0
    for i in range(100):
        problem = env.problem(i)
        _, replies, steps = play(env, problem, random_player(case, i, share_invalid=0.5), seed=i)
        again, other = new_env.episode(new_env.problem(i), i), env.episode(problem, i + 1)
        assert [again.step(reply) for reply in replies] == steps[: len(replies)]
        if len(steps) > len(replies):
            assert again.truncate() == steps[-1] == Step([], done=True)
            num_truncated += 1
        num_changed += [other.step(reply) for reply in replies] != steps[: len(replies)]
    assert num_truncated
    assert bool(num_changed) == ("tictactoe" in case), "chance comes from the seed"


def test_splits_share_no_position_up_to_symmetry():
    seen = []
    for env in [make_game("tictactoe", split) for split in SPLITS]:
        seen.append(set())
        for i in range(1000):
            board = np.array(env.problem(i).messages[-1]["content"].split()[-9:]).reshape(3, 3)
            board[np.char.isdigit(board)] = ""
            images = [np.rot90(x, turns) for x in (board, board.T) for turns in range(4)]
            seen[-1].add(min(tuple(x.ravel().tolist()) for x in images))
    assert not seen[0] & seen[1]
    assert min(map(len, seen)) >= 30


def test_words_are_in_one_split_each():
    parts = [set(make_game("wordle", split).words) for split in (*SPLITS, "-valid")]
    assert set.union(*parts) == set(ALL_WORDS)
    assert sum(map(len, parts)) == len(ALL_WORDS) > 700
    assert min(map(len, parts)) > 70
    assert all(re.fullmatch("[a-z]{5}", word) for word in ALL_WORDS)


# details


def test_an_illegal_move_uses_up_a_turn_and_nothing_else():
    episode = TicTacToeEpisode("xo3456789", "random", 0)
    for reply in ("1", "2", "0", "10", "", "x", "56", "³"):
        step = episode.step(reply)
        assert step == Step([{"role": "user", "content": "x o 3\n4 5 6\n7 8 9"}], info={"invalid": 1.0})
    assert episode.board == "xo3456789"
    episode.step("not 4 but 5")
    assert episode.board[4] == "x"
    assert episode.board.count("o") == 2


def test_signs_are_those_by_counting():
    assert feedback("speed", "erase") == "Y-YY-"
    assert feedback("allay", "llama") == "YGYY-"
    words = [*ALL_WORDS, *map("".join, itertools.product("ab", repeat=5)), "abcca", "cabac", "bcbca"]
    rng = random.Random(0)
    for _ in range(20_000):
        guess, word = rng.choices(words[-35:] if rng.random() < 0.5 else words, k=2)
        assert feedback(guess, word) == signs_by_counting(guess, word), (guess, word)


def test_the_last_word_of_five_letters_is_the_guess():
    for reply in ("", "four", "sixsix", "c r a n e", "cr\u00e4ne", "12345"):
        step = WordleEpisode("crane", cost=0.25).step(reply)
        assert step == Step([{"role": "user", "content": "five letters?"}], info={"invalid": 1.0})
    episode = WordleEpisode("crane", cost=0.25)
    step = episode.step("I think <b>of SPEED</b>, a word of five!")
    assert step == Step([{"role": "user", "content": "s p e e d\n- - Y - -"}])
    assert episode.step("Crane.")[1:3] == (0.75, True)


def test_the_last_moves_of_a_reply_are_made():
    lake = Lake(size=4, start=5, goal=15, holes=frozenset())
    for moves_per_turn, cell in ((1, 6), (2, 10), (3, 6), (4, 7), (5, 7)):
        episode = GridworldEpisode(lake, moves_per_turn, cost=0.0)
        step = episode.step("I'd go Right, UP; d r")
        assert episode.cell == cell
        assert step.info == {"steps": min(moves_per_turn, 4)}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tictactoe", {"opponent": "perfect"}, "opponent=perfect: choose one of random, minimax"),
        ("tictactoe-test", {"max_plies": 2}, "no position of TicTacToe is left for the test split: raise max_plies"),
        ("gridworld", {"num_holes": 14}, "no map of Gridworld is left for the train split"),
        ("gridworld", {"num_holes": 15}, "num_holes from 0 to size"),
    ],
)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(UserError, match=message):
        make_env(name, **options)
