"""Published clients at the endpoint: a dialogue of three turns with calls of a tool, and how its requests continue.

    pip install openai litellm langchain-openai smolagents mini-swe-agent "verifiers<0.4" "lm_eval[api]" openenv
    python bench/endpoint.py --python ~/venv-agents/bin/python

The clients need an environment of their own. A script answers, so that calls are sure to come: `continued` are requests
after the first whose history was as returned, so that only what is new is computed. lm_eval asks
recipes/agents/serve.py for log-probabilities of --model_dir.
"""

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import markdown_table
from bench.serving import OURS, served
from envs.base import Reply
from models.checkpoint import find_checkpoints
from models.tokenizer import load_tokenizer
from recipes.agents.endpoint import Asked, Endpoint, Session
from recipes.agents.protocol import ChatRequest, Sampled

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds of a client
START = """
import json, os, sys
base, key, name = (os.environ[x] for x in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "NAME"))
number = {"type": "number"}
parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
messages = [{"role": "user", "content": "Add 2 and 3 with the tool add, then 4 to the sum, then say the result."}]
def answer(call):
    given = json.loads(call.function.arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given.get("a", 0) + given.get("b", 0))})
def play(ask):
    for turn in range(3):
        messages.append(ask())
        calls = messages[-1].tool_calls or []
        for call in calls:
            answer(call)
        if not calls:
            messages.append({"role": "user", "content": "Use the tool add."})
    print("DONE", len(messages), "messages")
"""
CLIENTS = {
    "openai": """
from openai import OpenAI
client = OpenAI(base_url=base, api_key=key)
play(lambda: client.chat.completions.create(model=name, messages=messages, tools=tools).choices[0].message)
""",
    "openai, stream": """
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
client = OpenAI(base_url=base, api_key=key)
def ask():
    with client.chat.completions.stream(model=name, messages=messages, tools=tools) as stream:
        stream.until_done()
        found = stream.get_final_completion().choices[0].message
    fields = found.model_dump(exclude_none=True)
    for call in fields.get("tool_calls", []):
        call["function"].pop("parsed_arguments", None)
    return ChatCompletionMessage.model_validate({"content": None, **fields})
play(ask)
""",
    "litellm": """
import litellm
play(lambda: litellm.completion("openai/" + name, messages, api_base=base, api_key=key, tools=tools).choices[0].message)
""",
    "litellm, stream": """
import litellm
def ask():
    chunks = litellm.completion("openai/" + name, messages, api_base=base, api_key=key, tools=tools, stream=True)
    return litellm.stream_chunk_builder(list(chunks)).choices[0].message
play(ask)
""",
    "langchain-openai": """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
plain = ChatOpenAI(model=name, base_url=base, api_key=key)
model, said = plain.bind_tools(tools), [HumanMessage(messages[0]["content"])]
for turn in range(3):
    said.append(model.invoke(said))
    for call in said[-1].tool_calls:
        said.append(ToolMessage(str(sum(call["args"].values())), tool_call_id=call["id"]))
    if not said[-1].type == "tool":
        said.append(HumanMessage("Use the tool add."))
streamed = "".join(chunk.text for chunk in plain.stream("Say a number."))
print("DONE", len(said), "messages, and a stream of", len(streamed), "characters")
""",
    "smolagents": """
from smolagents import OpenAIModel, ToolCallingAgent, tool
@tool
def add(a: float, b: float) -> float:
    \"\"\"Adds two numbers.

    Args:
        a: The first.
        b: The second.
    \"\"\"
    return a + b
agent = ToolCallingAgent([add], OpenAIModel(name, api_base=base, api_key=key), max_steps=3, verbosity_level=0)
print("DONE", str(agent.run("Add 2 and 3, then 4 to the sum."))[:40])
""",
    "mini-swe-agent": """
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
kwargs = {"api_base": base, "api_key": key}
model = LitellmModel(model_name="openai/" + name, model_kwargs=kwargs, cost_tracking="ignore_errors")
agent = DefaultAgent(model, LocalEnvironment(cwd=os.environ["TMPDIR"]), step_limit=3,
    system_template="You run commands of bash.", instance_template="{{task}}")
print("DONE", agent.run("Print the working directory by echo, then say that you are done.")["exit_status"])
""",
    "verifiers": """
sys.path.insert(0, os.environ["ROOT"])
from recipes.agents import verifiers_guess
print("DONE, a reward of", verifiers_guess.play(0, "train", base))
""",
    "openenv validate_llm": """
import importlib
module = importlib.import_module("openenv.core.harness.capture.validate_llm")
report = module.validate_llm(base.removesuffix("/v1"), name, api_key=key)
print("DONE", report.capture_level, report.logprobs_mode, report.tool_support, report.findings)
""",
}
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
tasks = TaskManager(include_path=os.environ["TASKS"])
arguments = dict(base_url=base + "/completions", model=name, tokenizer=os.environ["MODEL_DIR"], num_concurrent=4)
found = simple_evaluate("local-completions", model_args=arguments | {"max_length": 512}, tasks=["choice"],
    task_manager=tasks, log_samples=True, bootstrap_iters=0)["samples"]["choice"]
