"""Chat in a browser with several models side by side, such as a base model and what was trained from it.

The server answers this machine only, and only its own page: other sites that a browser has open can reach it too.
"""

import base64
import contextlib
import hashlib
import json
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

import jax

from core.chat.terminal import Model, ShowText
from models.messages import Message
from utils.metrics.terminal import lowered_program
from utils.settings.errors import UserError, describe_error, on_one_line

PAGE = Path(__file__).with_name("chat_web.html")
ROLES = ("user", "assistant")
MAX_BYTES = 10**7  # bytes of a request
MAX_CHARS = 10**6  # characters of a conversation; encoding 300,000 takes a second
TIMEOUT = 10  # seconds in which a page sends or takes nothing


class ChatServer(ThreadingHTTPServer):
    """Serves the page and the replies of models; they are computed one at a time."""

    daemon_threads = True

    def __init__(self, models: Sequence[Model], port: int, examples: Sequence[str] = ()):
        self.models, self.examples = models, examples
        self.lock = Lock()
        self.is_ending = False
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, *args: object) -> None:
        """Prints the traceback of an error, unless it is of a connection, which a page may end at any time."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*args)

    @property
    def hosts(self) -> set[str]:
        """Host names of the page; a request by another name comes from a site that points to this machine."""
        return {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @cached_property
    def page(self) -> tuple[str, str]:
        """The page, and a policy under which its own script alone runs."""
        models = [{"name": model.name, "hasOneTurn": model.has_one_turn} for model in self.models]
        data = json.dumps({"models": models, "examples": list(self.examples)}).replace("<", "\\u003c")
        text = PAGE.read_text(encoding="utf-8").replace("{{data}}", data)
        script = re.search("<script>(.*)</script>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'"
        return text, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    server: ChatServer
    timeout = TIMEOUT

    def do_GET(self) -> None:
        if self.headers["Host"] not in self.server.hosts or self.path != "/":
            return self.send_error(404)
        text, policy = self.server.page
        self.begin("text/html; charset=utf-8", policy)
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        """Streams a reply, an object on each line: what is compiled, the text as it grows, and if it is right."""
        is_page = self.headers["Origin"] in {f"http://{host}" for host in self.server.hosts}
        if self.headers["Host"] not in self.server.hosts or not is_page or self.path != "/reply":
            return self.send_error(404)
        try:
            size = int(self.headers["Content-Length"] or 0)
            if not 0 <= size <= MAX_BYTES:
                raise ValueError(f"a request has at most {MAX_BYTES:,} bytes")
            model, messages, temperature = read_request(self.rfile.read(size), self.server.models)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            return self.send_error(400, explain=on_one_line(str(error)))
        self.begin("text/plain; charset=utf-8")
        num_chars = sum(len(message["content"]) for message in messages)
        if num_chars > MAX_CHARS:
            return self.send_line("error", f"the conversation has {num_chars:,} characters, and may have {MAX_CHARS:,}")
        with self.server.lock:
            if self.server.is_ending or self.page_has_gone():
                return  # stopped while another model replied: this reply is not read
            try:
                model.change("temperature", temperature)
                with telling_compilations(partial(self.send_line, "compiling")):
                    text = model.reply(messages, partial(self.send_line, "text"))
                self.send_line("text", text)
                self.send_line("right", model.grade(messages, text))
            except UserError as error:
                self.send_line("error", str(error))
            except OSError:
                self.close_connection = True  # the page has stopped the reply
            except Exception as error:
                with contextlib.suppress(OSError):
                    self.send_line("error", describe_error(error))
                raise

    def page_has_gone(self) -> bool:
        """Returns True when the page has closed the connection."""
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False  # open, and nothing more to read
        except OSError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def begin(self, kind: str, policy: str = "default-src 'none'") -> None:
        """Sends the head of an answer, whose end is that of the connection."""
        self.send_response(200)
        headers = {"Content-Type": kind, "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        for name, value in (headers | {"Cache-Control": "no-store"}).items():
            self.send_header(name, value)
        self.end_headers()

    def send_line(self, kind: str, text: str | bool | None) -> None:
        """Sends one object of a line. Raises: OSError when the page has gone or takes nothing, or the server ends."""
        if self.server.is_ending:
            raise ConnectionAbortedError
        self.wfile.write(json.dumps({kind: text}).encode() + b"\n")
        self.wfile.flush()

    def log_message(self, *_) -> None:
        """Prints nothing: the page shows what happens."""


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


def read_request(body: bytes, models: Sequence[Model]) -> tuple[Model, list[Message], str]:
    """Returns the model, the conversation and the temperature of a request. Raises: ValueError, KeyError, TypeError."""
    request = json.loads(body)
    messages = []
    for message in request["messages"]:
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(f"a message has a role of {', '.join(ROLES)}, and text")
        messages.append({"role": message["role"], "content": message["content"]})
    number = request["model"]
    if type(number) is not int or not 0 <= number < len(models):
        raise ValueError(f"there are models 0 to {len(models) - 1}")
    return models[number], messages, str(request["temperature"])


def serve(models: Sequence[Model], port: int, examples: Sequence[str] = ()) -> None:
    """Serves the page, with examples to click, until Ctrl-C. Raises: UserError if the port is taken."""
    try:
        server = ChatServer(models, port, examples)
    except OSError as error:
        raise UserError(f"--web {port}: the port cannot be opened ({error.strerror}): name another one") from error
    print(f"http://127.0.0.1:{server.server_port} (Ctrl-C ends)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            server.is_ending = True
            with server.lock:  # the segment that is being computed ends first: see Interrupts
                print()
