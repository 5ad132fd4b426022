"""An environment of verifiers in its published form, and the function by which it is played against the policy.

    pip install "verifiers<0.4"    # 0.4 has tasksets and harnesses instead
    python recipes/agents/verifiers_guess.py runs/verifiers    # writes the rows: numbers of its examples
    python core/grpo.py --config recipes/agents/preset.py --agent recipes/agents/verifiers_guess.py:play \\
        --env_options path=runs/verifiers/train.jsonl,test_path=runs/verifiers/test.jsonl

For another environment, replace `load_environment` by that of its package: the rest stays.
"""

import asyncio
import json
import logging
import random
import re
import sys
from pathlib import Path

try:
    import verifiers as vf
except ImportError:  # of the tests
    vf = None
else:
    if not hasattr(vf, "MultiTurnEnv"):
        raise ImportError('this release of verifiers has no MultiTurnEnv: pip install "verifiers<0.4"')
    from datasets import Dataset

SIZES = {"train": 4000, "test": 256}


class Guess(vf.MultiTurnEnv if vf else object):
    """Find a number; each guess is answered with "higher" or "lower"."""

    async def env_response(self, messages: list, state: dict, **_) -> list[dict[str, str]]:
        guess, number = guess_of(messages[-1]), int(state["answer"])
        if guess == number:
            state["final_env_response"] = []
            return []
        return [{"role": "user", "content": "number?" if guess is None else "higher" if guess < number else "lower"}]


def guess_of(message: object) -> int | None:
    numbers = re.findall(r"[0-9]{1,9}", str(message.content))
    return int(numbers[-1]) if numbers else None


def found(completion: list, answer: str) -> float:
    """Returns 1 for the number, minus 0.05 for each wrong guess before it."""
    guesses = [guess_of(message) for message in completion if message.role == "assistant"]
    return 1 - 0.05 * (len(guesses) - 1) if guesses and guesses[-1] == int(answer) else 0.0


def load_environment() -> "vf.Environment":
    """Returns the environment, as packages for verifiers do."""
    rows = {split: Dataset.from_list(examples(split)) for split in SIZES}
    return Guess(dataset=rows["train"], eval_dataset=rows["test"], rubric=vf.Rubric(funcs=[found]), max_turns=5)


def examples(split: str) -> list[dict[str, str]]:
    """Returns ranges of 16 to 31 numbers; a range is in one split alone."""
    rng, rows = random.Random(split), []
    while len(rows) < SIZES[split]:
        low, size = rng.randint(1, 69), rng.randint(16, 31)
        if ((31 * low + size) % 5 == 0) == (split == "test"):
            question = f"Guess {low} to {low + size - 1}."
            rows.append({"question": question, "answer": str(rng.randint(low, low + size - 1))})
    return rows


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in SIZES.items():
        rows = [json.dumps({"index": index, "split": split}) + "\n" for index in range(number)]
        (folder / f"{split}.jsonl").write_text("".join(rows))
elif vf:  # once, before programs are forked
    logging.disable()
    ENVIRONMENT = load_environment()
    EXAMPLES = {"train": ENVIRONMENT.get_dataset(), "test": ENVIRONMENT.get_eval_dataset()}


def play(index: int, split: str, base_url: str) -> dict[str, float]:
    """Plays an example, and returns its reward, and whether the number was found."""
    client = vf.ClientConfig(api_base_url=base_url, api_key_var="OPENAI_API_KEY", max_retries=0)
    options = {"max_tokens": 8}
    output = asyncio.run(ENVIRONMENT.run_rollout(EXAMPLES[split][index], client, "policy", options))
    return {"reward": output["reward"], "correct_answer": float(output["reward"] > 0)}
