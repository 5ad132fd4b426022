"""An HTTP server in a thread, whose answers wait for tokens that another thread samples.

It answers this machine only, by its own names: other sites that a browser has open can reach it too.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Self

from recipes.agents.protocol import BadRequest, chunks, error_body, read_json
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
Payload = dict[str, JSON]
PathHandler = Callable[[JSON, "Caller"], Awaitable[Payload]]
MAX_BYTES = 10**7  # of a request
SLOW = 10.0  # seconds in which a request must have come
NAMES = ("127.0.0.1", "localhost", "[::1]")


def check_packages(what: str) -> None:
    """Raises UserError with the line that installs the server, if it is not there."""
    if Starlette is None:
        raise UserError(f"{what} needs a web server: `pip install starlette uvicorn`")


class Caller:
    """Who asks: the key, and whether the client asks again for what it has asked for."""

    def __init__(self, request: "HTTPRequest"):
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        self.key = key.strip() if kind.lower() == "bearer" else ""
        self.is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        self.is_page = "origin" in request.headers  # of this server: others are refused
        self.has_gone = request.is_disconnected


class Denied(BadRequest):
    """Raised for a caller without a right to an answer."""


class Server:
    """Serves paths until it is closed; use it as a context manager. `handlers`: by method and path, as "POST /v1/x"."""

    def __init__(self, handlers: Mapping[str, PathHandler], host: str = "127.0.0.1", port: int = 0):
        check_packages("an endpoint")
        self.handlers, self.names = handlers, {*NAMES, host}
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
            answer = await self.handlers[f"{request.method} {request.url.path}"](body, Caller(request))
        except Denied as error:
            return JSONResponse(error_body(str(error), "authentication_error"), status_code=401)
        except BadRequest as error:
            code = "context_length_exceeded" if "context length" in str(error) else None
            return JSONResponse(error_body(str(error), code=code), status_code=400)
        except (TimeoutError, ClientDisconnect):
            return JSONResponse(error_body("the request has not come in time"), status_code=408)
        if isinstance(answer, Response):
            return answer
        if isinstance(body, dict) and body.get("stream") is True:
            return StreamingResponse(iter(chunks(answer)), media_type="text/event-stream")
        return Response(json.dumps(answer), media_type="application/json")

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
