"""Episodes of several turns, ours against TRL's environment loop on the same model: seconds by the number of turns.

    python bench/turns.py --python trl=~/venv-trl/bin/python

Every turn has as many drawn tokens, with as many observed ones before the next; no token ends a turn. Ours plays them
as in training, with the environment in processes of its own. TRL's trainer has a class as its `environment_factory`,
and every completion counts as a call of its tool. First rollouts with rewards, then a whole step with one update.

Sides are processes that take turns, as in bench/peers.py; their first runs, in which they compile, are not counted.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from bench.common import BenchConfig, Figure, RowsConfig, environment, report, spread, write_random_model
from bench.fixed_episodes import FixedEpisodes
from bench.peers import Run, Side, compare, parse_pairs
from bench.side import Work
from core.rollout import encode_prompt
from models.tokenizer import load_tokenizer
from utils.settings.config import parse
from utils.settings.options import group, option

COLUMNS = ("work", "turns", "side", "drawn tokens", "seconds", "seconds a turn", "its seconds / ours")


@dataclass(frozen=True)
class TurnsConfig(RowsConfig):
    """Model and episodes."""

    group_size: int = option(4, "Episodes of each prompt")
    num_generation_tokens: int = option(16, "Tokens of each turn")
    observation_tokens: int = option(16, "Tokens between two turns")


@dataclass(frozen=True)
class Command:
    """Turns."""

    turns: str = option("1,2,4,8,16", "Numbers of turns of rollouts, with commas between")
    step_turns: str = option("4", "Numbers of turns of whole steps, with commas between; empty: none")
    peers: str = option("trl", "Sides besides our own; empty: none")
    python: str = option("", "Interpreter of TRL, if TRL is installed elsewhere, as trl=PATH")
    folder: str = option("", "Folder that random models are kept in; empty: a temporary one")
    warmup: int = option(1, "Runs of each side that are not counted")
    bench: BenchConfig = group(BenchConfig)
    rows: TurnsConfig = group(TurnsConfig)


def make_work(name: str, num_turns: int, config: Command, folder: str) -> Work:
    """Returns the work of a side, in plain numbers."""
    rows = config.rows
    options = {
        "num_turns": num_turns,
        "prompt_tokens": config.bench.prompt_tokens,
        "observation_tokens": rows.observation_tokens,
    }
    env, tokenizer = FixedEpisodes(**options), load_tokenizer(folder)
    problems = [env.problem(i) for i in range(rows.groups_per_batch)]
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    message = {"role": "user", "content": env.observation}
    observation = tokenizer.bridge([], [message], plain=True).ids
    assert {len(prompt) for prompt in prompts} == {config.bench.prompt_tokens}, "each letter is to be a token"
    assert len(observation) == rows.observation_tokens
    limit = num_turns * rows.num_generation_tokens + (num_turns - 1) * rows.observation_tokens
    work: Work = {"name": name, "model_dir": folder, "prompts": prompts, "group_size": rows.group_size, "limit": limit}
    more: Work = {"num_turns": num_turns, "observation": observation, "env_options": options}
    return work | more | {"turn_tokens": rows.num_generation_tokens}


def run_sides(config: Command, work: Work) -> dict[str, list[Run]]:
    """Returns the runs of each side, ours first."""
    pythons = parse_pairs(config.python)
    sides = []
    for peer in ("lmpo", *filter(None, config.peers.split(","))):
        python = Path(pythons.get(peer, sys.executable)).expanduser()
        sides.append(Side(peer, "", work, str(python)))
    try:
        return compare(sides, config.warmup, config.bench.repeats)
    finally:
        for side in sides:
            side.close()


def make_table(work: Work, runs_of: Mapping[str, Sequence[Run]]) -> list[tuple[Figure, ...]]:
    """Returns a row for each side; ratios are of runs of the same round."""
    our_runs = next(iter(runs_of.values()))
    num_tokens = our_runs[0]["tokens"]
    table = []
    for side, runs in runs_of.items():
        assert {run["tokens"] for run in runs} == {num_tokens}, (work["num_turns"], side)
        seconds = [run["seconds"] for run in runs]
        ratios = [run["seconds"] / our_run["seconds"] for run, our_run in zip(runs, our_runs, strict=True)]
        per_turn = statistics.median(seconds) / work["num_turns"]
        figures = f"{num_tokens:,}", spread(seconds), f"{per_turn:.3f}", spread(ratios)
        table.append((work["name"], str(work["num_turns"]), side, *figures))
    return table


def main(config: Command) -> None:
    rows = config.rows
    table, runs_of = [], {}
    numbers = [("turns", number) for number in config.turns.split(",")]
    numbers += [("turns_step", number) for number in config.step_turns.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = rows.model_dir or write_random_model(config.bench.shape, config.folder or temporary)
        for name, number in numbers:
            if number:
                work = make_work(name, int(number), config, folder)
                runs = run_sides(config, work)
                table += make_table(work, runs)
                runs_of[f"{name} {number}"] = runs
    lengths = f"prompts of {config.bench.prompt_tokens}, turns of {rows.num_generation_tokens}"
    lengths += f", observations of {rows.observation_tokens}"
    title = f"{rows.model_dir or config.bench.shape}: {rows.num_rows} episodes in {rows.groups_per_batch} groups, "
    title += f"tokens: {lengths}; median (range) of {config.bench.repeats} interleaved runs"
    report(title, COLUMNS, table, environment(), config.bench.json, runs=runs_of)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
