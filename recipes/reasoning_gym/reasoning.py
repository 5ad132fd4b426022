"""Reasoning Gym: any of its hundred generated data sets, or a weighted mixture, scored by its own verifiers.

    --env_name reasoning_gym --env_options datasets=leg_counting
    --env_name reasoning_gym --env_options "datasets=spell_backward*2(min_word_len=3;max_word_len=10)+leg_counting"
    --env_name reasoning_gym --env_options datasets=mixture.yaml

The file lists `{name: ..., weight: ..., config: {...}}`: a list, or under `specs`, or in policy-gradients' block
`data: {size, specs}`, whose size is the number of training problems.
Source: github.com/open-thought/reasoning-gym, github.com/zafstojano/policy-gradients (system prompt, files).
"""

import copy
import math
import os
import random
import re
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from envs.base import Env, Problem, choose_split
from envs.grading.answers import extract_answer
from recipes.reasoning_gym.verifiers import AUDITED, check_release, may_be_verified
from utils.settings.checks import read_yaml
from utils.settings.errors import UserError, check_installed

SPEC = re.compile(r"(\w+)(?:\*(\d*\.?\d+))?(?:\((.*)\))?")
MAX_DRAWS, STRIDE = 1000, 1_000_003  # a prime: attempts for one of many questions do not return to earlier ones
SEED_OFFSETS = {"train": 0, "test": 2**30, "valid": 2**31}
MADE_AT_ONCE = ("acre", "gsm_symbolic", "list_functions", "word_ladder")  # these make all their questions at the start
FEW = 10_000  # questions of a data set that is read in order, so that no question comes twice before all have come


class Spec(NamedTuple):
    """One data set of a mixture."""

    name: str
    weight: float
    config: dict[str, Any]


class Entry(dict):
    """A question with its answer, and the data set that verifies replies."""

    dataset: Any


class SplitQuestions:
    """The questions of one split of a data set. If there are few, each comes once before any comes again."""

    def __init__(self, dataset: Any, split: str):
        self.dataset, self.split = dataset, split
        self.entries: list[Entry] = []  # of few questions, those that were found so far
        self.positions = iter(range(dataset.size))  # of few questions, those that were not looked at yet
        self.questions: set[str] = set()  # of entries

    def entry(self, index: int) -> Entry | None:
        """Returns a question; None if the split has none."""
        if self.dataset.size > FEW:
            positions = ((index + draw * STRIDE) % self.dataset.size for draw in range(MAX_DRAWS))
            return next(filter(self.is_asked, map(self.read, positions)), None)
        unread = map(self.read, self.positions)
        while len(self.entries) <= index and (entry := next(unread, None)):
            if self.is_asked(entry) and entry["question"] not in self.questions:
                self.questions.add(entry["question"])
                self.entries.append(entry)
        return self.entries[index % len(self.entries)] if self.entries else None

    def read(self, position: int) -> Entry:
        entry = Entry(self.dataset[position])
        entry.dataset = self.dataset
        return entry

    def is_asked(self, entry: Entry) -> bool:
        return choose_split(entry["question"]) == self.split


