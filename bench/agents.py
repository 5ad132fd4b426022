"""Compares environments with the same games as programs: their rows, turns that are rendered again, and speed.

    python bench/agents.py --env guess --model_dir models/player --wait 1
    python bench/agents.py --env calculator --model_dir coder-0.5b --groups 8
    python bench/agents.py --env countdown --model_dir models/tiny --groups 16 --repeats 5    # speed, 64 sessions

Both play the same problems with the same keys over one number of slots, in alternation. A program waits at random for
up to --wait seconds before it asks, so that rows arrive in another order. `bits`: rows whose log-probabilities are
equal bit for bit. With --slots 1 all rows run in the same slot.

Then the prompts of all turns after the first are rendered again from texts, as a proxy in front of an engine has to: by
transformers' apply_chat_template with the model's own template and with those of --templates. Each is compared with
the tokens that were sampled and continued under that template.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import numpy as np

from bench.common import markdown_table
from bench.templates import NAMES, make_tokenizer
from core.records import Episodes
from core.rollout import RolloutWorker, make_worker
from core.sampler import SamplingConfig
from envs import make_env, parse_options
from envs.base import DIALECTS, Dialect, Reply
from envs.scoring.shaping import RewardConfig
from envs.settings import EnvConfig, resolve_settings
from models.checkpoint import load_model
from models.messages import Message, tool_schema
from models.names import Weights
from models.tokenizer import Tokenizer
from recipes.agents.protocol import ChatMessage, ChatRequest, Sampled, reply_message
from utils.devices.sharding import single_device
from utils.threefry import make_key

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {
    "guess": "prompt=bare",
    "calculator": "dialect=json,max_operations=2,thinking=off",
    "countdown": "numbers=3,max_number=15,prompt=bare",
}
GAMES = {
    "guess": """
import re


def game(ask, messages, row):
    for turn in range(5):
        numbers = re.findall(r"[0-9]{1,9}", ask().content or "")
        if numbers and int(numbers[-1]) == row["number"]:
            return 1 - 0.05 * turn
        answer = "higher" if numbers and row["number"] > int(numbers[-1]) else "lower" if numbers else "number?"
        messages.append({"role": "user", "content": answer})
    return 0.0
""",
    "calculator": """
def game(ask, messages, row):
    from recipes.games.calculator import calculate
    from envs.grading.answers import final_answer
    from envs.grading.numerals import same_number
    from envs.tools.episode import ToolEpisode, ToolSettings

    tools = ToolEpisode([calculate], ToolSettings("json"), grade=None)
    for turn in range(4):
        message = ask()
        called = [call.function for call in message.tool_calls or []]
        calls = [json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}) for call in called]
        text = (message.content or "").strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
        if not calls and text.startswith("{"):  # a call that is not JSON comes back as text
            calls = [text]
        if not calls:
            break
        messages += [{"role": "tool", "content": tools.run(call)} for call in calls]
    answer = None if calls else final_answer(message.content or "", "any")
    return float(answer is not None and same_number(row["number"], answer))
""",
    "countdown": """
def game(ask, messages, row):
    ask()
    return 0.0
""",
}
FUNCTION = f"""
import json, random, sys, time, urllib.error, urllib.request
from types import SimpleNamespace

sys.path.insert(0, {str(ROOT)!r})


def play(row, base_url, api_key):
    headers = {{"Authorization": "Bearer " + api_key}}
    messages = row["opening"]
    more = {{"max_tokens": row["turn_tokens"]}} if row["turn_tokens"] else {{}}
    if row["tools"]:
        more["tools"] = row["tools"]

    def ask():
        body = json.dumps({{"messages": messages, **more}}).encode()
        answer = urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)).read()
        messages.append(json.loads(answer)["choices"][0]["message"])
        found = {{"tool_calls": None, **messages[-1]}}
        return json.loads(json.dumps(found), object_hook=lambda fields: SimpleNamespace(**fields))

    time.sleep(row["wait"] * random.random())
    try:
        return game(ask, messages, row)
    except urllib.error.HTTPError:  # the context is full
        return 0.0