print("DONE", len(found), "questions, log-probabilities of", sum(len(sample["resps"]) for sample in found), "choices")
"""
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
        super().__init__("policy", "qwen")
        self.tokenizer = load_tokenizer("models/tiny")
        self.turns: Counter[str] = Counter()
        self.asked: list[tuple[str, Asked]] = []

    def take_row(self, session: Session) -> int:
        return len(self.dialogues)

    def session_of(self, key: str) -> Session:
        return Session(key)

    def publish(self, row: int, asked: Asked) -> None:
        key = self.dialogues[row].session.key
        self.asked.append((key, asked))
        reply = self.next_reply(key, asked.request)
        if asked.on_tokens:
            asked.on_tokens(reply)
        asyncio.get_running_loop().call_soon(self.settle, asked, reply)

    def next_reply(self, key: str, request: ChatRequest) -> Sampled:
        names = {tool["function"]["name"] for tool in request.schemas}
        steps = SCRIPT[next((name for name in ("final_answer", "bash", "add") if name in names), "add")]
        call = steps[min(self.turns[key], 2)]
        self.turns[key] += 1
        if call is None or not names:
            return Sampled(Reply("It is 9."), (1,), (-0.5,), prompt_ids=(1,))
        body = json.dumps({"name": call[0], "arguments": call[1]})
        return Sampled(Reply(f"<tool_call>{body}</tool_call>", (body,)), (1,), (-0.5,), prompt_ids=(1,))


def run_client(python: str, code: str, base: str, key: str, name: str, **variables: str) -> str:
    """Returns the last line of a client, or of its error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "client.py")
        file.write_text(START + code)
        own = {"TMPDIR": folder, "HOME": folder, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
        own |= {"OPENAI_BASE_URL": base, "OPENAI_API_KEY": key, "NAME": name, "ROOT": str(ROOT), **variables}
        command = [os.path.expanduser(python), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | own)
    lines = [line for line in done.stdout.splitlines() if line.startswith("DONE")]
    return lines[-1] if lines else "failed: " + (done.stderr.strip().splitlines() or ["?"])[-1][:200]


def by_script(python: str) -> list[list[object]]:
    """Returns a row for each client that a script answers."""
    script, rows = Script(), []
    with script:
        for client, code in CLIENTS.items():
            end = run_client(python, code, f"{script.url}/v1", client, script.name)
            asked = [each for key, each in script.asked if key == client]
            num_new = sum(each.is_new for each in asked)
            num_tools = sum(bool(message.tool_calls) for each in asked for message in each.request.messages[-2:])
            rows.append([client, len(asked), num_tools, len(asked) - num_new, max(0, num_new - 1), end])
    return rows


def by_lm_eval(python: str, model_dir: str) -> list[object]:
    """Returns the row of lm-evaluation-harness, which scores choices by a served model."""
    questions = [(f"{a} + {b} =", [f" {a + b}", f" {b}", f" {a} and {b}"]) for a in range(5) for b in range(8)]
    lines = [json.dumps({"question": text, "choices": choices, "answer": 0}) for text, choices in questions]
    command = OURS.format(python=shlex.quote(sys.executable), model_dir=model_dir, conversations=4, context=1024)
    with served(command) as base, tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.jsonl").write_text("\n".join(lines))
        Path(folder, "choice.yaml").write_text(TASK.replace("FOLDER", folder))
        source = str(find_checkpoints(model_dir)[-1][1].absolute())
        end = run_client(python, LM_EVAL, base, "lm_eval", Path(model_dir).name, TASKS=folder, MODEL_DIR=source)
    return ["lm_eval", "", "", "", "", end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python", help="Python that has the clients")
    parser.add_argument("--model_dir", default="models/tiny", help="model that scores choices for lm_eval")
    options = parser.parse_args()
    rows = [*by_script(options.python), by_lm_eval(options.python, options.model_dir)]
    print("\n".join(markdown_table(["client", "requests", "with calls", "continued", "forks", "its end"], rows)))


if __name__ == "__main__":
    main()
