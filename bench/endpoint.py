"""Published clients against the endpoint: a dialogue of three turns with a tool call each, and what it was made of.

    python bench/endpoint.py --python ~/venv-agents/bin/python
    python bench/endpoint.py --python ~/venv-agents/bin/python --model_dir coder-0.5b
    python bench/endpoint.py --python ~/venv-eval/bin/python --model_dir models/tiny --lm_eval 1

The environment has openai, smolagents, mini-swe-agent and openenv. Without a model a script answers, so that calls are
sure to come; with one, serve.py answers. `continued` are requests behind the first whose history was as returned,
so that only what is new is computed; `forks` are histories that the client has written anew.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import markdown_table
from envs.base import Reply
from models.checkpoint import find_checkpoints
from models.tokenizer import load_tokenizer
from recipes.agents.protocol import ChatRequest, Sampled
from recipes.agents.server import Caller, Server
from recipes.agents.sessions import Asked, Dialogue, Endpoint, Session

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds of a client
NUM_CHOICES = 40  # questions
START = """
import json, os, sys
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
"""
OPENAI = """
from openai import OpenAI
client = OpenAI(base_url=base, api_key=key)
number = {"type": "number"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
messages = [{"role": "user", "content": "Add 2 and 3 with the tool add, then 4 to the sum, then say the result."}]
for turn in range(3):
    reply = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    messages.append(reply)
    for call in reply.tool_calls or []:
        given = json.loads(call.function.arguments)
        total = str(given.get("a", 0) + given.get("b", 0))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
    if not reply.tool_calls:
        messages.append({"role": "user", "content": "Use the tool add."})
print("DONE", len(messages))
"""
SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool

@tool
def add(a: float, b: float) -> float:
    \"\"\"Adds two numbers.

    Args:
        a: The first.
        b: The second.
    \"\"\"
    return a + b

model = OpenAIModel(model_id="policy", api_base=base, api_key=key)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
print("DONE", agent.run("Add 2 and 3, then 4 to the sum."))
"""
MINI = """
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
kwargs = {"api_base": base, "api_key": key}
model = LitellmModel(model_name="openai/policy", model_kwargs=kwargs, cost_tracking="ignore_errors")
agent = DefaultAgent(model, LocalEnvironment(cwd=os.environ["TMPDIR"]), step_limit=3,
    system_template="You run commands of bash.", instance_template="{{task}}")
print("DONE", agent.run("Print the working directory by echo, then say that you are done.")["exit_status"])
"""
VALIDATE = """
import importlib
module = importlib.import_module("openenv.core.harness.capture.validate_llm")
report = module.validate_llm(base.removesuffix("/v1"), os.environ["NAME"], api_key=key)
print("DONE", report.capture_level, report.logprobs_mode, report.tool_support, report.findings)
"""
CAPTURE = """
import socket
from openai import OpenAI
from openenv.core.harness.capture import CaptureServer, to_training_trace
from openenv.core.harness.capture.export import export_session
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = CaptureServer(llm_url=base.removesuffix("/v1"), model=os.environ["NAME"], port=port, api_key=key)
server.start()
session = server.registry.create(purpose="train")
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=session.session_id)
messages = []
for text in ("Use 3 4 to make 7.", "Use 2 5 to make 10.", "Use 1 8 to make 9."):
    messages.append({"role": "user", "content": text})
    answer = client.chat.completions.create(model=os.environ["NAME"], messages=messages, max_tokens=64)
    messages.append(answer.choices[0].message)
document = export_session(session)
trace = to_training_trace(session.graph, document)
ids = [turn.prompt_token_ids + turn.completion_token_ids for turn in trace.turns]
num = sum(b[: len(a)] == a for a, b in zip(ids, ids[1:]))
print("DONE", len(ids), "turns of a TrainingTrace,", num, "continue the tokens before")
"""
TASK = """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
LM_EVAL = """
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, tasks = os.environ["MODEL_DIR"], TaskManager(include_path=os.environ["TASKS"])

def logprobs(kind, **arguments):
    found = simple_evaluate(model=kind, model_args=arguments, tasks=["choice"], task_manager=tasks, log_samples=True,
        bootstrap_iters=0)["samples"]["choice"]
    found = sorted(found, key=lambda sample: sample["doc_id"])
    return [(float(resp[0][0]), str(resp[0][1])) for sample in found for resp in sample["resps"]]

served = logprobs("local-completions", base_url=base + "/completions", model=os.environ["NAME"], tokenizer=folder,
    num_concurrent=4, max_length=512)
own = logprobs("hf", pretrained=folder, dtype="float32", device="cpu", max_length=512)
apart = max(abs(a - b) for (a, _), (b, _) in zip(served, own))
alike = [is_greedy for _, is_greedy in served] == [is_greedy for _, is_greedy in own]
print("DONE", len(served), "choices,", f"{apart:.1e} apart at most, greedy alike:", alike)
"""
CLIENTS = {"openai": OPENAI, "smolagents": SMOLAGENTS, "mini-swe-agent": MINI}
END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SCRIPT = {  # calls of the turns of a session, by the tools of the request
    "add": [("add", {"a": 2, "b": 3}), ("add", {"a": 5, "b": 4}), None],
    "final_answer": [("add", {"a": 2, "b": 3}), ("add", {"a": 5, "b": 4}), ("final_answer", {"answer": "9"})],
    "bash": [("bash", {"command": "echo $PWD"}), ("bash", {"command": "echo again"}), ("bash", {"command": END})],
}


class Script(Endpoint):
    """Answers each session by SCRIPT."""

    context = 4096

    def __init__(self):
        handlers = {"POST /v1/chat/completions": self.chat, "GET /v1/models": self.models}
        super().__init__(Server(handlers), "policy", "qwen")
        self.tokenizer = load_tokenizer("models/tiny")
        self.num_rows, self.turns = 0, Counter()
        self.asked: list[tuple[str, Asked]] = []

    def take_row(self, session: Session) -> int:
        self.num_rows += 1
        return self.num_rows

    def session_of(self, caller: Caller) -> Session:
        return self.sessions.setdefault(caller.key, Session(caller.key))

    def ask(self, session: Session, dialogue: Dialogue, asked: Asked) -> None:
        super().ask(session, dialogue, asked)
        self.asked.append((session.key, asked))
        asyncio.get_running_loop().call_soon(self.reply, asked, self.next_reply(session.key, asked.request))

    def next_reply(self, key: str, request: ChatRequest) -> Sampled:
        names = {tool["function"]["name"] for tool in request.schemas}
        steps = SCRIPT[next((name for name in ("final_answer", "bash", "add") if name in names), "add")]
        call = steps[min(self.turns[key], 2)]
        self.turns[key] += 1
        if call is None or not names:
            return Sampled(Reply("It is 9."), (1,), (-0.5,), prompt_ids=(1,))
        body = json.dumps({"name": call[0], "arguments": call[1]})
        return Sampled(Reply(f"<tool_call>{body}</tool_call>", (body,)), (1,), (-0.5,), prompt_ids=(1,))


def run_client(python: str, code: str, variables: Mapping[str, str]) -> str:
    """Returns the last line of a client, or of its error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "client.py")
        file.write_text(START + code)
        done = subprocess.run(
            [os.path.expanduser(python), str(file)], capture_output=True, text=True, timeout=TIMEOUT,
            env={**os.environ, "TMPDIR": folder, "HOME": folder, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables},
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("DONE")]
    return lines[-1] if lines else "failed: " + (done.stderr.strip().splitlines() or ["?"])[-1][:200]


