"""Serves a chat in a browser with several models side by side, such as a base model and what was trained from it.

    python extras/chat_web.py --ckpt_dir models/tiny,runs/demo/step24 --port 8000

The server listens on localhost and answers only its own page, since other sites in a browser could reach it.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

from core.chat.models import ChatCommand, ChatModel, load_chat_models
from core.eval import find_run
from envs import make_env, test_name
from envs.base import Env
from envs.scoring.scorer import Scorer
from envs.settings import EnvConfig, code_settings
from models.messages import Message
from utils.devices.startup import ending_together, make_layout
from utils.settings.config import parse
from utils.settings.errors import UserError, describe_error, on_one_line, user_errors
from utils.settings.options import option
from utils.settings.presets import demo_of_tiny

PAGE = Path(__file__).with_name("chat_web.html")
ROLES = ("user", "assistant")
NUM_EXAMPLES = 6  # held-out problems on the page
MAX_BYTES = 10**6  # of a request; encoding 300,000 characters takes a second


@dataclass(frozen=True)
class PageCommand(ChatCommand):
    """A chat with the models of --model_dir, separated by commas, side by side."""

    port: int = option(8000, "Port of the page, on this machine only", essential=True)

    def __post_init__(self):
        if not 1 <= self.port < 2**16:
            raise UserError(f"--port {self.port} is not a port: give 1 to 65535")


class Examples:
    """Held-out problems of an environment, by their text, and its grader; for episodes of several turns it has none."""

    def __init__(self, env: Env | None = None, scorer: Scorer | None = None):
        problems = [env.problem(index).messages for index in range(min(NUM_EXAMPLES, env.num_tasks))] if env else []
        self.numbers = {said[0]["content"]: number for number, said in enumerate(problems) if len(said) == 1}
        self.scorer = scorer

    def grade(self, prompt: str, reply: str) -> bool | None:
        """Returns True if a reply is right; None if that is not known."""
        if self.scorer is None or prompt not in self.numbers:
            return None
        (rewards,), _ = self.scorer.score_replies([self.numbers[prompt]], [reply])
        return None if rewards is None or "correct_answer" not in rewards else rewards["correct_answer"] > 0


class GradedModel(ChatModel):
    """A model whose replies to held-out problems are graded."""

    has_one_turn = False  # trained on single replies: the page begins each conversation anew
    examples = Examples()

    def grade(self, messages: list[Message], reply: str) -> bool | None:
        """Returns True if the environment grades a reply as right; None if the problem is not the environment's."""
        return self.examples.grade(messages[0]["content"], self.style[1] + reply) if len(messages) == 1 else None

    def change(self, name: str, value: str) -> None:
        """Changes a number of the sampling distribution. Raises: UserError."""
        try:
            distribution = replace(self.sampler.distribution, **{name: float(value)})
        except ValueError as error:
            raise UserError(f"{name} {value} is not a number that it may be: give another ({error})") from error
        self.sampler = replace(self.sampler, distribution=distribution)


