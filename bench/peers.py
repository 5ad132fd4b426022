"""Ours against others on the same model folder and the same work, side by side: ratios of interleaved pairs of runs.

    python bench/peers.py --work rollout --peers torch
    python bench/peers.py --work update,step --python trl=~/venv-trl/bin/python
    python bench/peers.py --work turns,turns_step --peers trl --group_size 4 --num_generation_tokens 16

Every side is a process of its own, with its own interpreter if one is named. They take turns, one run of each a
round, so that a noisy machine hurts all alike. Their first runs, in which they compile, are not counted. All runs of a
work must report the same number of tokens. Sides whose packages are absent are left out, and that is said.

rollout      completions of equal length, no stop token
long_tail    256 completions of geometric lengths, mean 32, at most 256: seconds and tokens are of what is useful
longer_tail  the same with 2,048 completions, mean 64, at most 1,024
update       for given rollouts old log-probabilities, then loss, gradient and one step of AdamW
update_once  the same if this is the only update, so that old log-probabilities are the new ones
step         all of GRPO: rollout, rewards, advantages, one update
turns        episodes of --turns turns, each of as many tokens, with --observation_tokens between two; no token ends a
             turn. Ours has the environment in processes of its own, TRL a class as its `environment_factory`.
turns_step   a whole step with such episodes
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import BenchConfig, Figure, environment, make_prompts, report, spread, write_random_model
from bench.fixed_episodes import FixedEpisodes
from bench.side import ROLLOUTS, TAILS, TURNS, Work
from core.rollout import encode_prompt
from models.tokenizer import load_tokenizer
from utils.settings.config import parse
from utils.settings.options import group, option

WORKS = (*ROLLOUTS, "update", "update_once", "step", *TURNS)
GENERATE = ("dynamic", "static", "compiled")  # transformers' caches
VARIANTS = {  # variants of each side, if there are several, or none
    ("torch", "rollout"): GENERATE,
    ("torch", "long_tail"): GENERATE,
    ("torch", "longer_tail"): ("dynamic",),
    ("torch", "update"): ("eager", "compiled"),
    ("torch", "update_once"): ("eager", "compiled"),
    ("torch", "step"): (),
    ("trl", "rollout"): (),  # it generates by transformers
    ("trl", "long_tail"): (),
    ("trl", "longer_tail"): (),
    ("torch", "turns"): (),
    ("torch", "turns_step"): (),
    ("lmpo", "long_tail"): ("", "block_size=128"),
    ("lmpo", "longer_tail"): ("", "call_rows=64"),
}


Run = dict[str, float | list[int]]  # seconds, tokens and more


@dataclass(frozen=True)
class Command:
    """Peers."""

    work: str = option("rollout", "Works, with commas between: " + ", ".join(WORKS))
    peers: str = option("torch,trl", "Sides besides our own, with commas between; torch: transformers, a plain loop")
    variants: str = option(
        "", "Variants instead of the default ones, as SIDE=V1+V2 separated by commas; ours are NAME=VALUE:..."
    )
    python: str = option("", "Interpreters of peers that are installed elsewhere, as PEER=PATH with commas between")
    folder: str = option("", "Folder that random models are kept in; empty: a temporary one")
    turns: str = option("4", "Numbers of turns of episodes, with commas between")
    observation_tokens: int = option(16, "Tokens between two turns")
    warmup: int = option(2, "Runs of each side that are not counted")
    bench: BenchConfig = group(BenchConfig)
    model_dir: str = option("", "Hugging Face folder of a model to measure; empty: a random one of --shape")
    groups_per_batch: int = option(8, "Prompts")
    group_size: int = option(8, "Completions of each prompt")
    num_generation_tokens: int = option(128, "Tokens of each completion, or of each turn")


class Side:
    """A process that runs a work whenever it is its turn."""

    def __init__(self, peer: str, variant: str, work: Work, python: str = sys.executable):
        self.name = f"{peer} {variant}".strip()
        command = [python, str(Path(__file__).with_name("side.py")), peer, variant]
        log = open(os.environ["PEERS_LOG"], "a") if "PEERS_LOG" in os.environ else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.write(json.dumps(work))

    def write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `run` returns the status of a process that has ended
            print(line, file=self.process.stdin, flush=True)

    def run(self) -> Run | dict[str, str]:
        """Returns the figures of one run, or under "absent" why there are none."""
        self.write("run")
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"absent": f"failed with exit status {self.process.wait()}"}

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def compare(sides: Sequence[Side], warmup: int, rounds: int) -> dict[str, list[Run]]:
    """Returns the figures of each side's runs that count."""
    present = {}
    for side in sides:
        figures = [side.run() for _ in range(warmup)][-1]
        if "absent" in figures:
            print(f"left out: {side.name}: {figures['absent']}")
        else:
            present[side] = []
    for _ in range(rounds):
        for side in list(present):
            figures = side.run()
            if "absent" in figures:
                print(f"left out: {side.name}: {figures['absent']}")
                del present[side]
            else:
                present[side].append(figures)
    return {side.name: runs for side, runs in present.items()}


