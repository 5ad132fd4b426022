"""Base class of environments: numbered problems, and rewards for replies or for episodes."""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from envs.grading.answers import final_answer
from utils.settings.errors import UserError

NOT_APPLICABLE = "not_applicable"  # part that counts replies without a score, whose return is NaN
MAX_OBSERVED = 100_000  # characters of an environment's messages in a step; longer text is cut
ANSWER_STARTS = {"tags": "<answer>", "boxed": "\\boxed{", "hash": "#### "}  # beginning of an answer, by form


@dataclass(frozen=True)
class ForcedAnswer:
    """Beginning of an answer, written for a reply that comes near its limit without one."""

    start: str = "<answer>"
    signs: tuple[str, ...] = ("<answer>",)  # texts that show that an answer has begun
    opening: str = ""  # the end of the prompt, which the reply continues; it may have opened a think block

    def text_after(self, reply: str) -> str:
        """Returns what to write after this reply, on a new line; empty if the reply has begun its answer."""
        text = self.opening + reply
        if any(sign in text for sign in self.signs):
            return ""
        if text.rfind("<think>") > text.rfind("</think>"):
            return "</think>\n" + self.start
        return self.start if text.endswith("\n") else "\n" + self.start


@dataclass(frozen=True)
class Problem:
    """One task: chat messages for the model, and what `score` needs to grade the reply.

    `thinking` and `prefix` set how the reply begins: Qwen3's thinking switch, and text that the prompt writes for the
    assistant (for example "<think>"). The prefix is graded with the reply. `plain` leaves the chat template out.
    """

    messages: list[dict[str, Any]]  # role and content, and what else a chat template reads
    answer: Any = None
    thinking: bool = False
    prefix: str = ""
    plain: bool = False
    tools: tuple[Callable[..., object] | Mapping[str, object], ...] = ()  # announced: functions, or JSON schemas
    seed: int = 0  # seeds what an episode generates before its first turn; equal for all samples of a group
    place: str = ""  # file and line of its row


class Text(str):
    """A text of the policy with the token ids that were sampled."""

    ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, ids: Iterable[int]) -> Self:
        new = cls(text)
        new.ids = tuple(map(int, ids))
        return new


class Reply(NamedTuple):
    """A turn of the policy."""

    text: str
    calls: tuple[str, ...] = ()  # tool calls: the text between the markers of the environment's dialect


class Dialect(NamedTuple):
    """Markers of a tool call. If the tokenizer has them as single tokens, only these tokens make a call.

    Without markers a reply is a call if it is a JSON object, alone or in a code block.
    """

    opening: str
    closing: str
    result_opening: str = ""  # before a result that is written after its call; the turn stops there and continues
    result_closing: str = ""

    @property
    def is_inline(self) -> bool:
        """True if results are written after calls, without the chat template."""
        return bool(self.result_opening)


