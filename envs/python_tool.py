"""Python: questions of mathematics, and a tool that runs code of the policy in a process of its own.

A call is a new process: nothing is left of it but its output. So an episode can be played again from its replies,
unless the code reads a clock, or draws random numbers without a seed.
"""

from collections.abc import Mapping
from dataclasses import replace

from envs import make_env
from envs.base import DIALECTS, Env, Episode, Problem, Reply, Step
from envs.tools.episode import ToolEpisode, ToolSettings
from envs.tools.interpreter import Interpreter
from utils.settings.errors import UserError

PROBLEMS = ("gsm8k", "deepscaler", "aime", "aime25", "amc", "amc23", "math500")
INLINE_PROMPT = "\nCode between {opening} and {closing} is run, and what it prints is written behind it."
MAX_SECONDS = 3600


class Python(Env):
    """Asks the questions of another environment, `problems`, which grades the last reply; pays less for each call.

    The splits are those of the questions.
    """

    splits = ("train", "valid", "test")

    def __init__(
        self,
        split: str = "train",
        problems: str = "gsm8k",  # one of PROBLEMS
        data_dir: str = "",
        form: str = "boxed",  # in which the answer is asked for: tags, boxed, hash or any
        partial: float = 0.0,
        dialect: str = "qwen",  # of calls: qwen or python
        max_turns: int = 6,
        max_tool_calls: int = 8,
        call_cost: float = 0.0,
        tool_error_reward: float = 0.0,  # for each call that fails
        seconds: float = 5.0,  # for all calls of a turn; less than --score_timeout
        memory: int = 1024,  # MiB of address space
        sandbox: str = "on",  # off: limits of time, memory and files only
        skip_bad_rows: bool = False,
    ):
        if dialect not in DIALECTS or sandbox not in ("on", "off"):
            raise UserError(f"Python has the dialects {', '.join(DIALECTS)}, and sandbox=on or off")
        if problems not in PROBLEMS:
            raise UserError(f"problems={problems}: choose one of {', '.join(PROBLEMS)}")
        if max_turns < 2 or not 0 < seconds <= MAX_SECONDS or memory < 64:
            raise UserError(f"Python needs max_turns >= 2, 0 < seconds <= {MAX_SECONDS}, and memory >= 64 (MiB)")
        options = {"data_dir": data_dir, "form": form, "partial": partial, "skip_bad_rows": skip_bad_rows}
        name = problems if split == "train" else f"{problems}-{split}"
        self.questions = make_env(name, **options)
        self.interpreter = Interpreter(seconds, memory << 20, sandbox == "on")
        self.interpreter.check()
        self.settings = ToolSettings(dialect, max_tool_calls, error_reward=tool_error_reward, call_cost=call_cost)
        self.dialect = dialect
        self.max_turns = max_turns
        self.form = form
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
        super().__init__([self.interpreter.python], env.settings)
        self.problem = problem
        self.questions = env.questions

    def act(self, reply: Reply) -> Step:
        self.interpreter.renew()
        return super().act(reply)

    def final_reward(self, text: str) -> Mapping[str, float]:
        return self.questions.score(self.problem, text)
