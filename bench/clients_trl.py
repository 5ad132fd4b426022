"""TRL's classes of environments and rewards: those of its examples, docs and tests, cut out of a checkout unchanged.

    TRL=~/trl python bench/clients.py trl    # a checkout of github.com/huggingface/trl; no TRL is imported

Each class with a `reset` is begun twice and ended once in worker processes, with the rewards of its file that take
environments. Clients of OpenEnv's servers are a stand-in that draws by itself, as the servers do; what needs another
server, or names of its script's command line, is not run.
"""

import ast
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from bench.clients import REFUSED, RUNS, WRONG, Row
from envs import make_env
from envs.scoring.scorer import Scorer
from envs.scoring.trial import repeated_jobs
from envs.scoring.worker import Failure, Turns
from utils.settings.errors import UserError

PACKAGES = ("jax",)
NOT_RUN = "not run"
FILES = ("examples/scripts/*.py", "examples/scripts/openenv/*.py", "docs/source/*.md", "tests/test_grpo_trainer.py")
ROWS = [{"prompt": [{"role": "user", "content": f"Play {i}."}], "target": i, "answer": "1"} for i in range(20)]
STAND_IN = """
import random
import secrets
import time
from collections import defaultdict
from types import SimpleNamespace

class Client:
    def __init__(self, **settings):
        pass

    def reset(self, **arguments):
        return self.step(None)

    def step(self, action):
        message = SimpleNamespace(content=f"Game {secrets.randbelow(10**9)}", category="PROMPT")
        grid = [float(i in (secrets.randbelow(45), 45)) for i in range(50)]
        facts = {"info_state": grid, "done": False, "reward": 0.5, "echoed_message": "?"}
        seen = SimpleNamespace(messages=[message], prompt="", **facts)
        return SimpleNamespace(observation=seen, reward=0.5, done=False)

TextArenaEnv = EchoEnv = OpenSpielEnv = MyClient = Client
TextArenaAction = EchoAction = OpenSpielAction = SimpleNamespace
args = SimpleNamespace(env_host="", env_url="")
env_url = WORDLE_URL = CATCH_URL = ""
difficulty, max_turns, api_delay, reset_kwargs_seen = "easy", 100, 0.0, defaultdict(list)
"""


def rows() -> Iterator[Row]:
    """Yields what became of each class."""
    root = Path(os.environ["TRL"]).expanduser()
    for pattern in FILES:
        for path in sorted(root.glob(pattern)):
            text = path.read_text()
            blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL) if path.suffix == ".md" else [text]
            for block in blocks:
                for name, code, rewards in cut_out(block):
                    yield Row(f"{path.name} {name}", *tried(name, code, rewards))


def cut_out(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields the name of each class with a `reset`, the code that it needs of its file, and the rewards there."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    rewards = [f.name for f in functions if any(arg.arg == "environments" for arg in f.args.args)]
    kept = [node for node in tree.body if isinstance(node, ast.Assign | ast.FunctionDef | ast.AsyncFunctionDef)]
    head = STAND_IN + "\n".join(ast.get_source_segment(text, node) for node in kept if is_plain(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "reset" for part in node.body):
            source = textwrap.dedent(" " * node.col_offset + ast.get_source_segment(text, node))
            yield node.name, f"{head}\n{source}\n", rewards


def is_plain(node: ast.stmt) -> bool:
    """True for a function but the script's own, and for a constant."""
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant)
    return node.name not in ("main", "parse_args") and not node.decorator_list


def tried(name: str, code: str, rewards: list[str]) -> tuple[str, str]:
    """Returns what became of a class, and why."""
    with tempfile.TemporaryDirectory() as folder:
        file, data = Path(folder, "trl_classes.py"), Path(folder, "rows.jsonl")
        file.write_text(code)
        data.write_text("\n".join(map(json.dumps, ROWS)))
        options = {"path": str(data), "episode": f"{file}:{name}"}
        if rewards:
            options["reward"] = f"{file}:{','.join(rewards)}"
        try:
            env = make_env("dataset", **options)
        except UserError as error:
            is_name = re.search(r"(NameError|TypeError: 'NoneType').*", str(error))
            return (NOT_RUN, is_name[0]) if is_name else (REFUSED, str(error)[-200:])
        with Scorer("dataset", options, num_workers=1, timeout=20) as scorer:
            first, again, end = scorer.request_outcomes([(0, Turns(0, ())), (0, Turns(1, ())), (0, Turns(0, (), True))])
            if isinstance(end, Failure) or isinstance(first, Failure):
                reason = next(outcome.reason for outcome in (first, end) if isinstance(outcome, Failure))
                return (NOT_RUN if "NameError" in reason else WRONG), reason[:200]
            repeats = first == again and scorer.repeats(repeated_jobs(env))
    return RUNS, f"reward {end.reward:g}" + ("" if repeats else ", draws elsewhere, and says so")
