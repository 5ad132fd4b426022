"""Your agent's program as an environment: it talks to the policy as to a model's endpoint, and prints its reward.

    python core/grpo.py --env_name agent --env_options path=problems.jsonl --agent "python my_agent.py"

The program reads OPENAI_BASE_URL, OPENAI_API_KEY, and its row of the data as JSON in ROW. Its last line is its reward:
a number, an object of parts, or null if it has none. If that line is not JSON, the last reply is graded, by `--reward`
or the column `answer`. `--agent FILE.py:FUNCTION` calls a function with the row instead.
"""

from importlib.util import find_spec
from typing import NamedTuple

from envs.base import TURN_DIALECTS, OwnRollouts, Problem, check_choice
from envs.own.adapters import Played
from envs.own.dataset import Dataset
from envs.own_code import code_files
from recipes.agents.keeper import is_function
from utils.settings.errors import UserError

PACKAGES = ("starlette", "uvicorn", "pydantic")


def check_packages(what: str) -> None:
    """Raises UserError with the line that installs missing packages."""
    if any(find_spec(name) is None for name in PACKAGES):
        raise UserError(f"{what} needs more packages: `pip install {' '.join(PACKAGES)}`")


class AgentSettings(NamedTuple):
    """How programs are run."""

    command: str  # of the shell
    num_processes: int = 0  # programs at a time; 0: 32 functions or four commands for each core
    timeout: float = 600.0  # seconds of a program
    max_calls: int = 32  # replies of a program, after which it gets a text that is not trained
    memory_gb: float = 4.0  # of a program and all that it starts
    dialect: str = "qwen"


class Agent(Dataset):
    """Rows of a file, each the task of a program. A row needs no prompt and no answer; rows may repeat."""

    makes_prompts, needs_answer = True, False

    def __init__(
        self,
        split: str = "train",
        path: str = "",  # as of the environment dataset, also the options that follow
        test_path: str = "",
        prompt: str = "",
        answer: str = "",
        form: str = "any",
        reward: str = "",
        reward_weights: str = "",
        agent: str = "",  # command of the shell, or FILE.py:FUNCTION
        agent_processes: int = 0,  # programs at a time; 0: 32 functions or four commands for each core
        timeout: float = 600.0,  # seconds of a program
        max_model_calls: int = 32,  # replies of a program
        memory: float = 4.0,  # GB of a program
        dialect: str = "qwen",  # form of tool calls: qwen or json
        tokens_per_action: int = 1024,
        skip_bad_rows: bool = False,
    ):
        if not agent:
            raise UserError('the environment agent needs a program: --agent "python my_agent.py", or FILE.py:FUNCTION')
        if agent.endswith(".py") and not agent.split()[1:]:
            raise UserError(f"--agent {agent} names no function: give {agent}:FUNCTION, or a command, python {agent}")
        check_packages("the environment agent")
        check_choice("dialect", dialect, TURN_DIALECTS)
        if agent_processes < 0 or min(timeout, max_model_calls, memory) <= 0:
            raise UserError("agent needs agent_processes >= 0, and timeout, max_model_calls, memory above 0")
        super().__init__(
            split=split, path=path, test_path=test_path, prompt=prompt, answer=answer, form=form, reward=reward,
            reward_weights=reward_weights, tokens_per_action=tokens_per_action, skip_bad_rows=skip_bad_rows,
        )  # fmt: skip
        self.code = (*self.code, *code_files(agent)) if is_function(agent) else self.code
        self.dialect = dialect
        programs = AgentSettings(agent, agent_processes, timeout, max_model_calls, memory, dialect)
        self.rollouts = OwnRollouts("recipes.agents.rollouts", "AgentConversations", programs)

    def grade(self, problem: Problem, played: Played) -> dict[str, float]:
        """Returns the rewards of a program's last reply; `unscored` if nothing says what they are."""
        if not (self.rewards or self.references(problem)):
            return {"return": 0.0, "correct_answer": 0.0, "unscored": 1.0}
        return super().grade(problem, played)
