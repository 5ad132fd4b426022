"""An HTTP server in a thread, whose answers wait for tokens that another thread samples.

It answers this machine only, by its own names: other sites that a browser has open can reach it too.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, Self

from utils.settings.errors import UserError

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:  # `check_packages` says what to install
    Starlette = Response = StreamingResponse = None

JSON = Any
Payload = JSON  # of an answer: JSON, a text of JSON, a Response, or an iterator of the events of a stream
PathHandler = Callable[[JSON, "Caller"], Awaitable[Payload]]
MAX_BYTES = 10**7  # of a request
PACKAGES = ("starlette", "uvicorn", "pydantic", "openai")
SLOW = 10.0  # seconds in which a request must have come
NAMES = ("127.0.0.1", "localhost", "[::1]")


def check_packages(what: str) -> None:
    """Raises UserError with the line that installs what is not there."""
    if any(find_spec(name) is None for name in PACKAGES):
        raise UserError(f"{what} needs more packages: `pip install {' '.join(PACKAGES)}`")


class BadRequest(ValueError):
    """Raised for a request that cannot be answered; its text goes to the client."""

    def __init__(self, text: str, field: str = ""):
        super().__init__(text)
        self.field = field  # that is wrong


class Denied(BadRequest):
    """Raised for a caller without a right to an answer."""


class Caller:
    """Who asks: the key, and whether the client asks again for what it has asked for."""

    def __init__(self, request: "HTTPRequest"):
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        self.key = key.strip() if kind.lower() == "bearer" else ""
        self.is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        self.is_page = "origin" in request.headers  # of this server: others are refused
        self.has_gone = request.is_disconnected


class Server:
    """Serves paths until it is closed; use it as a context manager. `handlers`: by method and path, as "POST /v1/x".

    `stops_work`: the work for a client that leaves is cancelled.
    """

    def __init__(
        self, handlers: Mapping[str, PathHandler], host: str = "127.0.0.1", port: int = 0, stops_work: bool = False
    ):
        check_packages("an endpoint")
        self.handlers, self.names, self.stops_work = handlers, {*NAMES, host}, stops_work
        self.is_public = host not in NAMES
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
            self.socket.listen(4096)  # who asks before the thread serves waits
        except OSError as error:
            self.socket.close()
            raise UserError(f"{host}:{port} cannot be opened ({error.strerror}): name another --port") from error
        self.port = self.socket.getsockname()[1]
        routes = {}
        for name in handlers:
            method, path = name.split()
            routes.setdefault(path, []).append(method)
        app = Starlette(routes=[Route(path, self.answer, methods=methods) for path, methods in routes.items()])
        settings = uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_keep_alive=60, timeout_graceful_shutdown=1,
            limit_concurrency=4096, backlog=4096, h11_max_incomplete_event_size=2**16, ws="none",
            log_config=None,  # else it closes the handlers of everybody's logs
        )  # fmt: skip
        self.server = uvicorn.Server(settings)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.run, name="endpoint", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve(sockets=[self.socket]))
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function in the server's thread, without waiting for it."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def submit(self, coroutine: Coroutine) -> Future:
        """Runs a coroutine in the server's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def answer(self, request: "HTTPRequest") -> "Response":
        """Answers a request, whatever it is."""
        try:
            self.check_origin(request)
            body = read_json(await asyncio.wait_for(read_body(request), SLOW)) if request.method == "POST" else None
            handled = self.handlers[f"{request.method} {request.url.path}"](body, Caller(request))
            answer = await (while_connected(request, handled) if self.stops_work else handled)
            if isinstance(answer, AsyncIterator):
                first = await anext(answer)  # what is wrong with a request is told before a stream begins
        except Denied as error:
            return JSONResponse(error_body(error, "authentication_error"), status_code=401)
        except BadRequest as error:
            return JSONResponse(error_body(error), status_code=400)
        except (TimeoutError, ClientDisconnect):
            return JSONResponse(error_body(BadRequest("the request has not come in time")), status_code=408)
        if isinstance(answer, AsyncIterator):
            return StreamingResponse(chained(first, answer), media_type="text/event-stream")
        if isinstance(answer, Response):
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return Response(text, media_type="application/json")

    def check_origin(self, request: "HTTPRequest") -> None:
        """Raises BadRequest for a request that a page of another site sends, or that names another host."""
        name = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        origin = request.headers.get("origin")
        if not self.is_public and name not in self.names:
            raise BadRequest(f"this server is not {name[:100]!r}")
        if origin and origin not in {f"http://{known}:{self.port}" for known in self.names}:
            raise BadRequest("pages of other sites are not answered")

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(5)
        self.socket.close()


async def read_body(request: "HTTPRequest") -> bytes:
    """Returns the body of a request. Raises: BadRequest for one that is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise BadRequest(f"a request has at most {MAX_BYTES:,} bytes")
    return bytes(body)


async def while_connected(request: "HTTPRequest", handled: Awaitable[Payload]) -> Payload:
    """Returns an answer. Raises: ClientDisconnect if the client leaves before, and cancels its work."""
    work = asyncio.ensure_future(handled)
    gone = asyncio.ensure_future(request.receive())  # behind the body comes the end of the connection
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def chained(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async with contextlib.aclosing(rest):
        async for event in rest:
            yield event


def read_json(body: bytes) -> JSON:
    """Returns the JSON of a request. Raises: BadRequest for anything else, and for numbers that are not finite."""
    try:
        return json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not valid JSON ({error})"[:200]) from error


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def error_body(error: BadRequest, kind: str = "invalid_request_error") -> dict[str, JSON]:
    """Returns OpenAI's error object."""
    code = "context_length_exceeded" if "context length" in str(error) else None
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": code}}