DIALECTS = {
    "qwen": Dialect("<tool_call>", "</tool_call>"),
    "python": Dialect("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),  # nanochat
    "json": Dialect("", ""),  # Llama 3; Qwen2.5-Coder, which does not write the markers of its template
}
TURN_DIALECTS = tuple(name for name, dialect in DIALECTS.items() if not dialect.is_inline)  # results are messages
INLINE = "inline"  # role of a result that is written after a call, between the dialect's markers


class Step(NamedTuple):
    """Response of an environment to a turn of the policy."""

    messages: list[dict[str, str]]  # response, with roles as in a prompt; not read if the episode is done
    reward: float = 0.0  # earned by this turn; the return of an episode is the sum of its turns' rewards
    done: bool = False
    info: Mapping[str, float] = MappingProxyType({})  # to be logged, summed over turns; "correct_answer" is 1.0 or 0.0


class OwnRollouts(NamedTuple):
    """The class that samples the episodes of an environment, by name: a run of other environments does not load it."""

    module: str
    name: str  # of a subclass of Conversations, core/chains/turns.py
    settings: object = None  # what the class reads


def cut(text: str, limit: int) -> str:
    """Returns a text of at most `limit` characters, and a note after it if some are left out."""
    return text if len(text) <= limit else text[:limit] + f" ... (truncated at {limit} of {len(text)} characters)"


class Episode:
    """One conversation with the policy, which can be replayed: a function of the problem, the seed and the replies."""

    opening: Sequence[Mapping[str, str]] = ()  # the prompt, if the environment `opens` its episodes

    def step(self, reply: str) -> Step:
        """Returns what follows a turn of the policy. An exception ends the episode, which is not trained on."""
        raise NotImplementedError

    def act(self, reply: Reply) -> Step:
        """Returns what follows a turn with its calls of tools."""
        return self.step(reply.text)

    def truncate(self) -> Step:
        """Returns the reward that is still due if a limit of turns or tokens ends the episode."""
        return Step([], done=True)

    def close(self) -> None:
        """Frees what the episode holds, at its end and if it is given up."""


def limited(step: Step) -> Step:
    """Returns a step whose messages have MAX_OBSERVED characters at most."""
    messages, num_left = [], MAX_OBSERVED
    for message in step.messages:
        if num_left > 0:
            messages.append({**message, "content": cut(str(message["content"]), num_left)})
            num_left -= len(messages[-1]["content"])
    return step._replace(messages=messages)


class Env:
    """Text in, rewards out. Subclass it, and add one line to the table in envs/__init__.py.

    A subclass writes `score` for problems with one reply, or `episode` and `max_turns` for conversations.
    The constructor takes `split` (one of `splits`: disjoint sets of problems) and its options, each with a default. The
    fields of a `dataclass(eq=False)`, which stays hashable, are options too. Each grading process makes its own
    environment from the same name and options: keep that quick.
    """

    splits: tuple[str, ...] = ("train", "test")  # and "valid" if there is room for one
    num_tasks: int  # problems 0 .. num_tasks - 1
    is_generated: bool = False  # problems are made up by their number, not read from rows
    num_eval_tasks: int = 512  # problems of an evaluation, if the settings do not name a number; 0: all
    tokens_per_action: int = 512  # default completion limit in tokens, for all turns and the messages between them
    max_turns: int = 1  # turns of the policy in an episode; 1: its only reply goes to `score`
    tokens_per_turn: int = 0  # limit of a turn, if there are several, in tokens; 0: none
    takes_ids: bool = False  # texts to grade carry their token ids: `Text`
    takes_groups: bool = False  # one call of `score_group` grades all replies to a problem
    distinct_rows: Sequence[Any] = ()  # of a data set; training and held-out problems must not share any
    opens: bool = False  # each episode writes its own prompt, its `opening`; the problem does not
    dialect: str = ""  # form of tool calls, one of DIALECTS; empty: there are no tools
    force_answer_at: int = -1  # tokens before that limit at which an answer is forced; -1: never
    truncation_penalty: float = 0.0  # subtracted from a positive return of a truncated reply
    form: str = "tags"  # form of answers: tags, boxed, hash or any; names where to look for them, and what is forced
    rollouts: OwnRollouts | None = None  # a class of its own samples its episodes; None: one of core/chains/
    code: tuple[Path, ...] = ()  # the user's files that it runs
    note: str = ""  # printed once at the start: facts on its rows, separated by "; "

    @property
    def has_turns(self) -> bool:
        """True if an episode is a conversation, or has some."""
        return self.max_turns > 1 or self.rollouts is not None

    def problem(self, index: int) -> Problem:
        """Returns the problem with this number: a pure function of the index, the same in every process."""
        raise NotImplementedError

    def bins(self) -> list[str]:
        """Returns the name of each problem's bin, for --task_sampling bins; empty if the environment has none."""
        return []

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """Returns the rewards of a completion, always under the same keys; never raises, whatever the text.

        "return" is what training maximizes, "correct_answer" is 1.0 or 0.0 if it is known; all keys are logged.
        """
        raise NotImplementedError

    def score_group(self, problem: Problem, texts: Sequence[str]) -> list[dict[str, float]]:
        """Returns the rewards of each of several completions of a problem, which may depend on one another."""
        return [self.score(problem, text) for text in texts]

    def reward_row(self, problem: Problem) -> dict[str, Any]:
        """Returns the arguments that the user's reward gets for a problem, by name."""
        return {"prompt": problem.messages, "answer": problem.answer}

    def episode(self, problem: Problem, seed: int) -> Episode:
        """Returns a new episode; all randomness in it depends on the seed alone."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees what the environment holds, at the end of its process."""

    def answer(self, text: str) -> str | None:
        """Returns the answer that a reply gives, as it is written; None if it gives none."""
        return final_answer(text, self.form)

    def vote(self, text: str) -> str | None:
        """Returns the answer that a reply gives in one spelling, for majorities; None if it gives none."""
        from envs.grading.words import one_spelling

        answer = self.answer(text)
        return None if answer is None else one_spelling(answer)

    def examples(self, problem: Problem) -> dict[str, str]:
        """Returns example replies by name: "right" earns full marks, "wrong" looks alike; by default the reference."""
        return {"reference": problem.answer} if isinstance(problem.answer, str) else {}

    def trials(self, problem: Problem) -> list[str]:
        """Returns replies that give the reference in the ways of models, and must be right; may be empty."""
        return []


def shown_form(messages: Iterable[Mapping[str, Any]]) -> str:
    """Returns the form of answers that messages show; empty if they show none."""
    text = "".join(message["content"] for message in messages)
    return next((form for form, start in ANSWER_STARTS.items() if start.strip(" {") in text), "")


def choose_split(identity: str) -> str:
    """Returns the split of a text's digest: test for one in five, valid for one in ten, else train."""
    digest = zlib.crc32(identity.encode())
    return "test" if digest % 5 == 0 else "valid" if digest % 10 == 1 else "train"


def check_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Raises UserError if the value of an option is none of its choices."""
    if value not in choices:
        raise UserError(f"{option}={value}: choose one of {', '.join(choices)}")


class Changed(Env):
    """An environment that has from another one what its class does not define."""

    def __init__(self, env: Env):
        self.env = env
        methods = ("problem", "episode", "close", "answer", "examples", "trials", "reward_row", "bins")
        for name in {*Env.__annotations__, *methods} - vars(type(self)).keys():
            setattr(self, name, getattr(env, name))

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        return self.score_group(problem, [text])[0]
