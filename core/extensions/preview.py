"""Preview of an environment before training: prompts as the model sees them, references, rewards, prompt lengths."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from envs.base import DIALECTS, Env, Problem, Reply
from models.tokenizer import tool_schema
from utils.metrics.logger import printable
from utils.settings.errors import describe_error, shorten

MAX_MEASURED = 1000  # prompts whose lengths are counted, spread over the environment
MAX_MADE_UP = 10_000  # problems that are all made in order to measure them
# Arguments of example calls, by the types of JSON's schema; "1" of all others, which is also an expression, and code.
ARGUMENTS = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}

Encode = Callable[[Problem], list[int]]  # returns the prompt of a problem, token ids
Decode = Callable[[list[int]], str]  # returns the text of token ids, special tokens included
Tasks = Int[np.ndarray, "N"]  # numbers of problems


def show(env: Env, encode: Encode, decode: Decode, count: int) -> str:
    """Returns the first `count` problems with the scores of example replies, and quantiles of prompt lengths in tokens.

    Control characters of the data are dropped, since a terminal obeys them.
    """
    lines = ["no model is run: these are problems, and example replies with their scores"]
    lines += [env.note] if env.note else []
    for index in range(min(count, env.num_tasks)):
        problem = env.problem(index)
        lines.append(f"======== problem {index}")
        lines.append(decode(encode(opened(env, problem))))
        lines.append(f"-------- reference {shorten(problem.answer)}")
        lines += [format_example(env, problem, "call", call) for call in example_calls(env, problem)]
        replies = {**env.examples(problem), "empty": ""}
        lines += [format_example(env, problem, name, Reply(text)) for name, text in replies.items()]
    lengths = prompt_lengths(env, encode)
    quantiles = []
    for percent in (5, 50, 95, 99):
        quantile = np.percentile(lengths, percent)
        quantiles.append(f"{percent}% {int(quantile)}")
    summary = f"tokens: {', '.join(quantiles)}, longest {max(lengths)}"
    lines.append(f"======== prompts: {env.num_tasks:,}; {summary}")
    text = "\n".join(lines)
    return printable(text, max_chars=len(text))


def example_calls(env: Env, problem: Problem) -> list[Reply]:
    """Returns a call of each tool that is announced, made from its schema: with the arguments that it requires."""
    calls = []
    for tool in problem.tools:
        function = tool_schema(tool)["function"]
        schema = function["parameters"]
        arguments = {name: example_argument(schema["properties"][name]) for name in schema.get("required", [])}
        call = json.dumps({"name": function["name"], "arguments": arguments})
        dialect = DIALECTS[env.dialect]
        calls.append(Reply(dialect.opening + call + dialect.closing, (call,)))
    return calls


def example_argument(schema: Mapping[str, object]) -> object:
    """Returns a value of an argument: the first of those that it may have, else one of its type."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    return ARGUMENTS.get(kind[0] if isinstance(kind, list) else kind, "1")


def opened(env: Env, problem: Problem) -> Problem:
    """Returns a problem with what its episodes say before the first turn."""
    if not env.opens:
        return problem
    episode = env.episode(problem, seed=0)
    episode.close()
    return replace(problem, messages=list(episode.opening))


def format_example(env: Env, problem: Problem, name: str, reply: Reply) -> str:
    """Returns a reply and its scores, on two lines."""
    text = problem.prefix + reply.text.removeprefix(problem.prefix)
    try:
        outcome = describe_outcome(env, problem, reply._replace(text=text))
    except Exception as error:  # of a reward or a class of the user's
        outcome = f"fails: {describe_error(error)}"
    indent = " " * 10
    return f"{name:>10} {shorten(reply.text)}\n{indent} {outcome}"


def describe_outcome(env: Env, problem: Problem, reply: Reply) -> str:
    """Returns the scores of a reply, or what follows it as the first turn of an episode, on a line."""
    if env.max_turns == 1:
        return describe_scores(env.score(problem, reply.text))
    episode = env.episode(problem, seed=0)
    step = episode.act(reply)
    episode.close()
    said = "the end" if step.done else " / ".join(message["content"] for message in step.messages)
    return f"{describe_scores({'reward': step.reward, **step.info})}: {shorten(said)}"


def describe_scores(scores: Mapping[str, float]) -> str:
    """Returns scores on a line."""
    return ", ".join(f"{key} {value:g}" for key, value in scores.items())


def prompt_lengths(env: Env, encode: Encode, tasks: Tasks | None = None) -> list[int]:
    """Returns the tokens of prompts: of these tasks, else of all or of MAX_MEASURED spread over the environment."""
    if tasks is None:
        count = min(MAX_MEASURED, env.num_tasks)
        places = np.linspace(0, env.num_tasks - 1, count)
        tasks = np.unique(places.astype(int))
    problems = (env.problem(int(task)) for task in tasks)
    return [len(encode(problem)) for problem in problems]


def tasks_that_fit(env: Env, encode: Encode, limit: int) -> Tasks | None:
    """Returns the numbers of the problems whose prompts have at most `limit` tokens; None: all of a large environment.

    Rows of files are all measured, whatever their number. Where problems are generated, of more than MAX_MADE_UP a
    sample of them is measured first, and the others only where a part of the sample is too long.
    """
    if env.is_generated and env.num_tasks > MAX_MADE_UP:
        sample = prompt_lengths(env, encode)
        if max(sample) <= limit:
            return None
        if min(sample) > limit:
            return np.array([], int)
    bound = TokenBound(encode)
    is_short = np.zeros(env.num_tasks, bool)
    for task in range(env.num_tasks):
        problem = env.problem(task)
        is_short[task] = bound(problem) <= limit or len(encode(problem)) <= limit
    return np.flatnonzero(is_short)


class TokenBound:
    """An upper bound on the tokens of a prompt, in about 10 microseconds where tokenising takes 400.

    Byte-level tokenizers split a text before each space and merge within these pieces only. So a text has at most the
    tokens of its pieces, each tokenised once at most. The chat template's own tokens are measured once, too.
    """

    def __init__(self, encode: Encode):
        self.encode = encode
        self.word_tokens = WordTokens(encode)
        self.template_tokens: dict[tuple[tuple[str, ...], bool, bool], int] = {}  # by roles, thinking and plain

    def __call__(self, problem: Problem) -> int:
        roles = tuple(message["role"] for message in problem.messages)
        style = (roles, problem.thinking, problem.plain)
        if style not in self.template_tokens:
            messages = [{"role": role, "content": "x"} for role in roles]
            template = replace(problem, messages=messages, prefix="")
            self.template_tokens[style] = len(self.encode(template))
        num_tokens = self.template_tokens[style] + len(problem.prefix.encode())
        for message in problem.messages:
            first_word, *words = message["content"].split(" ")
            num_tokens += len(first_word.encode())
            num_tokens += sum(map(self.word_tokens.__getitem__, words))
        return num_tokens


class WordTokens(dict[str, int]):
    """An upper bound on the tokens of each word, with the space before it.

    A word that is seen for the first time counts by its bytes, since most words of a data set occur in it once.
    """

    def __init__(self, encode: Encode):
        super().__init__()
        self.encode = encode
        self.seen: set[str] = set()

    def __missing__(self, word: str) -> int:
        if word not in self.seen:
            self.seen.add(word)
            return len(word.encode()) + 1
        message = {"role": "user", "content": " " + word}
        problem = Problem([message], plain=True)
        self[word] = len(self.encode(problem))
        return self[word]
