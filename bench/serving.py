"""Tokens a second of chat endpoints under many conversations at once: serve.py, and others if a command is given.

    python bench/serving.py --model_dir models/tiny
    python bench/serving.py --peer "~/venv-torch/bin/transformers serve models/tiny --continuous-batching --port PORT"

Servers run one after the other. Each conversation is a thread with a key of its own; behind a reply it sends the next
message, as often as --turns says. transformers' server needs `pip install transformers[serving]`.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import markdown_table

ROOT = Path(__file__).resolve().parent.parent
OURS = "{python} recipes/agents/serve.py --model_dir {model_dir} --port PORT --rows {conversations} --context {context}"
STARTS = 180  # seconds in which a server must answer
PROMPTS = ("Use {a} {b} {c} to make 24.", "And {b} {c} {a}?")


@contextmanager
def served(command: str) -> Iterator[str]:
    """Runs a server, and yields its URL once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [os.path.expanduser(word) for word in shlex.split(command.replace("PORT", str(port)))]
    server = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}/v1", time.monotonic() + STARTS
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"this server does not answer: {command}") from None
                time.sleep(0.2)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


def converse(url: str, options: argparse.Namespace, number: int) -> int:
    """Plays a conversation; returns the number of tokens that were sampled."""
    numbers = {"a": 2 + number % 11, "b": 1 + number % 7, "c": 3 + number % 13}
    messages, num_tokens = [], 0
    for turn in range(options.turns):
        messages.append({"role": "user", "content": PROMPTS[turn > 0].format(**numbers)})
        body = {"model": options.model_dir, "messages": messages, "max_tokens": options.tokens, "temperature": 1.0}
        headers = {"Authorization": f"Bearer bench-{number}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            answered = json.load(answer)
        messages.append({"role": "assistant", "content": answered["choices"][0]["message"]["content"]})
        num_tokens += answered["usage"]["completion_tokens"]
    return num_tokens


def measure(command: str, options: argparse.Namespace) -> list[object]:
    """Returns the row of a server: tokens and tokens a second of all repeats but the first."""
    counts, speeds = [], []
    with served(command) as url, ThreadPoolExecutor(options.conversations) as pool:
        for repeat in range(1 + options.repeats):
            numbers = range(repeat * options.conversations, (repeat + 1) * options.conversations)
            start = time.perf_counter()
            counts.append(sum(pool.map(lambda number: converse(url, options, number), numbers)))
            speeds.append(counts[-1] / (time.perf_counter() - start))
    each = ", ".join(f"{speed:.0f}" for speed in speeds[1:])
    return [Path(shlex.split(command)[1]).name, counts[-1], f"{statistics.median(speeds[1:]):.0f} ({each})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_dir", default="models/tiny")
    parser.add_argument("--peer", default="", help="command of another server of this model; PORT is its port")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128, help="limit of a reply")
    parser.add_argument("--context", type=int, default=1024, help="most tokens of a conversation, for serve.py")
    parser.add_argument("--repeats", type=int, default=3, help="after one that is not timed")
    options = parser.parse_args()
    ours = OURS.format(python=shlex.quote(sys.executable), **vars(options))
    rows = [measure(command, options) for command in filter(None, (ours, options.peer))]
    print("\n".join(markdown_table(["server", "tokens", "tokens/s"], rows)))


if __name__ == "__main__":
    main()
