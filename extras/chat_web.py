"""Serves a chat in a browser with several models side by side, such as a base model and what was trained from it.

    python extras/chat_web.py --ckpt_dir models/tiny,runs/demo/step24 --port 8000

The server answers this machine only, and only its own page: other sites that a browser has open can reach it too.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    gc.disable()  # while modules are imported: `ending_together` enables it
    import utils.settings.packages  # noqa: F401 (says what to install)

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Protocol

import jax

from core.chat.models import ChatCommand, ChatModel, ShowText, load_chat_models
from core.eval import find_run
from envs import make_env, test_name
from envs.base import Env
from envs.scoring.scorer import Scorer
from envs.settings import EnvConfig, code_settings
from models.messages import Message
from recipes.agents.server import JSON, BadRequest, Caller, Response, Server, StreamingResponse
from utils.devices.startup import ending_together, make_layout
from utils.metrics.terminal import lowered_program
from utils.settings.config import parse
from utils.settings.errors import UserError, describe_error, on_one_line, user_errors
from utils.settings.options import option
from utils.settings.presets import demo_of_tiny

PAGE = Path(__file__).with_name("chat_web.html")
ROLES = ("user", "assistant")
MAX_CHARS = 10**6  # characters of a conversation; encoding 300,000 takes a second
NUM_EXAMPLES = 6  # held-out problems on the page
HEADERS = {
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
SendLine = Callable[[str, str | bool | None], None]  # sends an object of a line; raises when the page has gone


@dataclass(frozen=True)
class PageCommand(ChatCommand):
    """A chat with the models of --model_dir, separated by commas, side by side."""

    port: int = option(8000, "Port of the page, on this machine only", essential=True)

    def __post_init__(self):
        if not 1 <= self.port < 2**16:
            raise UserError(f"--port {self.port} is no port: give 1 to 65535")


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


class PageModel(Protocol):
    """What the page asks of a model; GradedModel documents it."""

    name: str
    has_one_turn: bool

    def reply(self, messages: list[Message], show_text: ShowText) -> str: ...
    def change(self, name: str, value: str) -> None: ...
    def grade(self, messages: list[Message], reply: str) -> bool | None: ...


class ChatServer(Server):
    """Serves the page and the replies of models; they are computed one at a time."""

    def __init__(self, models: Sequence[PageModel], port: int, examples: Sequence[str] = ()):
        self.models, self.examples = models, examples
        self.lock = Lock()  # of the model that replies
        self.is_ending = False
        super().__init__({"GET /": self.page, "POST /reply": self.reply}, port=port)

    async def page(self, _: JSON, caller: Caller) -> Response:
        """Returns the page, with a policy under which its own script alone runs."""
        models = [{"name": model.name, "hasOneTurn": model.has_one_turn} for model in self.models]
        data = json.dumps({"models": models, "examples": list(self.examples)}).replace("<", "\\u003c")
        text = PAGE.read_text(encoding="utf-8").replace("{{data}}", data)
        script = re.search("<script>(.*)</script>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'"
        policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        return Response(text, media_type="text/html", headers=HEADERS | {"Content-Security-Policy": policy})

    async def reply(self, body: JSON, caller: Caller) -> Response:
        """Streams a reply, an object on each line: what is compiled, the text as it grows, and if it is right."""
        if not caller.is_page:
            raise BadRequest("only the page is answered")
        try:
            model, messages, temperature = read_request(body, self.models)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise BadRequest(on_one_line(str(error))) from error
        lines = self.lines(model, messages, temperature, caller)
        return StreamingResponse(lines, media_type="text/plain; charset=utf-8", headers=HEADERS)

    async def lines(
        self, model: PageModel, messages: list[Message], temperature: str, caller: Caller
    ) -> AsyncIterator[str]:
        """Yields the lines of a reply, which is computed in a thread; it ends when the page has gone."""
        lines, gone = asyncio.Queue(), threading.Event()

        def send(kind: str, text: str | bool | None) -> None:
            if gone.is_set() or self.is_ending:
                raise ConnectionAbortedError
            self.loop.call_soon_threadsafe(lines.put_nowait, json.dumps({kind: text}) + "\n")

        def has_gone() -> bool:
            asked = asyncio.run_coroutine_threadsafe(caller.has_gone(), self.loop)
            return self.is_ending or gone.is_set() or asked.result(1)

        work = self.loop.run_in_executor(None, self.compute, model, messages, temperature, send, has_gone)
        work.add_done_callback(lambda _: lines.put_nowait(""))
        try:
            while line := await lines.get():
                yield line
        finally:
            gone.set()

    def compute(
        self, model: PageModel, messages: list[Message], temperature: str, send: SendLine, has_gone: Callable[[], bool]
    ) -> None:
        """Computes a reply when no other is computed; an error is sent, and printed if it is a fault of ours."""
        num_chars = sum(len(message["content"]) for message in messages)
        with contextlib.suppress(ConnectionAbortedError):
            if num_chars > MAX_CHARS:
                return send("error", f"the conversation has {num_chars:,} characters, and may have {MAX_CHARS:,}")
            with self.lock:
                if has_gone():
                    return  # stopped while another model replied: this reply is not read
                try:
                    model.change("temperature", temperature)
                    with telling_compilations(partial(send, "compiling")):
                        text = model.reply(messages, partial(send, "text"))
                    send("text", text)
                    send("right", model.grade(messages, text))
                except UserError as error:
                    send("error", str(error))
                except ConnectionAbortedError:
                    raise
                except Exception as error:
                    traceback.print_exc()
                    send("error", describe_error(error))


@contextlib.contextmanager
def telling_compilations(tell: ShowText) -> Iterator[None]:
    """Sends the name of each program that is about to be compiled in the block."""

    def on_compilation(event: str, seconds: float, fun_name: str = "", **_) -> None:
        if name := lowered_program(event, fun_name):
            with contextlib.suppress(OSError):  # the page has gone: the next text ends the reply
                tell(name)

    jax.monitoring.register_event_duration_secs_listener(on_compilation)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(on_compilation)


def read_request(request: JSON, models: Sequence[PageModel]) -> tuple[PageModel, list[Message], str]:
    """Returns the model, the conversation and the temperature of a request. Raises: ValueError, KeyError, TypeError."""
    messages = []
    for message in request["messages"]:
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(f"a message has a role of {', '.join(ROLES)}, and text")
        messages.append({"role": message["role"], "content": message["content"]})
    number = request["model"]
    if type(number) is not int or not 0 <= number < len(models):
        raise ValueError(f"there are models 0 to {len(models) - 1}")
    return models[number], messages, str(request["temperature"])


def serve(models: Sequence[PageModel], port: int, examples: Sequence[str] = ()) -> None:
    """Serves the page, with examples to click, until Ctrl-C. Raises: UserError if the port is taken."""
    with ChatServer(models, port, examples) as server:
        print(f"{server.url} (Ctrl-C ends)", flush=True)
        try:
            threading.Event().wait()
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
