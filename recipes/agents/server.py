"""An HTTP server in a thread of its own, whose answers wait for tokens that another thread samples.

It listens on localhost and rejects requests from other origins, which a browser could send.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from utils.settings.errors import UserError

JSON = Any
Answer = JSON | AsyncIterator[str]  # JSON, or the events of a stream
PathHandler = Callable[[JSON, "Caller"], Awaitable[Answer]]
MAX_BYTES = 2 * 10**6  # of a request: encoding that many characters takes seconds
NAMES = ("127.0.0.1", "localhost", "[::1]")


class BadRequest(ValueError):
    """Raised for a request that cannot be answered; its text goes to the client, with the `field` that is wrong."""

    def __init__(self, text: str, field: str = "", status: int = 400):
        super().__init__(text)
        self.field, self.status = field, status


class Caller(NamedTuple):
    """The client that sent a request."""

    key: str
    is_retry: bool = False


class Server:
    """Serves paths until it is closed; use it as a context manager. `handlers`: by method and path, as "POST /v1/x".

    `stops_work`: the work for a client that leaves is canceled.
    """

    def __init__(
        self, handlers: Mapping[str, PathHandler], host: str = "127.0.0.1", port: int = 0, stops_work: bool = False
    ):
        self.handlers, self.stops_work = handlers, stops_work
        self.names = {*NAMES, host}
        self.is_public = host not in NAMES
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
            self.socket.listen(4096)  # clients that connect before the thread serves wait
        except OSError as error:
            self.socket.close()
            raise UserError(f"{host}:{port} cannot be opened ({error.strerror}): choose another --port") from error
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        parts = [name.split() for name in handlers]
        app = Starlette(routes=[Route(path, self.answer, methods=[method]) for method, path in parts])
        settings = uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_keep_alive=60, timeout_graceful_shutdown=1,
            log_config=None,  # otherwise it closes the handlers of all logs
        )  # fmt: skip
        self.server = uvicorn.Server(settings)
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.thread = threading.Thread(target=self.run, name="endpoint", daemon=True)

    def run(self) -> None:
        with self.runner:
            self.runner.run(self.server.serve(sockets=[self.socket]))

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function in the server's thread, without waiting for it."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def submit(self, coroutine: Coroutine) -> Future:
        """Runs a coroutine in the server's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def answer(self, request: HTTPRequest) -> JSONResponse | StreamingResponse:
        """Answers a request, or says what is wrong with it."""
        try:
            self.check_origin(request)
            body = read_json(await request.body()) if request.method == "POST" else None
            kind, _, key = request.headers.get("authorization", "").partition(" ")
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            caller = Caller(key.strip() if kind.lower() == "bearer" else "", is_retry)
            handled = self.handlers[f"{request.method} {request.url.path}"](body, caller)
            answer = await (while_connected(request, handled) if self.stops_work else handled)
            if not isinstance(answer, AsyncIterator):
                return JSONResponse(answer)
            first = await anext(answer)  # so that an error becomes a status, before the stream begins
            return StreamingResponse(chained(first, answer), media_type="text/event-stream")
        except BadRequest as error:
            return JSONResponse(error_body(error), status_code=error.status)
        except ClientDisconnect:
            return JSONResponse({}, status_code=408)  # which nobody reads

    def check_origin(self, request: HTTPRequest) -> None:
        """Raises BadRequest for a request that a page of another site sends, or that names another host."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self.is_public and (host.rpartition(":")[0] or host) not in self.names:
            raise BadRequest(f"this server is not {host[:100]!r}")
        if origin and origin not in {f"http://{known}:{self.port}" for known in self.names}:
            raise BadRequest("pages of other sites are not answered")

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(5)
        self.socket.close()


async def while_connected(request: HTTPRequest, handled: Awaitable[JSON]) -> JSON:
    """Returns an answer. Raises: ClientDisconnect if the client leaves before, and cancels its work."""
    work = asyncio.ensure_future(handled)
    gone = asyncio.ensure_future(request.receive())  # after the body comes the end of the connection
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
    if len(body) > MAX_BYTES:
        raise BadRequest(f"the request has {len(body):,} bytes: shorten it to {MAX_BYTES:,}")
    try:
        found = json.loads(body, parse_constant=reject_constant)
        json.dumps(found, ensure_ascii=False).encode()  # raises for half of a surrogate pair, which no tokenizer takes
        return found
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not valid JSON ({error})"[:200]) from error


def reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def error_body(error: BadRequest) -> dict[str, JSON]:
    """Returns OpenAI's error object."""
    code = "context_length_exceeded" if "context length" in str(error) else None
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.field or None, "code": code}}
