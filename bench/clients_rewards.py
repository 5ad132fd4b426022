"""TRL's published rewards on replies to mathematics: their values when TRL calls them, and here by --reward.

    pip install trl math-verify
    python bench/clients.py rewards
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bench.clients import EQUAL, REFUSED, WRONG, Row
from envs import make_env
from envs.base import Text
from envs.scoring.scorer import Scorer
from envs.scoring.worker import Failure
from utils.settings.errors import UserError

PACKAGES = ("trl", "math-verify")
MADE = """
from trl.rewards import *
cosine = get_cosine_scaled_reward(max_len=40)
overlong = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=10)
repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
"""
NAMES = (
    "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "cosine", "overlong", "repetition"
)  # fmt: skip
SOLUTIONS = 4 * (r"\boxed{18}", r"$\frac{1}{2}$", "(no mathematics)", "18")
REPLIES = (
    r"It is \boxed{18}.", "<think>\n9 + 9\n</think>\nThe answer is $18$.", "18", "", r"\boxed{\frac{1}{2}}",
    "so so so so so so so so so so so so so so so so", r"<think>half of 36</think> \boxed{0.5}",
)  # fmt: skip


def rows() -> Iterator[Row]:
    """Yields how many values of each reward are equal."""
    namespace = {}
    exec(MADE, namespace)
    for name in NAMES:
        yield Row(name, *compared(name, namespace[name]))


def compared(name: str, reward: Callable) -> tuple[str, str]:
    """Returns what became of a reward, and why."""
    prompts = [[{"role": "user", "content": f"Problem {i}?"}] for i in range(len(SOLUTIONS))]
    with tempfile.TemporaryDirectory() as folder:
        file, data = Path(folder, "trl_rewards.py"), Path(folder, "rows.jsonl")
        file.write_text(MADE)
        lines = [{"prompt": p, "solution": s, "answer": s} for p, s in zip(prompts, SOLUTIONS, strict=True)]
        data.write_text("\n".join(map(json.dumps, lines)))
        options = {"path": str(data), "reward": f"{file}:{name}"}
        try:
            env = make_env("dataset", **options)
        except UserError as error:
            return REFUSED, str(error)[-200:]
        problems = [env.problem(i) for i in range(env.num_tasks)]
        ids = [list(range(7 * i)) for i in range(len(REPLIES))]
        jobs = [(i, Text.of(text, x)) for i in range(len(problems)) for text, x in zip(REPLIES, ids, strict=True)]
        with Scorer("dataset", options, num_workers=1, timeout=60) as scorer:
            found = scorer.request_outcomes(jobs)
        solution = {str(p): s for p, s in zip(prompts, SOLUTIONS, strict=True)}
        arguments = {
            "prompts": [problems[i].messages for i, _ in jobs],
            "completions": [[{"role": "assistant", "content": str(text)}] for _, text in jobs],
            "completion_ids": [list(text.ids) for _, text in jobs],
            "solution": [solution[str(problems[i].messages)] for i, _ in jobs],
        }
        expected = [np.nan if x is None else x for x in reward(**arguments)]
    values = [outcome.reason if isinstance(outcome, Failure) else outcome["return"] for outcome in found]
    failed = [value for value in values if isinstance(value, str)]
    if failed:
        return WRONG, failed[0][:200]
    wanted = np.nan_to_num(expected)  # TRL leaves what does not apply out of the sum of rewards
    num_equal = int(np.isclose(values, wanted, atol=1e-6).sum())
    outcome = EQUAL if num_equal == len(jobs) else WRONG
    return outcome, f"{num_equal} of {len(jobs)} values, {int(np.isnan(expected).sum())} of them None"
