"""Rewards of TRL, open-r1 and verl by --reward, beside what their own trainers would get: how many values are equal.

    pip install --no-deps trl verl
    python bench/rewards_of_others.py --open_r1 FOLDER    # a checkout of github.com/huggingface/open-r1, 5dcfae8

Each file is named as it is installed; those that a trainer's docs show are written here in our words. Groups of eight
replies are graded in worker processes; the same functions are called directly with the arguments of their trainer. What
is not installed, or does not import, is skipped with the reason. Exit status 1: a value differs.
"""

import argparse
import asyncio
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from envs import make_env
from envs.base import Text
from envs.scoring.scorer import Scorer
from utils.settings.errors import UserError

TRL_FILE = """
import asyncio, functools, re
from trl.rewards import *
cosine = get_cosine_scaled_reward(max_len=40)
overlong = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=10)
repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)

def unique_letters(completions, **columns):
    return [len(set(c[0]["content"])) for c in completions]

def length_in_tokens(completion_ids, **columns):
    return [len(ids) / 10 for ids in completion_ids]

def boxed_is_equal(prompts, completions, solution, **columns):
    found = [re.search(r"boxed\\{(.*?)\\}", c[0]["content"]) for c in completions]
    return [float(m is not None and m[1] in s) for m, s in zip(found, solution)]

def only_boxed(prompts, completions, solution, **columns):
    return [None if "boxed" not in s else float(len(c)) for s, c in zip(solution, completions)]

async def waits(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [len(c[0]["content"]) / 100 for c in completions]

def ranks(prompts, completions, **columns):
    sizes = [len(c[0]["content"]) for c in completions]
    by_prompt = {}
    for p, size in zip(prompts, sizes):
        by_prompt.setdefault(str(p), []).append(size)
    return [sum(other < size for other in by_prompt[str(p)]) for p, size in zip(prompts, sizes)]
"""
TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "cosine", "overlong", "repetition")
DOCS = ("unique_letters", "length_in_tokens", "boxed_is_equal", "only_boxed", "waits", "ranks")
OPEN_R1 = ("accuracy_reward", "format_reward", "tag_count_reward", "reasoning_steps_reward", "len_reward")
VERL = {
    "gsm8k": ("gsm8k.py", "compute_score"),
    "math_reward": ("math_reward.py", "compute_score"),
    "math_dapo": ("math_dapo.py", "compute_score"),
    "math_verify": ("math_verify.py", "compute_score"),
    "search_r1_like_qa_em": ("search_r1_like_qa_em.py", "compute_score"),
    "math_batch": ("math_batch.py", "compute_score_batched"),
    "geo3k": ("geo3k.py", "compute_score"),
    "prime_math": ("prime_math/__init__.py", "compute_score"),
    "default_compute_score": ("__init__.py", "default_compute_score"),
}
SOLUTIONS = (r"\boxed{18}", r"$\frac{1}{2}$", "(no mathematics)", "18")
REPLIES = (
    r"It is \boxed{18}.", "<think>\n9 + 9\n</think>\nThe answer is $18$.", "18", "", r"\boxed{\frac{1}{2}}",
    "so so so so so so so so so so so so so so so so",
    "<think>\nFirst, 1. half of 36\n</think>\n<answer>\n\\boxed{18}\n</answer>\n#### 18",
    "<answer>17</answer> no, <answer>18</answer>",
)  # fmt: skip
IDS = [[x % 11 for x in range(7 * i)] for i in range(len(REPLIES))]
EQUAL, DIFFERENT, SKIPPED = "equal", "DIFFERENT", "skipped"


class Case(NamedTuple):
    """A reward of another trainer."""

    trainer: str
    name: str
    file: Path
    function: str


def cases(folder: Path, checkout: Path) -> Iterator[Case]:
    """Yields the rewards; those of TRL stand in a file in this folder, open-r1's in their checkout."""
    file = folder / "rewards_of_trl.py"
    file.write_text(TRL_FILE)
    yield from (Case("TRL", name, file, name) for name in TRL)
    yield from (Case("TRL's docs", name, file, name) for name in DOCS)
    yield from (Case("open-r1", name, checkout / "src/open_r1/rewards.py", name) for name in OPEN_R1)
    spec = importlib.util.find_spec("verl")
    scores = Path(spec.origin).parent / "utils/reward_score" if spec else Path("verl")
    yield from (Case("verl", name, scores / path, function) for name, (path, function) in VERL.items())


