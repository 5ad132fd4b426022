"""Chat templates are programs of downloaded folders, which see every conversation: a process of their own renders them.

Nothing interrupts a single operation of Python, such as a product of large integers, and no list of operations names
all that may be large. So the kernel limits the process: it ends after SECONDS of CPU time, and gets no memory beyond
MAX_BYTES. A template that exceeds a limit fails in one sentence, and the next rendering starts another process.
"""

import atexit
import contextlib
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.environment import Environment, Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from utils.settings.errors import describe_error

SECONDS = 1  # CPU time of a rendering, with compilation before the first: published templates take milliseconds
MAX_BYTES = 1 << 30  # bytes of address space
MAX_WRITTEN = 10**6  # characters that a template may write besides ten times its input
PATIENCE = 60  # seconds by the clock, for a process that was stopped
ROOT = Path(__file__).resolve().parent.parent
PROCESS = "import sys; sys.path[0] = sys.argv[1]; from models.templates import serve; serve()"


class RemoteTemplate:
    """A template that is compiled and rendered by the process."""

    def __init__(self, environment: Environment, source: str):
        self.environment, self.source = environment, source

    def render(self, **variables: Any) -> str:
        """Returns the text. Raises: TemplateError with the type and the message of what went wrong there."""
        return RENDERER.render(self.source, variables)


class RemoteEnvironment(ImmutableSandboxedEnvironment):
    """Replaces the environment in which transformers renders chat templates."""

    def from_string(self, source: str, *_: Any, **__: Any) -> RemoteTemplate:
        """Returns a template that is not compiled here, since compilation already computes constants."""
        return RemoteTemplate(self, source)


class Renderer:
    """The process that renders; from any thread, one rendering at a time."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.time = ""  # time that templates write; empty: now

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Returns the text of a template. Raises: TemplateError."""
        reply = self.exchange([source, variables, self.time])
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply["text"]

    def exchange(self, request: Sequence[Any]) -> dict[str, str]:
        """Returns the reply of the process, or the reason why it ended; starts the process if there is none."""
        with self.lock:
            return self.send(json.dumps(request).encode() + b"\n")

    def send(self, request: bytes) -> dict[str, str]:
        process = self.process = self.process or self.start()
        is_stuck, line = False, b""
        with contextlib.suppress(OSError):  # it was ended from elsewhere
            process.stdin.write(request)
            process.stdin.flush()
            is_stuck = not select.select([process.stdout], [], [], PATIENCE)[0]
            line = b"" if is_stuck else process.stdout.readline()
        if line:
            return json.loads(line)
        self.close()
        if is_stuck or process.returncode == -signal.SIGPROF:
            return {"error": f"TimeoutError: it takes more than {SECONDS} s"}
        return {"error": f"MemoryError: its process ended with status {process.returncode}"}

    def start(self) -> subprocess.Popen:
        """Starts the process, in a session of its own, since Ctrl-C is for the run."""
        command = [sys.executable, "-c", PROCESS, str(ROOT)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, **pipes, start_new_session=True)

    def close(self) -> None:
        """Ends the process."""
        process, self.process = self.process, None
        if process:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # output that was not read
                process.stdin.close()
            process.stdout.close()


RENDERER = Renderer()
atexit.register(RENDERER.close)


def date_prompts(time: str) -> None:
    """Makes templates write the date of this time (ISO 8601), not that of each rendering.

    Characters behind the seconds are left out.
    """
    RENDERER.time = datetime.fromisoformat(time[:19]).isoformat()


def render_apart() -> None:
    """Makes transformers render the templates that it compiles from now on by the process."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = RemoteEnvironment


# the process


def serve() -> None:
    """Carries out requests until the other end of the pipe is closed."""
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    for line in sys.stdin.buffer:
        reply = answer(json.loads(line), MAX_WRITTEN + 10 * len(line))
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def answer(arguments: Sequence[Any], most: int) -> dict[str, str]:
    """Returns the text of a template, or its error; SIGPROF ends the process after SECONDS."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        text = render(*arguments)
        if len(text) > most:
            raise MemoryError(f"it writes {len(text):,} characters, more than {most:,}")
        return {"text": text}
    except BaseException as error:  # noqa: BLE001 (the template is a program: it can fail in any way)
        return {"error": describe_error(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def render(source: str, variables: Mapping[str, Any], time: str) -> str:
    """Returns the text of a template at this time, or now if the time is empty."""
    return compile_template(source, time).render(**variables)


@lru_cache(maxsize=8)
def compile_template(source: str, time: str = "") -> Template:
    """Compiles a template in the environment that transformers documents for chat templates, at this time or now."""

    def strftime_now(form: str) -> str:
        moment = datetime.fromisoformat(time) if time else datetime.now()
        return moment.strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "dict": DictMaker(), "namespace": PublicNamespace, "raise_exception": fail_template,
        "strftime_now": strftime_now,
    }  # fmt: skip
    return environment.from_string(source)


class GenerationTag(Extension):
    """{% generation %} marks replies, for masks that are not read here: its body is written as it is."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class DictMaker:
    """Makes dictionaries, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class PublicNamespace(Namespace):
    """A namespace without names that begin with an underscore: the sandbox trusts no others."""

    def __init__(*args: Any, **kwargs: Any):  # `self` may be a name
        space, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            check_public(name)
        Namespace.__init__(space, values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_public(name)
        super().__setitem__(name, value)


def check_public(name: object) -> None:
    """Raises SecurityError for a private name."""
    if str(name).startswith("_"):
        raise SecurityError(f"the namespace has no name {name!r}")


def fail_template(message: str) -> NoReturn:
    """Raises the error of a template that refuses a conversation."""
    raise TemplateError(message)


def to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    """Returns JSON without HTML's escapes, which Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)