def make_works(config: Command, folder: str) -> dict[str, Work]:
    """Returns the works of a side, in plain numbers, by their names in the table."""
    works = {}
    for name in config.work.split(","):
        if name in TURNS:
            for number in map(int, config.turns.split(",")):
                works[f"{name} {number}"] = turns_work(name, number, config, folder)
        else:
            works[name] = make_work(name, config, folder)
    return works


def turns_work(name: str, num_turns: int, config: Command, folder: str) -> Work:
    """Returns the work of episodes of so many turns."""
    num_tokens = config.observation_tokens
    options = {"num_turns": num_turns, "prompt_tokens": config.bench.prompt_tokens, "observation_tokens": num_tokens}
    env, tokenizer = FixedEpisodes(**options), load_tokenizer(folder)
    prompts = [encode_prompt(tokenizer, env.problem(i)) for i in range(config.groups_per_batch)]
    observation = tokenizer.bridge([], [{"role": "user", "content": env.observation}], plain=True).ids
    assert {len(prompt) for prompt in prompts} == {config.bench.prompt_tokens}, "each letter is to be a token"
    assert len(observation) == num_tokens
    limit = num_turns * config.num_generation_tokens + (num_turns - 1) * num_tokens
    size, turn = config.group_size, config.num_generation_tokens
    work: Work = {"name": name, "model_dir": folder, "prompts": prompts, "group_size": size, "limit": limit}
    more: Work = {"num_turns": num_turns, "turn_tokens": turn, "observation": observation, "env_options": options}
    return work | more


def make_work(name: str, config: Command, folder: str) -> Work:
    """Returns the work of single replies."""
    num_groups, limit = config.groups_per_batch, config.num_generation_tokens
    if name in TAILS:
        num_groups, mean_length, limit = TAILS[name]
    group_size = config.group_size
    vocabulary = json.loads((Path(folder).expanduser() / "config.json").read_text())["vocab_size"]
    num_rows = num_groups * group_size
    prompts = make_prompts(vocabulary, num_groups, config.bench.prompt_tokens)
    work: Work = {"name": name, "model_dir": folder, "prompts": prompts, "group_size": group_size, "limit": limit}
    work |= {"batch_rows": 64, "lengths": [limit] * num_rows, "stop_ids": []}
    if name in TAILS:
        num_stop_ids = vocabulary // mean_length  # to a random model all tokens are about equally likely
        work["stop_ids"] = list(range(num_stop_ids))
        side = Side("lmpo", "", work)
        work["lengths"] = side.run()["lengths"]
        side.close()
    if name.startswith("update"):
        completions = make_prompts(vocabulary, num_rows, limit)
        rows = [prompts[i // group_size] + completion for i, completion in enumerate(completions)]
        work |= {"rows": rows, "old": name == "update"}
    return work


def make_table(work: str, runs_of: dict[str, list[Run]]) -> list[tuple[Figure, ...]]:
    """Returns a row for each side; ratios are of runs of the same round."""
    our_runs = next(iter(runs_of.values()))
    num_tokens = our_runs[0]["tokens"]
    table = []
    for side, runs in runs_of.items():
        assert {run["tokens"] for run in runs} == {num_tokens}, (work, side, runs[0], our_runs[0])
        seconds = [run["seconds"] for run in runs]
        speed = num_tokens / statistics.median(seconds)
        row = [work, side, f"{num_tokens:,}", spread(seconds), f"{speed:,.0f}"]
        for figure in ("seconds", "cpu_seconds"):
            ratios = [run[figure] / our_run[figure] for run, our_run in zip(runs, our_runs, strict=True)]
            row.append(spread(ratios))
        table.append(tuple(row))
    return table


def parse_pairs(text: str) -> dict[str, str]:
    """Returns NAME=VALUE with commas between as a dictionary."""
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


def start_sides(config: Command, work: Work) -> list[Side]:
    """Starts the processes of a work, ours first."""
    pythons = parse_pairs(config.python)
    chosen = parse_pairs(config.variants)
    sides = []
    for peer in ("lmpo", *filter(None, config.peers.split(","))):
        variants = VARIANTS.get((peer, work["name"]), ("",))
        if peer in chosen:
            variants = chosen[peer].split("+")
        python = os.path.expanduser(pythons.get(peer, sys.executable))
        sides += [Side(peer, variant, work, python) for variant in variants]
    return sides


def main(config: Command) -> None:
    bench, model_dir = config.bench, config.model_dir
    table, runs_of = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_dir or write_random_model(bench.shape, config.folder or temporary)
        for name, work in make_works(config, folder).items():
            sides = start_sides(config, work)
            try:
                runs_of[name] = compare(sides, config.warmup, bench.repeats)
            finally:
                for side in sides:
                    side.close()
            table += make_table(name, runs_of[name])
    title = f"{model_dir or bench.shape}: median (range) of {bench.repeats} interleaved runs"
    columns = ("work", "side", "tokens", "seconds", "tokens/s", "its seconds / ours", "CPU seconds / ours")
    report(title, columns, table, environment("torch", "transformers", "trl"), bench.json, runs=runs_of)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
