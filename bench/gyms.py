"""Environments of GEM, TextArena, Gymnasium, SkyRL-gym and OpenEnv, played as `--episode` plays them.

    pip install gem-llm textarena gymnasium skyrl-gym openenv uvicorn     # an environment of its own: they want others
    python bench/gyms.py

An episode is played twice with the same replies, the second time while others draw from Python's and NumPy's global
generators: what was said and paid has to be the same. OpenEnv's environment is the one that `openenv init` writes.
Exit status 1: something runs and is silently wrong.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from envs import make_env
from envs.base import Env, Reply, Step
from utils.settings.errors import UserError, counted, describe_error

PACKAGES = ("gem-llm", "textarena", "gymnasium", "skyrl-gym", "openenv")
RUNS, REFUSED, WRONG, NOT_HERE = "runs", "refused by name", "WRONG", "fails in the library"
NUMBERS = "go 1,2,no number,3,0,1,2,1,2"
TEXTS = 'hello,#### 4,{"message": "hi"},#### 5'
GAMES = {  # of GEM: actions, which stand in a box
    "Crosswords": "6 2 M,5 7 N",
    "FifteenPuzzle": "up,left,down,right",
    "Game2048": "up,left,down,right,up,left",
    "GuessTheNumber": "1,2,3",
    "Hangman": "a,e",
    "Mastermind": "1 2,3 4,2 3",
    "Minesweeper": "reveal 3 0,reveal 0 0,reveal 4 4,reveal 2 2",
    "Sokoban": "up,left,down,right",
    "Sudoku": "1 1 5,2 2 3",
    "TowerofHanoi": "A C,A B",
    "Wordle": "crane,slate",
    "WordSearch": "1 1 1 4,2 2 5 2",
}
ARENAS = {  # of TextArena: actions, which stand in brackets
    "2048": "up,left,down,right,up,left",
    "Bandit": "red,blue,green",
    "Blackjack": "Hit,Stand,Hit,Stand",
    "Countdown": "1 2 +,1 2 *",
    "Crosswords": "1 1 a,2 2 b",
    "Cryptarithm": "A 1,B 2",
    "FifteenPuzzle": "up,left,down,right",
    "FrozenLake": "right,down,down,right",
    "FrozenLake-v0-random": "right,down,down,right",
    "GuessTheNumber": "5,9,14,2",
    "Hangman": "a,e",
    "LightsOut": "1 1,0 2",
    "LogicPuzzle": "a b X,b a O",
    "Mastermind": "1 2 3 4,5 6 1 2",
    "Minesweeper": "2 3,0 0,5 5,7 7",
    "PegJump": "4 1,6 4",
    "RushHour": "A+,B-",
    "Secretary": "continue,continue,accept",
    "Set": "0 1 2,3 4 5",
    "Klondike": "draw,draw,draw",
    "Slitherlink": "h 0 0,v 1 1",
    "Sokoban": "up,left,down,right",
    "Sudoku": "1 1 5,2 2 3",
    "ThreeCardMonte": "0,1",
    "TowerOfHanoi": "A C,A B",
    "WordLadder": "cold,cord",
    "Wordle": "crane,slate",
    "WordSearch": "1 1 1 4,2 2 5 2",
    "TicTacToe": "4",
    "Nim": "0 1",
}
LAKES = ("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4", "Blackjack-v1")
TRUTH = {"ground_truth": "5"}
ROW = {"reward_spec": TRUTH, "reward_model": TRUTH, "extra_info": {"max_turns": 3}}


class Row(NamedTuple):
    """An environment, what became of it (a constant above), and its figure or sentence."""

    what: str
    outcome: str
    detail: str = ""


def rows() -> Iterator[Row]:
    """Yields what became of each environment."""
    warnings.filterwarnings("ignore")
    for game, actions in GAMES.items():
        replies = [f"\\boxed{{{action}}}" for action in actions.split(",")]
        for level in ("easy", "hard", "random"):
            if (game, level) != ("Sokoban", "random"):  # whose `reset` takes 17 seconds
                yield try_out(f"GEM game:{game}-v0-{level}", "gem", f'gem.make("game:{game}-v0-{level}")', replies)
    yield try_out("GEM rg:leg_counting", "gem", 'gem.make("rg:leg_counting")', ["\\boxed{5}"])
    for name, actions in ARENAS.items():
        name = name if "-v0" in name else f"{name}-v0"
        replies = [f"[{action}]" for action in actions.split(",")]
        yield try_out(f"TextArena {name}", "textarena", f'textarena.make("{name}")', replies)
    for name in LAKES:
        render = "" if name.startswith("Blackjack") else ', render_mode="ansi"'
        yield try_out(f"Gymnasium {name}", "gymnasium", f'gymnasium.make("{name}"{render})', NUMBERS.split(","))
    yield try_out("Gymnasium CartPole-v1", "gymnasium", 'gymnasium.make("CartPole-v1")', NUMBERS.split(","))
    yield try_out("Gymnasium Pendulum-v1", "gymnasium", 'gymnasium.make("Pendulum-v1")', NUMBERS.split(","))
    for name in ("gsm8k.env.GSM8kEnv", "gsm8k.multi_turn_env.GSM8kMultiTurnEnv", "aime.env.AIMEEnv"):
        module, _, cls = f"skyrl_gym.envs.{name}".rpartition(".")
        yield try_out(f"SkyRL-gym {cls}", module, f"{module}.{cls}", TEXTS.split(","), is_class=True)
    with openenv_server() as address:
        server = "echo.server.echo_environment"
        yield try_out("OpenEnv, in process", server, f"{server}.EchoEnvironment()", TEXTS.split(","))
        client = f'echo.client.EchoEnv(base_url="{address}")'
        yield try_out("OpenEnv, client", "echo.client", client, TEXTS.split(","))
        yield try_out("OpenEnv, client.sync()", "echo.client", f"{client}.sync()", TEXTS.split(","))
        client = f'openenv.core.GenericEnvClient(base_url="{address}")'
        yield try_out("OpenEnv, GenericEnvClient", "openenv.core", client, TEXTS.split(","))
        tools = f'openenv.core.mcp_client.MCPToolClient(base_url="{address}")'
        yield try_out("OpenEnv, MCPToolClient", "openenv.core.mcp_client", tools, TEXTS.split(","))


def try_out(what: str, module: str, expression: str, replies: Sequence[str], is_class: bool = False) -> Row:
    """Returns what became of the environment that an expression makes, as a user writes it into a file."""
    name = module.partition(".")[0]
    made = f"made = as_gym({expression if is_class else f'lambda: {expression}'})"
    with tempfile.TemporaryDirectory() as folder, quiet():
        data, file = Path(folder) / "rows.jsonl", Path(folder) / f"{name}_episode.py"
        prompts = [{"prompt": [{"role": "user", "content": f"Game {n}, or 2 + 3?"}]} for n in range(40)]
        data.write_text("".join(json.dumps(prompt | ROW) + "\n" for prompt in prompts))
        file.write_text(f"import {module}\nfrom recipes.gyms.gyms import as_gym\n\n{made}\n")
        try:
            env = make_env("dataset", path=str(data), episode=f"{file}:made", max_turns=20)
            return judge(what, env, replies)
        except Exception as error:
            cause = error.__cause__ or error
            is_theirs = any(f"site-packages/{name}/" in file for file in traceback_files(cause))
            is_theirs |= isinstance(cause, ValueError) and "Cryptarithm" in what  # whose rewards are texts
            reason = " ".join(re.sub(r"[^ -~]+|\*+|\[\d+m", " ", describe_error(cause)).split())
            outcome = NOT_HERE if is_theirs else REFUSED if isinstance(error, UserError) else WRONG
            return Row(what, outcome, reason[:100])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what libraries print."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def judge(what: str, env: Env, replies: Sequence[str]) -> Row:
    """Returns if an environment is a function of the problem and the replies."""
    with contextlib.closing(env):
        first, second = play(env, 0, replies), play(env, 0, replies, are_others_drawing=True)
        openings = {play(env, number, [])[0] for number in range(4)}
    if first[0] != second[0]:
        return Row(what, WRONG, "another prompt each time")
    if first != second:
        return Row(what, WRONG, "the same replies give another game")
    steps = first[1:]
    facts = f"{counted(len(steps), 'turn')}, return {sum(step.reward for step in steps):g}"
    return Row(what, RUNS, facts + ", one prompt for all rows" * (len(openings) == 1))


def play(env: Env, number: int, replies: Sequence[str], are_others_drawing: bool = False) -> list[str | Step]:
    """Returns what a problem begins with, and the answers to these replies, up to the end of the episode."""
    problem = replace(env.problem(number), seed=number)
    with contextlib.closing(env.episode(problem, 0)) as episode:
        said = [json.dumps(episode.opening).replace(f"Game {number},", "")]
        for reply in replies:
            if are_others_drawing:
                random.seed(os.urandom(8))
                np.random.seed(int.from_bytes(os.urandom(4)))
            said.append(episode.act(Reply(reply)))
            if said[-1].done:
                return said
        return [*said, episode.truncate()]


def traceback_files(error: BaseException) -> list[str]:
    """Returns the files in which an error came about, the innermost last."""
    files, trace = [], error.__traceback__
    while trace:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return files


@contextlib.contextmanager
def openenv_server() -> Iterator[str]:
    """Writes OpenEnv's own first environment, serves it, and yields the address."""
    import uvicorn

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        command = [str(Path(sys.executable).parent / "openenv"), "init", "echo", "--output-dir", folder]
        subprocess.run(command, check=True, capture_output=True)
        sys.path.insert(0, folder)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        app = importlib.import_module("echo.server.app").app
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True


def main() -> int:
    """Prints the table; returns the exit status."""
    outcomes: Counter[str] = Counter()
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    print("\n| environment | here | |\n|---|---|---|", flush=True)
    for row in rows():
        outcomes[row.outcome] += 1
        print(f"| {' | '.join(row).replace(chr(10), ' ')} |", flush=True)
    print("\n" + ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items()))
    return int(outcomes[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(print(__doc__) if "--help" in sys.argv else main())