class ChatServer(ThreadingHTTPServer):
    """Serves the page and the replies of models; they are computed one at a time."""

    daemon_threads = True

    def __init__(self, models: Sequence[GradedModel], port: int, examples: Sequence[str] = ()):
        self.models, self.lock, self.is_ending = models, Lock(), False  # the lock is of the model that replies
        shown = [{"name": model.name, "hasOneTurn": model.has_one_turn} for model in models]
        data = json.dumps({"models": shown, "examples": list(examples)}).replace("<", "\\u003c")
        self.page = PAGE.read_text(encoding="utf-8").replace("{{data}}", data)
        super().__init__(("127.0.0.1", port), Handler)
        # A request by another name comes from a site that points to this machine.
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def handle_error(self, *args: object) -> None:
        """Prints the traceback of an error, unless it is of a connection, which a page may end at any time."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*args)


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    server: ChatServer
    timeout = 10.0  # seconds in which a page must send a request, or take a text

    def do_GET(self) -> None:
        if self.headers["Host"] not in self.server.hosts or self.path != "/":
            return self.send_error(404)
        self.begin("text/html; charset=utf-8")
        self.wfile.write(self.server.page.encode())

    def do_POST(self) -> None:
        """Streams a reply, an object on each line: the text as it grows, then if it is right."""
        is_page = self.headers["Origin"] in {f"http://{host}" for host in self.server.hosts}
        if self.headers["Host"] not in self.server.hosts or not is_page or self.path != "/reply":
            return self.send_error(400)
        try:
            size = int(self.headers["Content-Length"] or 0)
            if not 0 <= size <= MAX_BYTES:
                raise ValueError(f"a request has at most {MAX_BYTES:,} bytes")
            request = json.loads(self.rfile.read(size))
            model, messages = self.server.models[int(request["model"])], request["messages"]
            if not all(message["role"] in ROLES and isinstance(message["content"], str) for message in messages):
                raise ValueError(f"a message has a role of {', '.join(ROLES)}, and text")
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            return self.send_error(400, explain=on_one_line(str(error)))
        self.begin("text/plain; charset=utf-8")
        with self.server.lock:
            try:
                model.change("temperature", str(request["temperature"]))
                text = model.reply(messages, partial(self.send_line, "text"))
                self.send_line("text", text)
                self.send_line("right", model.grade(messages, text))
            except UserError as error:
                self.send_line("error", str(error))
            except OSError:
                self.close_connection = True  # the page has stopped the reply
            except Exception as error:
                traceback.print_exc()
                self.send_line("error", describe_error(error))

    def begin(self, kind: str) -> None:
        """Sends the head of an answer, whose end is that of the connection."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def send_line(self, kind: str, text: str | bool | None) -> None:
        """Sends one object of a line. Raises: OSError when the page has gone or takes nothing, or the server ends."""
        if self.server.is_ending:
            raise ConnectionAbortedError
        self.wfile.write(json.dumps({kind: text}).encode() + b"\n")
        self.wfile.flush()

    def log_message(self, *_) -> None:
        """Prints nothing: the page shows what happens."""


def serve(models: Sequence[GradedModel], port: int, examples: Sequence[str] = ()) -> None:
    """Serves the page, with examples to click, until Ctrl-C. Raises: UserError if the port is taken."""
    try:
        server = ChatServer(models, port, examples)
    except OSError as error:
        raise UserError(f"port {port} cannot be opened ({error.strerror}): choose another --port") from error
    print(f"http://127.0.0.1:{server.server_port} (Ctrl-C ends)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.is_ending = True
            with server.lock:  # the segment that is being computed ends first: see Interrupts
                print()


def trained_settings(name: str) -> EnvConfig | None:
    """Returns the environment that a model was trained on; None if it is unknown, or runs code, with a line on that."""
    settings = find_run(name)[1] or demo_of_tiny({"model_dir": name}, is_announced=False)
    first, _, _ = str(settings.get("env_name", "")).partition(",")
    if code := code_settings(settings):
        print(f"{name} was trained with --{' and --'.join(code)}, which runs code: the page offers no problems")
    if not first or code:
        return None
    return EnvConfig(first.strip(), str(settings.get("env_options", "")), str(settings.get("data_dir", "")))


def load_examples(config: EnvConfig) -> tuple[Examples, bool]:
    """Returns problems of an environment, and True if they have one turn; none if it cannot be made here."""
    name = test_name(config.env_name)
    try:
        options = config.options(name)
        env = make_env(name, **options)
        has_one_turn = env.max_turns == 1
        scorer = Scorer(name, options, num_workers=1, max_error_share=1.0) if has_one_turn else None
        return Examples(None if env.opens else env, scorer), has_one_turn
    except (ValueError, OSError, ImportError):
        return Examples(), False


def main(config: PageCommand) -> None:
    """Serves the page for the models, with problems of the environment of the last trained one."""
    layout = make_layout(config.devices, config.model.model_dir)
    names = config.model.model_dir.split(",")
    models = load_chat_models(names, config, layout, GradedModel)
    trained = [trained_settings(name) for name in names]
    loaded = {env: load_examples(env) for env in dict.fromkeys(filter(None, trained))}
    for model, env in zip(models, trained, strict=True):
        _, model.has_one_turn = loaded.get(env, (None, False))
    examples = next((examples for examples, _ in reversed(loaded.values())), Examples())
    for model in models:
        model.examples = examples
    serve(models, config.port, [*examples.numbers])


if __name__ == "__main__":
    with ending_together(), user_errors():
        main(parse(PageCommand, sys.argv[1:], __doc__, aliases={"ckpt_dir": "model_dir"}))