"""


def write_program(options: argparse.Namespace, folder: Path) -> None:
    """Writes the program of an environment, and its problems as rows."""
    env = make_env(options.env, **parse_options(OPTIONS[options.env]))
    rows = []
    for index in range(2 * options.groups):  # some are left for the valid split
        problem = env.problem(index)
        row = {"opening": problem.messages, "tools": [*map(tool_schema, problem.tools)], "wait": options.wait}
        row |= {"number": getattr(problem.answer, "number", str(problem.answer)), "index": index}
        rows.append(json.dumps(row | {"turn_tokens": env.tokens_per_turn}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "test.jsonl").write_text('{"number": 0}\n')
    (folder / "agent.py").write_text(GAMES[options.env] + FUNCTION)


def worker_of(
    options: argparse.Namespace, name: str, env_options: str, **more: str | int
) -> tuple[RolloutWorker, Weights]:
    """Returns a worker over pages with a fixed number of slots, and the weights."""
    layout = single_device()
    model, params, tokenizer = load_model(options.model_dir, layout, dtype="float32")
    settings = resolve_settings(EnvConfig(name, env_options, **more), name, options.tokens, 0)
    sampling = SamplingConfig(prompt_length=options.prompt_length, page_size=16, num_generation_tokens=options.tokens)
    worker = make_worker(settings, sampling, RewardConfig(num_score_workers=1), model, tokenizer, layout)
    sampler = worker.sampler
    paging = replace(sampler.paging, num_slots=options.slots)
    return replace(worker, sampler=replace(sampler, paging=paging)), worker.load_weights(params)


def play(
    workers: Sequence[tuple[RolloutWorker, Weights, Sequence[int]]], options: argparse.Namespace
) -> list[tuple[Episodes, float]]:
    """Plays problems by workers in turn, once to compile, then --repeats times; returns episodes and median seconds."""
    seconds, episodes = [[] for _ in workers], [None for _ in workers]
    for _ in range(1 + options.repeats):
        for i, (worker, weights, tasks) in enumerate(workers):
            start = time.perf_counter()
            places = np.arange(len(tasks))
            episodes[i] = worker.play(weights, np.array(tasks), options.samples, make_key(1), places)
            seconds[i].append(time.perf_counter() - start)
    return [(each, median(times[1:])) for each, times in zip(episodes, seconds, strict=True)]


def rows_of(episodes: Episodes) -> Iterator[tuple[list[int], list[bool], np.ndarray]]:
    completions = episodes.completions
    for i, end in enumerate(completions.lengths.tolist()):
        yield completions.tokens[i, :end].tolist(), completions.mask[i, :end].tolist(), completions.logprobs[i, :end]


def compare_rows(native: Episodes, agent: Episodes) -> list[object]:
    """Returns counts of rows that are equal, and how far log-probabilities are apart at most."""
    num_equal, num_bits, apart = 0, 0, 0.0
    for own, other in zip(rows_of(native), rows_of(agent), strict=True):
        if own[:2] == other[:2]:
            num_equal += 1
            num_bits += np.array_equal(own[2], other[2])
            apart = max(apart, float(np.abs(own[2] - other[2]).max()))
    num_turns = sum(1 + len(said) // 2 for said in native.conversations) or len(native)
    return [len(native), num_turns, num_equal, num_bits, f"{apart:.1e}", int(agent.scores["forks"].sum())]


def replies_of(episodes: Episodes, stop_ids: Sequence[int]) -> Iterator[list[list[int]]]:
    """Returns the tokens of each row's replies, without the one that ends them."""
    for tokens, mask, _ in rows_of(episodes):
        edges = np.flatnonzero(np.diff([False, *mask, False])).reshape(-1, 2).tolist()
        replies = [tokens[start:end] for start, end in edges]
        yield [reply[:-1] if reply[-1] in stop_ids else reply for reply in replies]


