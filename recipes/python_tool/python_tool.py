"""Python: questions of mathematics, and a tool that runs code of the policy in a process of its own.

A call is a new process: nothing is left of it but its output. So an episode can be played again from its replies,
unless the code reads a clock, or draws random numbers without a seed.
"""

from dataclasses import dataclass, replace
from functools import partial

from envs import make_env
from envs.base import DIALECTS, Env, Episode, Problem, Reply, Step, check_choice
from envs.tools.episode import ToolEpisode, ToolSettings
from recipes.python_tool.interpreter import Interpreter
from utils.settings.errors import UserError

PROBLEMS = ("gsm8k", "deepscaler", "aime", "aime25", "amc", "amc23", "math500")
INLINE_PROMPT = "\nCode between {opening} and {closing} is run, and what it prints is written behind it."
MAX_SECONDS = 3600


@dataclass(eq=False)
class Python(Env):
    """Questions of another environment, `problems`, which grades the last reply; each call lowers the reward.

    The splits are those of the questions.
    """

    splits = ("train", "valid", "test")

    split: str = "train"
    problems: str = "gsm8k"  # one of PROBLEMS
    data_dir: str = ""
    form: str = "boxed"  # form of answers that prompts ask for: tags, boxed, hash or any
    partial: float = 0.0
    dialect: str = "qwen"  # form of calls: qwen, python or json
    max_turns: int = 6
    max_tool_calls: int = 8
    call_cost: float = 0.0
    tool_error_reward: float = 0.0  # added for each call that fails
    seconds: float = 5.0  # time limit of all calls of a turn; less than --score_timeout
    memory: int = 1024  # MiB of address space
    sandbox: str = "on"  # off: limits of time, memory and files only
    skip_bad_rows: bool = False

    def __post_init__(self):
        check_choice("dialect", self.dialect, DIALECTS)
        check_choice("sandbox", self.sandbox, ("on", "off"))
        check_choice("problems", self.problems, PROBLEMS)
        if self.max_turns < 2 or not 0 < self.seconds <= MAX_SECONDS or self.memory < 64:
            raise UserError(
                f"Python needs max_turns >= 2, 0 < seconds <= {MAX_SECONDS}, and memory >= 64 (MiB): correct "
                "--env_options"
            )
        options = {name: getattr(self, name) for name in ("data_dir", "form", "partial", "skip_bad_rows")}
        name = self.problems if self.split == "train" else f"{self.problems}-{self.split}"
        self.questions = make_env(name, **options)
        self.interpreter = Interpreter(self.seconds, self.memory << 20, self.sandbox == "on")
        self.interpreter.check()
        self.note = self.questions.note
        self.num_tasks = self.questions.num_tasks
        self.num_eval_tasks = self.questions.num_eval_tasks
        self.tokens_per_action = 2 * self.questions.tokens_per_action

    def problem(self, index: int) -> Problem:
        problem = replace(self.questions.problem(index), thinking=False, prefix="")
        dialect = DIALECTS[self.dialect]
        if not dialect.is_inline:
            return replace(problem, tools=(self.interpreter.python,))
        *messages, message = problem.messages
        content = message["content"] + INLINE_PROMPT.format(opening=dialect.opening, closing=dialect.closing)
        return replace(problem, messages=[*messages, message | {"content": content}])

    def episode(self, problem: Problem, seed: int) -> Episode:
        return PythonEpisode(problem, self)

    def examples(self, problem: Problem) -> dict[str, str]:
        return self.questions.examples(problem)


class PythonEpisode(ToolEpisode):
    """A question, whose environment grades the last reply."""

    def __init__(self, problem: Problem, env: Python):
        self.interpreter = replace(env.interpreter)
        prices = {"error_reward": env.tool_error_reward, "call_cost": env.call_cost}
        settings = ToolSettings(env.dialect, env.max_tool_calls, **prices)
        super().__init__([self.interpreter.python], settings, partial(env.questions.score, problem))

    def act(self, reply: Reply) -> Step:
        self.interpreter.renew()
        return super().act(reply)
