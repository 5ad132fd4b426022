"""Options that every environment takes: the form of its prompts, and a reward for the form of replies."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envs.base import Changed, Env, Problem, check_choice
from utils.settings.errors import UserError

NONE = "none"  # value of an option that removes what the environment has


@dataclass(frozen=True)
class Style:
    """Changes of prompts and rewards; the defaults leave the environment as it is."""

    system: str = ""  # system prompt; @FILE: the text of this file
    thinking: str = ""  # on or off: Qwen3's switch
    prefix: str = ""  # beginning of the reply, such as <think>: the prompt writes it, and it is graded with the reply
    plain: bool = False  # no chat template: the contents of the messages, for base models
    format_reward: str = ""  # think_answer, tags or blocks, as in envs/grading/rewards.py: for the form of replies
    format_weight: float = 0.1  # its factor in the return

    def __post_init__(self):
        if self.thinking:
            check_choice("thinking", self.thinking, ("on", "off"))
        if self.format_reward:
            from envs.grading.rewards import FORMAT_REWARDS

            check_choice("format_reward", self.format_reward, FORMAT_REWARDS)
        if self.system.startswith("@") and not Path(os.path.expanduser(self.system[1:])).is_file():
            raise UserError(f"system={self.system} names no file: correct the path")


class Styled(Changed):
    """An environment with another style."""

    def __init__(self, env: Env, style: Style):
        super().__init__(env)
        self.style = style
        self.system = style.system
        if style.system.startswith("@"):
            self.system = Path(os.path.expanduser(style.system[1:])).read_text(encoding="utf-8").strip()

    def problem(self, index: int) -> Problem:
        problem, style = self.env.problem(index), self.style
        messages = problem.messages
        if self.system:
            messages = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": self.system}] * (self.system != NONE) + messages
        prefix = style.prefix or problem.prefix * (style.thinking != "off")  # off: the template closes the think block
        return replace(
            problem,
            messages=messages,
            thinking=style.thinking == "on" if style.thinking else problem.thinking,
            prefix="" if prefix == NONE else prefix,
            plain=style.plain or problem.plain,
        )

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[dict[str, float]]:
        graded = self.env.score_group(problem, texts)
        if not self.style.format_reward:
            return graded
        from envs.grading.rewards import FORMAT_REWARDS

        forms = map(FORMAT_REWARDS[self.style.format_reward], texts)
        added = [{"return": self.style.format_weight * form, "format": form} for form in forms]
        pairs = zip(graded, added, strict=True)
        return [scores | own | {"return": scores["return"] + own["return"]} for scores, own in pairs]
