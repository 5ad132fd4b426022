"""Preview of an environment before training: prompts as the model reads them, references, rewards, prompt lengths."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from envs.base import DIALECTS, Env, Problem, Reply
from envs.prompts import Encode, prompt_lengths
from models.messages import tool_schema
from utils.metrics.logger import printable
from utils.settings.errors import describe_error, shorten

# Arguments of example calls, by the types of JSON's schema; "1" of all others, which is also an expression, and code.
ARGUMENTS = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


def show(env: Env, encode: Encode, decode: Callable[[list[int]], str], count: int) -> str:
    """Returns the first `count` problems with the scores of example replies, and quantiles of prompt lengths in tokens.

    `decode` shows special tokens, too. Control characters of the data are dropped, since a terminal obeys them.
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
    for tool in problem.tools if env.dialect else ():  # tools without a dialect are shown, and not called
        function = tool_schema(tool)["function"]
        schema = function["parameters"]
        arguments = {name: example_argument(schema["properties"][name]) for name in schema.get("required", [])}
        call = json.dumps({"name": function["name"], "arguments": arguments})
        dialect = DIALECTS[env.dialect]
        calls.append(Reply(dialect.opening + call + dialect.closing, (call,)))
    return calls


def example_argument(schema: Mapping[str, object]) -> object:
    """Returns a value of an argument: the first allowed value, or one of its type."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    return ARGUMENTS.get(kind[0] if isinstance(kind, list) else kind, "1")


def opened(env: Env, problem: Problem) -> Problem:
    """Returns a problem with the opening of its episodes."""
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
    return ", ".join(f"{key} {value:g}" for key, value in scores.items())