def rows(case: Case) -> list[dict[str, Any]]:
    """Returns rows as the data of the trainer has them."""
    prompts = [[{"role": "user", "content": f"Problem {i}?"}] for i in range(8 * len(SOLUTIONS))]
    made = []
    for i, prompt in enumerate(prompts):
        solution = SOLUTIONS[i % len(SOLUTIONS)]
        if case.trainer == "verl":
            plain = solution.removeprefix("\\boxed{").removesuffix("}").strip("$")
            truth = {"target": [plain]} if case.name.startswith("search") else plain
            row = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": truth}}
            made.append({**row, "prompt": prompt, "extra_info": {"index": i}})
        else:
            made.append({"prompt": prompt, "solution": solution, "answer": solution})
    return made


def compared(case: Case, folder: Path) -> tuple[str, str]:
    """Returns what became of a reward, and why."""
    if not case.file.is_file():
        return SKIPPED, f"{case.file} is not there"
    try:
        function = getattr(load(case.file), case.function)
    except ImportError as error:
        return SKIPPED, f"it does not import: {error}"
    data = folder / "rows.jsonl"
    made = rows(case)
    data.write_text("\n".join(map(json.dumps, made)))
    options = {"path": str(data), "reward": f"{case.file}:{case.function}"}
    texts = [Text.of(text, ids) for text, ids in zip(REPLIES, IDS, strict=True)]
    try:
        with Scorer("dataset", options, num_workers=1, timeout=60) as scorer:
            problems = read_problems(options)
            jobs = [(i, text) for i in range(len(problems)) for text in texts]
            found, _ = scorer.score_replies(*zip(*jobs, strict=True))
    except UserError as error:
        return DIFFERENT, str(error)[-200:]
    values = [np.nan if scores is None else scores["return"] for scores in found]
    expected = direct_values(case, function, problems)
    num_equal = int(np.isclose(values, expected, atol=1e-6, equal_nan=True).sum())
    outcome = EQUAL if num_equal == len(jobs) else DIFFERENT
    return outcome, f"{num_equal} of {len(jobs)} values, of {len(set(expected))} kinds"


def read_problems(options: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Returns the rows to train on, in order."""
    env = make_env("dataset", **options)
    return [env.problem(i).answer for i in range(env.num_tasks)]


def direct_values(case: Case, function: Callable, problems: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns what a reward gives with the arguments that its trainer gives; NaN for None: the reply has no reward."""
    values = []
    for row in problems:
        if case.trainer == "verl":
            values += verl_values(case, function, row)
            continue
        count = len(REPLIES)
        arguments = {
            "prompts": [row["prompt"]] * count,
            "completions": [[{"role": "assistant", "content": text}] for text in REPLIES],
            "completion_ids": IDS,
            "solution": [row["solution"]] * count,
        }
        values += [np.nan if value is None else value for value in completed(function(**arguments))]
    return values


def verl_values(case: Case, function: Callable, row: Mapping[str, Any]) -> list[float]:
    """Returns the scores of verl's function for all replies to a problem."""
    truth = row["reward_model"]["ground_truth"]
    if case.function.endswith("batched"):
        count = len(REPLIES)
        return function([row["data_source"]] * count, list(REPLIES), [truth] * count, [row["extra_info"]] * count)
    first = "data_source" in inspect.signature(function).parameters
    scores = [function(row["data_source"], text, truth) if first else function(text, truth) for text in REPLIES]
    scores = [score["score"] if isinstance(score, dict) else score for score in scores]
    return [float(score[0] if isinstance(score, tuple | list) else score) for score in scores]


def completed(value: Any) -> Any:
    """Returns a value; a coroutine is run to its result."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def load(file: Path) -> ModuleType:
    """Returns the module in a file by its name in the packages that it is in. Raises: ImportError."""
    parts, folder = [file.stem] if file.stem != "__init__" else [], file.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(".".join(parts))


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--open_r1", type=Path, default=Path("open-r1"), help="checkout of open-r1")
    checkout = parser.parse_args().open_r1.expanduser()
    outcomes = []
    names = [name for name in ("trl", "verl", "math-verify") if is_there(name)]
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    print("\n| trainer | reward | here | |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), checkout):
            outcome, detail = compared(case, Path(folder))
            outcomes.append(outcome)
            detail = " ".join(detail.split()).replace("|", "\\|")
            print(f"| {case.trainer} | `{case.name}` | {outcome} | {detail} |", flush=True)
    print(f"\n{outcomes.count(EQUAL)} of {len(outcomes)} equal, {outcomes.count(SKIPPED)} skipped")
    return int(DIFFERENT in outcomes)


def is_there(name: str) -> bool:
    """True for a package that is installed."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