def by_script(python: str) -> list[list[object]]:
    """Returns a row for each client that a script answers."""
    book, rows = Script(), []
    with book.server:
        for name, code in CLIENTS.items():
            end = run_client(python, code, {"OPENAI_BASE_URL": f"{book.server.url}/v1", "OPENAI_API_KEY": name})
            asked = [each for key, each in book.asked if key == name]
            num_new = sum(each.is_new for each in asked)
            num_tools = sum(bool(message.tool_calls) for each in asked for message in each.request.messages[-2:])
            rows.append([name, "script", len(asked), num_tools, len(asked) - num_new, max(0, num_new - 1), end])
    return rows


@contextmanager
def served(model_dir: str) -> Iterator[tuple[str, str, list[str]]]:
    """Serves a model; yields its address, its name, and the lines that it prints."""
    command = [sys.executable, "recipes/agents/serve.py", "--model_dir", model_dir, "--port", "0"]
    command += ["--context", "2048", "--rows", "4"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = []
    try:
        first = process.stdout.readline()
        thread = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        thread.start()
        yield re.search(r"http://\S+?(?=/v1)", first)[0], first.partition(":")[0], lines
    finally:
        process.terminate()
        process.wait(30)


def by_model(python: str, model_dir: str) -> list[list[object]]:
    """Returns a row for each client that a model answers, and for openenv: its questions, and its capture server."""
    rows = []
    with served(model_dir) as (url, name, _):
        for client, code in CLIENTS.items():
            end = run_client(python, code, {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": client})
            rows.append([client, name, "", "", "", "", end])
        variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "openenv", "NAME": name}
        for client, code in {"openenv validate_llm": VALIDATE, "openenv CaptureServer": CAPTURE}.items():
            rows.append([client, name, "", "", "", "", run_client(python, code, variables)])
    return rows


def by_lm_eval(python: str, model_dir: str) -> list[list[object]]:
    """Returns a row on lm-evaluation-harness: its local-completions beside its hf, on a task of our own."""
    rng = random.Random(0)
    with served(model_dir) as (url, name, _), tempfile.TemporaryDirectory() as folder:
        rows = []
        for _ in range(NUM_CHOICES):
            a, b, other = rng.randrange(20), rng.randrange(20), rng.randrange(40)
            choices = [f" {a + b}", f" {other}", f" {a} and {b}"]
            rows.append({"question": f"{a} + {b} =", "choices": choices, "answer": 0})
        Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path(folder, "choice.yaml").write_text(TASK.replace("FOLDER", folder))
        variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "eval", "NAME": name, "TASKS": folder}
        variables |= {"MODEL_DIR": str(find_checkpoints(model_dir)[-1][1].absolute()), "HF_HUB_OFFLINE": "1"}
        return [["lm_eval", name, "", "", "", "", run_client(python, LM_EVAL, variables)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python", help="Python that has the clients")
    parser.add_argument("--model_dir", default="", help="model that answers; empty: a script")
    parser.add_argument("--lm_eval", type=int, default=0, help="1: lm-evaluation-harness instead of clients")
    options = parser.parse_args()
    if options.lm_eval:
        rows = by_lm_eval(options.python, options.model_dir or "models/tiny")
    else:
        rows = by_model(options.python, options.model_dir) if options.model_dir else by_script(options.python)
    columns = ["client", "answered by", "requests", "with calls", "continued", "forks", "its end"]
    print("\n".join(markdown_table(columns, rows)))


if __name__ == "__main__":
    main()
