"""Ours against others on the same model folder and the same work, side by side: ratios of interleaved pairs of runs.

    python bench/peers.py --work rollout --peers torch
    python bench/peers.py --work update,step --python tunix=~/venv-tunix/bin/python

Every side is a process of its own, with its own interpreter where one is named. They take turns, one run of each a
round, so that a noisy machine hurts all alike. Their first runs, in which they compile, are not counted. All runs of a
work must report the same number of tokens. Sides whose packages are absent are left out, and that is said.

rollout      completions of equal length, no stop token
long_tail    256 completions of geometric lengths, mean 32, at most 256: seconds and tokens are of what is useful
update       for given rollouts old log-probabilities, then loss, gradient and one step of AdamW
update_once  the same where this is the only update, so that old log-probabilities are the new ones
step         all of GRPO: rollout, rewards, advantages, one update
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import BenchConfig, environment, make_prompts, read_shape, report, spread, write_random_model
from utils.settings.config import option, parse

WORKS = ("rollout", "long_tail", "update", "update_once", "step")
GENERATE = ("dynamic", "static", "compiled")  # transformers' caches
VARIANTS = {  # of each side where there are several, or none
    ("torch", "rollout"): GENERATE,
    ("torch", "long_tail"): GENERATE,
    ("torch", "update"): ("eager", "compiled"),
    ("torch", "update_once"): ("eager", "compiled"),
    ("torch", "step"): (),
    ("trl", "rollout"): (),  # it generates by transformers
    ("trl", "long_tail"): (),
    ("tunix", "long_tail"): (),  # no lengths can be given to it
    ("lmpo", "long_tail"): ("", "compact=0"),
}


@dataclass(frozen=True)
class Command(BenchConfig):
    """Peers."""

    work: str = option("rollout", "comma-separated: " + ", ".join(WORKS))
    peers: str = option("torch,trl,tunix", "comma-separated, besides our own side; torch: transformers, a plain loop")
    variants: str = option("", "comma-separated SIDE=V1+V2 instead of what runs by default; ours are NAME=VALUE:...")
    python: str = option("", "comma-separated PEER=INTERPRETER where it is installed elsewhere")
    folder: str = option("", "where random models are kept; empty: a temporary folder")
    warmup: int = option(2, "runs of each side that are not counted")


class Side:
    """A process that runs a work whenever it is its turn."""

    def __init__(self, peer: str, variant: str, work: dict, python: str = sys.executable):
        self.name = f"{peer} {variant}".strip()
        command = [python, str(Path(__file__).with_name("side.py")), peer, variant]
        log = open(os.environ["PEERS_LOG"], "a") if "PEERS_LOG" in os.environ else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.tell(json.dumps(work))

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `run` tells what became of the process
            print(line, file=self.process.stdin, flush=True)

    def run(self) -> dict:
        """What it says of one run: seconds, tokens and more, or why it is absent."""
        self.tell("run")
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"absent": f"failed with exit status {self.process.wait()}"}

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def compare(sides: list[Side], warmup: int, rounds: int) -> dict[str, list[dict]]:
    """What each side said of its runs, those that count."""
    present = {}
    for side in sides:
        said = [side.run() for _ in range(warmup)][-1]
        if "absent" in said:
            print(f"left out: {side.name}: {said['absent']}")
        else:
            present[side] = []
    for _ in range(rounds):
        for side, runs in present.items():
            runs.append(side.run())
    return {side.name: runs for side, runs in present.items()}


def make_work(name: str, config: Command, folder: str) -> dict:
    """What a side is told to do, in plain numbers."""
    groups, limit = (32, 256) if name == "long_tail" else (config.groups_per_batch, config.num_generation_tokens)
    vocabulary, num_rows = read_shape(folder).vocab_size, groups * config.group_size
    prompts = make_prompts(vocabulary, groups, config.prompt_tokens)
    work = {"name": name, "model_dir": folder, "prompts": prompts, "group_size": config.group_size, "limit": limit}
    work |= {"batch_rows": 64, "lengths": [limit] * num_rows, "stop_ids": []}
    if name == "long_tail":
        work["stop_ids"] = list(range(vocabulary // 32))  # to a random model all tokens are about equally likely
        side = Side("lmpo", "", work)
        work["lengths"] = side.run()["lengths"]
        side.close()
    if name.startswith("update"):
        completions = make_prompts(vocabulary, num_rows, limit)
        rows = [prompts[i // config.group_size] + completion for i, completion in enumerate(completions)]
        work |= {"rows": rows, "old": name == "update"}
    return work


def table(name: str, runs_of: dict[str, list[dict]]) -> list[tuple]:
    """A row for each side; ratios are of runs of the same round."""
    ours, rows = next(iter(runs_of.values())), []
    for side, runs in runs_of.items():
        assert {run["tokens"] for run in runs} == {ours[0]["tokens"]}, (name, side, runs[0], ours[0])
        seconds, pairs = [run["seconds"] for run in runs], list(zip(runs, ours, strict=True))
        speed = f"{ours[0]['tokens'] / statistics.median(seconds):,.0f}"
        ratios = [spread([run[what] / our[what] for run, our in pairs]) for what in ("seconds", "cpu_seconds")]
        rows.append((name, side, f"{ours[0]['tokens']:,}", spread(seconds), speed, *ratios))
    return rows


def main(config: Command) -> None:
    pythons, chosen = (
        dict(part.split("=", 1) for part in text.split(",") if part) for text in (config.python, config.variants)
    )
    rows, runs_of = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = config.model_dir or write_random_model(config.shape, config.folder or temporary)
        for name in config.work.split(","):
            work, sides = make_work(name, config, folder), []
            for peer in ("lmpo", *filter(None, config.peers.split(","))):
                variants = chosen[peer].split("+") if peer in chosen else VARIANTS.get((peer, name), ("",))
                python = os.path.expanduser(pythons.get(peer, sys.executable))
                sides += [Side(peer, variant, work, python) for variant in variants]
            try:
                runs_of[name] = compare(sides, config.warmup, config.repeats)
            finally:
                for side in sides:
                    side.close()
            rows += table(name, runs_of[name])
    title = f"{config.model_dir or config.shape}: median (range) of {config.repeats} interleaved runs"
    columns = ("work", "side", "tokens", "seconds", "tokens/s", "its seconds / ours", "CPU seconds / ours")
    report(title, columns, rows, environment("torch", "transformers", "trl"), config.json, runs=runs_of)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__)[0])