def rendered_again(
    tokenizer: Tokenizer, episodes: Episodes, stop_ids: Sequence[int], dialect: Dialect | None
) -> tuple[int, int]:
    """Returns how many prompts behind the first differ if they are rendered from messages, and their number.

    With a `dialect` replies are messages as an endpoint returns them, with `tool_calls`.
    """
    num_different = num_all = 0
    rows = zip(episodes.problems, episodes.conversations, replies_of(episodes, stop_ids), strict=True)
    for problem, conversation, replies in rows:
        messages = [*problem.messages, *conversation]
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"][: len(replies)]
        ids = tokenizer.chat(messages[: places[0]], None, tools=problem.tools)
        tools = [*map(tool_schema, problem.tools)] or None
        for place, after, reply in zip(places, places[1:], replies, strict=False):
            bridge = tokenizer.bridge(messages[:place], messages[place + 1 : after], None, tools=problem.tools)
            ids = [*ids, *reply, *bridge.end, *bridge.ids]
            if dialect:
                messages[place] = with_calls(tokenizer, reply, messages[place]["content"], dialect)
            again = tokenizer.hf.apply_chat_template(
                messages[:after], tools=tools, add_generation_prompt=True, return_dict=False
            )
            num_all += 1
            num_different += ids != again
    return num_different, num_all


def with_calls(tokenizer: Tokenizer, ids: Sequence[int], text: str, dialect: Dialect) -> Message:
    """Returns a reply as a client gets it: its calls are `tool_calls`."""
    calls = tokenizer.calls(np.array(ids), dialect.opening, dialect.closing)
    tool = {"type": "function", "function": {"name": "any"}}
    request = ChatRequest(messages=[{"role": "user", "content": "?"}], tools=[tool])
    return ChatMessage(**reply_message(request, Sampled(Reply(text, calls)), dialect)).for_template("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=GAMES, default="guess")
    parser.add_argument("--model_dir", default="models/player")
    parser.add_argument("--groups", type=int, default=64, help="problems")
    parser.add_argument("--samples", type=int, default=4, help="rows of a problem")
    parser.add_argument("--repeats", type=int, default=1, help="plays that are timed")
    parser.add_argument("--wait", type=float, default=0.0, help="most seconds before a program asks")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt_length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row after its prompt")
    parser.add_argument("--templates", default="", help="folder of chat templates, NAME.jinja: see bench/templates.py")
    options = parser.parse_args()
    style = {"calculator": ",dialect=json,thinking=off", "countdown": ",thinking=on"}.get(options.env, "")
    with tempfile.TemporaryDirectory() as folder:
        write_program(options, Path(folder))
        files = f"path={folder}/rows.jsonl,test_path={folder}/test.jsonl"
        agent, weights = worker_of(
            options, "agent", f"{files},agent_processes={options.slots}{style}", agent=f"{folder}/agent.py:play",
        )  # fmt: skip
        native, others = worker_of(options, options.env, OPTIONS[options.env])
        with agent, native:
            tasks = [agent.env.problem(i).answer["index"] for i in range(options.groups)]
            (programs, seconds), (own, own_seconds) = play(
                [(agent, weights, range(options.groups)), (native, others, tasks)], options
            )
    columns = ["rows", "turns", "tokens and masks equal", "bits", "log-probabilities apart", "forks"]
    print("\n".join(markdown_table(columns, [compare_rows(own, programs)])))
    length, cost = int(own.completions.mask.sum()) / len(own), 1000 * (seconds - own_seconds) / len(own)
    print(f"{length:.0f} tokens a row: {own_seconds:.2f} s as an environment, {seconds:.2f} s as programs")
    print(f"a share of {own_seconds / seconds:.2f} of its tokens a second; {cost:.1f} ms a program")
    if not own.conversations:
        return
    rows = []
    files = [file for name in NAMES if (file := Path(options.templates, f"{name}.jinja")).is_file()]
    known = [(file.stem, make_tokenizer(file.read_text("utf-8"), Path(options.model_dir))[0]) for file in files]
    dialect = DIALECTS.get(native.env.dialect or "")
    forms = [("", None), (", tool_calls", dialect)] if dialect else [("", None)]
    for name, tokenizer in [("its own", native.tokenizer), *known]:
        for form, of_calls in forms:
            try:
                num_different, num_all = rendered_again(tokenizer, own, native.tokenizer.stop_ids, of_calls)
            except Exception as error:  # of the template
                rows.append([name + form, "", f"refused: {str(error).splitlines()[0][:90]}"])
            else:
                rows.append([name + form, num_all, f"{num_different} ({num_different / max(1, num_all):.0%})"])
    print("\n".join(markdown_table(["template", "prompts after the first", "differ if rendered again"], rows)))


if __name__ == "__main__":
    main()
