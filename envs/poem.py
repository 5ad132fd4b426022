"""Poem: the reward is the number of characters written, as in github.com/kvfrans/lmpo."""

import os
from pathlib import Path

from envs.base import Env, Problem
from utils.settings.errors import UserError

SUBJECTS = Path(__file__).parent / "data" / "imagenet_labels.txt"


class Poem(Env):
    """Reward 1 for each character, up to `max_characters` if that is set. Every fifth subject is for the test split.

    `subjects_file`: a text file with one subject a line, or a comment (#), instead of imagenet_labels.txt.
    """

    tokens_per_action = 128

    def __init__(self, split: str = "train", max_characters: int = 0, subjects_file: str = ""):
        if split not in ("train", "test"):
            raise UserError(f"Poem has no split {split!r}: choose train or test")
        if max_characters < 0:
            raise UserError("Poem needs max_characters >= 0: raise it, or give 0 for no maximum")
        path = Path(os.path.expanduser(subjects_file)) if subjects_file else SUBJECTS
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        lines = [line.strip() for line in lines]
        subjects = list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
        if len(subjects) < 2:
            raise UserError(f"Poem's subjects_file {path} has fewer than two subjects: write one on each line")
        self.max_characters = max_characters
        self.subjects = [subject for i, subject in enumerate(subjects) if (i % 5 == 0) == (split == "test")]
        self.num_tasks = len(self.subjects)

    def problem(self, index: int) -> Problem:
        prompt = f"Write three sentences about {self.subjects[index]}"
        return Problem([{"role": "user", "content": prompt}])

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """Returns the rewards and the length; a poem of `max_characters` is correct, if that is set."""
        if not self.max_characters:
            return {"return": float(len(text)), "characters": float(len(text))}
        value = float(min(self.max_characters, len(text)))
        return {"return": value, "correct_answer": float(value == self.max_characters), "characters": float(len(text))}

    def examples(self, problem: Problem) -> dict[str, str]:
        return {"right": "la " * (self.max_characters // 3 + 1), "wrong": ""}