class ReasoningGym(Env):
    """The reward is the score of the data set's own verifier, 0 to 1; correct is 1.

    The digest of a question decides its split, a fifth for test and a tenth for valid. So no question is in two splits,
    however few questions a data set has. The splits also have different seeds.
    """

    splits = ("train", "valid", "test")
    is_generated = True
    tokens_per_action = 1024

    def __init__(self, split: str = "train", datasets: str = "leg_counting", seed: int = 42, num_tasks: int = 0):
        check_installed("reasoning_gym", "the environment reasoning_gym", f"reasoning-gym=={AUDITED}")
        import reasoning_gym

        check_release(metadata.version("reasoning-gym"))
        self.split = split
        self.specs, size = read_specs(datasets)
        self.num_tasks = num_tasks if num_tasks > 0 else size or 10_000 if split == "train" else 512
        self.system = reasoning_gym.utils.SYSTEM_PROMPTS["DeepSeekZero"].strip()  # as in policy-gradients
        self.seed = seed + SEED_OFFSETS[split]
        self.asked = []
        for spec in self.specs:
            try:
                size = 5000 if spec.name in MADE_AT_ONCE else 2**30
                config = {"seed": self.seed, "size": size} | spec.config
                self.asked.append(SplitQuestions(reasoning_gym.create_dataset(spec.name, **config), split))
            except (ValueError, TypeError, AssertionError, KeyError) as error:
                raise UserError(f"Reasoning Gym's {spec.name} with config {spec.config}: {error}") from error
        self.problem(0)  # a data set without questions for this split fails here, not in the middle of a run

    def number_of(self, index: int) -> int:
        """Returns the number of the data set that a problem is of."""
        weights = [spec.weight for spec in self.specs]
        return random.Random(f"reasoning_gym {self.seed} {index}").choices(range(len(weights)), weights)[0]

    def bins(self) -> list[str]:
        """Returns the data set of each problem, as `datasets` names it: a level of difficulty is its config."""
        names = [spec.name + "".join(f" {key}={value}" for key, value in spec.config.items()) for spec in self.specs]
        return [names[self.number_of(index)] for index in range(self.num_tasks)]

    def problem(self, index: int) -> Problem:
        asked = self.asked[self.number_of(index)]
        entry = asked.entry(index)
        if entry is not None:
            messages = [{"role": "system", "content": self.system}, {"role": "user", "content": entry["question"]}]
            return Problem(messages, entry, thinking=True)
        name = type(asked.dataset).__name__
        raise UserError(f"Reasoning Gym's {name} has too few questions for a {self.split} split: enlarge its config")

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        entry = problem.answer
        answer = extract_answer(text)
        value = 0.0
        if answer is not None and may_be_verified(answer, entry):
            try:
                copied = copy.deepcopy(dict(entry))  # some verifiers write into it
                value = float(entry.dataset.score_answer(answer, copied))
            except Exception:  # noqa: BLE001 (a verifier that raises has not accepted the answer)
                value = 0.0
        value = min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0
        return {"return": value, "correct_answer": float(value >= 1), "format": float(answer is not None)}

    def reward_row(self, problem: Problem) -> dict[str, Any]:
        return {"prompt": problem.messages, **copy.deepcopy(dict(problem.answer))}

    def examples(self, problem: Problem) -> dict[str, str]:
        right = problem.answer["answer"]
        answers = {"right": right, "wrong": "?"} if isinstance(right, str) else {"wrong": "?"}
        return {name: f"<answer>{answer}</answer>" for name, answer in answers.items()}


def read_specs(text: str) -> tuple[list[Spec], int]:
    """Returns the mixture that a text or a YAML or JSON file describes, and its number of problems (0: not given).

    Raises: UserError for anything else.
    """
    size = 0
    if text.endswith((".yaml", ".yml", ".json")):
        path = Path(os.path.expanduser(text))
        if not path.is_file():
            raise UserError(f"datasets={text} names no file that exists: correct the path")
        rows = read_yaml(path, str(path))
        if isinstance(rows, dict) and isinstance(rows.get("data"), dict):
            rows = rows["data"]
            size = rows.get("size", 0)
        if type(size) is not int or size < 0:
            raise UserError(f"{path}: data.size must be a number of problems, not {size!r}: correct it")
        rows = rows.get("specs", rows.get("datasets")) if isinstance(rows, dict) else rows
        if not isinstance(rows, list) or not all(map(is_spec, rows)):
            raise UserError(
                f"{path} must list data sets, each with a name, and a weight and a config if needed: correct it"
            )
        specs = [Spec(row["name"], float(row.get("weight", 1)), dict(row.get("config") or {})) for row in rows]
    else:
        specs = [parse_spec(item.strip()) for item in text.split("+")]
    if not specs or any(not math.isfinite(spec.weight) or spec.weight <= 0 for spec in specs):
        raise UserError(f"datasets={text} must name data sets, each with a weight above 0: correct it")
    return specs, size


def is_spec(row: object) -> bool:
    """True for a mapping that describes a data set."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return False
    return type(row.get("weight", 1)) in (int, float) and isinstance(row.get("config") or {}, dict)


def parse_spec(item: str) -> Spec:
    """Returns the data set of name, name*weight or name*weight(key=value;key=value)."""
    from envs import parse_options

    match = SPEC.fullmatch(item)
    if not match:
        raise UserError(f"datasets has {item!r}, which is not name*weight(key=value;key=value): correct it")
    name, weight, config = match.groups()
    return Spec(name, float(weight or 1), parse_options((config or "").replace(";", ",")))
