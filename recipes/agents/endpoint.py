"""An endpoint in OpenAI's form: an HTTP server in a thread of its own, for tokens that another thread samples.

A request continues a conversation if its messages begin with those of the conversation and with the replies as they
were returned, and if its other fields say the same about how messages are rendered. Then only the rest is new. Any
other request begins a conversation of its own, in another row of the sampler: a fork.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Self, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from envs.base import DIALECTS, Reply
from envs.data.rows import JSON
from envs.scoring.scorer import NO_WAIT, WaitForMore
from envs.scoring.worker import Failure
from models.tokenizer import Tokenizer
from recipes.agents.protocol import (
    BadRequest,
    ChatMessage,
    ChatRequest,
    Message,
    Request,
    Sampled,
    changes,
    choice_of,
    joint_of_parts,
    reply_message,
    usage,
)
from utils.settings.errors import UserError

FULL = "the conversation is longer than the model's context length: the context length is reached"
BUDGET = "Step budget exhausted; stopping."
MAX_ANSWERS = 512  # that are kept for clients that ask again
LOCAL = ("127.0.0.1", "localhost", "::1")
OnTokens = Callable[..., None] | None
T = TypeVar("T")


@dataclass(eq=False)
class Asked:
    """A request of a row: messages after those that it has, and how its next reply ends."""

    messages: Sequence[Message]
    request: Request
    index: int  # of the choice among those of its request
    is_new: bool  # a conversation begins
    reply: asyncio.Future[Sampled]
    on_tokens: OnTokens = None  # gets the reply while it is sampled
    prompt: Sequence[int] = ()  # of a completion
    distribution: object = None  # that the request names; None: the sampler's
    has_left: bool = False  # nobody waits for the reply


@dataclass(eq=False)
class Session:
    """The requests of one key."""

    key: str
    num_calls: int = 0  # replies, sampled or not
    num_refused: int = 0  # conversations for which there was no row
    refused: str = ""  # why the last request was


@dataclass(eq=False)
class Dialogue:
    """A conversation: its session, its row, and all of its messages."""

    session: Session
    row: int
    fixed: str = ""  # fields of its requests that cannot change
    said: list[Message] = field(default_factory=list)
    asked: Asked | None = None  # the request that waits for a reply
    has_replied: bool = False
    is_auxiliary: bool = False  # its program asks that it is not trained

    def continues(self, request: Request, messages: Sequence[Message]) -> bool:
        """True if a request continues this conversation, or begins it: none before had a reply."""
        begins_alike = len(messages) > len(self.said) > 0 and messages[: len(self.said)] == self.said
        return not self.has_replied or begins_alike and self.fixed == request.fixed


Rewards = Mapping[str, float]  # that a program has printed; without "return" its last reply is to be graded
RowOutcome = Asked | Rewards | Failure


class Endpoint:
    """Conversations of sessions, and what their rows ask for; use it as a context manager.

    `take`, `answer`, `close` and `call` are called by the thread that samples; all else happens in the server's thread.
    A subclass has `session_of` a key, and `take_row` for a session's new conversation; each may raise BadRequest. If it
    takes prompts of completions it has `encode`.
    """

    tokenizer: Tokenizer
    context: int  # most tokens of a row
    paths: Mapping[str, type[Request]] = {"/v1/chat/completions": ChatRequest}
    stops_work = False  # the work for a client that leaves is canceled

    def __init__(
        self, name: str, dialect: str, max_calls: int = 0, num_places: int = 0, host: str = "127.0.0.1", port: int = 0
    ):
        self.name, self.dialect = name, DIALECTS[dialect]
        self.max_calls = max_calls  # 0: no limit
        self.queue = asyncio.Semaphore(num_places) if num_places else contextlib.nullcontext()  # first come, first
        self.dialogues: dict[int, Dialogue] = {}  # by row, the last used one last
        self.outcomes: dict[int, RowOutcome] = {}  # by row
        self.computing: set[int] = set()  # rows whose program owes an outcome; clients of a server owe none
        self.closed: set[int] = set()  # rows that take no more
        self.answers: dict[tuple[str, str], list[asyncio.Future]] = {}  # by key and request
        self.numbers = count(1)
        self.has_changed = threading.Condition()
        self.names = {*LOCAL, host}
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
        routes = [Route(path, partial(self.respond, kind), methods=["POST"]) for path, kind in self.paths.items()]
        routes += [Route("/v1/models", self.models)]
        app = Starlette(routes=routes, exception_handlers={BadRequest: say_error, ClientDisconnect: say_error})
        settings = uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_keep_alive=60, timeout_graceful_shutdown=1,
            log_config=None,  # otherwise it closes the handlers of all logs
        )  # fmt: skip
        self.server, self.runner = uvicorn.Server(settings), asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.thread = threading.Thread(target=self.run, name="endpoint", daemon=True)

    def run(self) -> None:
        with self.runner:
            self.runner.run(self.server.serve(sockets=[self.socket]))

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(5)
        self.socket.close()

    # In the thread that samples

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function in the server's thread, without waiting for it."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def take(self, rows: Set[int], num_needed: int = 0, more: WaitForMore = NO_WAIT) -> dict[int, RowOutcome]:
        """Removes and returns the outcomes of these rows that are there, by row.

        It waits until there are `num_needed`, a second at most, then for programs that compute as long as `more` says.
        """

        def num_come() -> int:
            return len(rows & self.outcomes.keys())

        with self.has_changed:
            self.has_changed.wait_for(lambda: num_come() >= num_needed, timeout=1)  # the sampler may be canceled
            more.wait(self.has_changed, num_come, lambda: not self.computing & rows)
            return {row: self.outcomes.pop(row) for row in sorted(rows & self.outcomes.keys())}

    def answer(self, row: int, asked: Asked, outcome: Sampled | BadRequest) -> None:
        """Gives a request its reply, or refuses it."""
        self.call(self.settle, asked, outcome)

    def close(self, rows: Sequence[int]) -> None:
        """Refuses all that is asked of these rows from now on: their context is full."""
        self.closed.update(rows)
        self.call(self.refuse, rows, FULL)

    # In the server's thread

    def distribution_of(self, request: Request) -> object:
        """Returns the distribution that a request names; None: the sampler's. Raises: BadRequest."""
        if request.num_top > 0:
            raise BadRequest("top_logprobs needs recipes/agents/serve.py: leave it out", "top_logprobs")

    async def with_top(self, request: Request, sampled: Sampled) -> Sampled:
        """Returns a reply with the likeliest candidates of each token, if the request asks for them."""
        return sampled

    def publish(self, row: int, outcome: RowOutcome) -> None:
        """Hands what follows a row's reply to the thread that samples."""
        with self.has_changed:
            self.outcomes[row] = outcome
            self.computing.discard(row)
            self.has_changed.notify_all()

    def settle(self, asked: Asked, outcome: Sampled | BadRequest) -> None:
        """Ends the wait of a request, unless its client has left."""
        if not asked.reply.done():
            (asked.reply.set_exception if isinstance(outcome, BadRequest) else asked.reply.set_result)(outcome)

    def refuse(self, rows: Sequence[int], reason: str) -> None:
        """Ends the wait of all requests of rows."""
        for asked in [self.dialogues[row].asked for row in self.dialogues.keys() & {*rows}]:
            if asked:
                asked.has_left = True
                self.settle(asked, BadRequest(reason))

    def find(self, session: Session, request: Request, messages: Sequence[Message]) -> Dialogue:
        """Returns the conversation that a request continues, the longest one, or a new one."""
        own = [x for x in self.dialogues.values() if x.session.key == session.key and not x.asked]
        found = [x for x in own if x.continues(request, messages)] if messages and request.n == 1 else []
        if found:
            return max(found, key=lambda each: len(each.said))
        row = self.take_row(session)
        self.dialogues[row] = Dialogue(session, row)
        return self.dialogues[row]

    async def sample(
        self, session: Session, request: Request, prompt: Sequence[int], index: int, on_tokens: OnTokens
    ) -> Sampled:
        """Returns sample `index` of a request: of its messages, or of a prompt. Raises: BadRequest."""
        session.num_calls += 1
        if self.max_calls and session.num_calls > self.max_calls:
            return Sampled(Reply(BUDGET))
        if request.limit == 0:
            return Sampled(Reply(""), prompt_ids=prompt)
        distribution = self.distribution_of(request)
        async with self.queue:
            joint = joint_of_parts(self.tokenizer, self.tokenizer.template)
            messages = [message.for_template(joint) for message in request.messages]
            self.session_of(session.key)  # raises if it has ended since: nobody would end the row
            dialogue = self.find(session, request, messages)
            asked = Asked(
                messages[len(dialogue.said) :], request, index, is_new=not dialogue.said, on_tokens=on_tokens,
                prompt=prompt, distribution=distribution, reply=asyncio.get_running_loop().create_future(),
            )  # fmt: skip
            dialogue.asked, self.dialogues[dialogue.row] = asked, self.dialogues.pop(dialogue.row)  # the last used one
            dialogue.is_auxiliary |= request.metadata.get("auxiliary") == "true"
            try:
                if dialogue.row in self.closed:
                    raise BadRequest(FULL)
                self.publish(dialogue.row, asked)
                sampled = await asked.reply
            except BadRequest as error:
                session.refused = str(error)
                raise
            except asyncio.CancelledError:  # the row holds part of a reply
                asked.has_left, dialogue.has_replied, dialogue.said = True, True, []
                raise
            finally:
                dialogue.asked = None
            dialogue.has_replied, dialogue.said, dialogue.fixed = True, [], request.fixed
            if prompt:
                del self.dialogues[dialogue.row]  # nothing continues it
            elif sampled.is_whole:
                reply = ChatMessage.model_validate(reply_message(request, sampled, self.dialect))
                dialogue.said = [*messages, reply.for_template("")]
        return sampled

    async def replies(
        self, http: HTTPRequest, request: Request, prompts: Sequence[Sequence[int]], on_tokens: OnTokens = None
    ) -> Sequence[Sampled]:
        """Returns n replies for each prompt; a client that asks again gets the answer of the one equal request."""
        session, is_retry = self.session(http), http.headers.get("x-stainless-retry-count", "0") != "0"
        key = session.key, f"{prompts} {request.model_dump_json()}"
        known = [x for x in self.answers.pop(key, []) if not x.done() or not (x.cancelled() or x.exception())]
        if not (is_retry and len(known) == 1 and (known[0].done() or not self.stops_work)):
            numbered = enumerate((prompt, index) for prompt in prompts for index in range(request.n))
            each = [(*about, on_tokens and partial(on_tokens, place)) for place, about in numbered]
            known = [*known, asyncio.gather(*[self.sample(session, request, *about) for about in each])][-2:]
        self.answers[key] = known
        if len(self.answers) > MAX_ANSWERS:
            del self.answers[next(iter(self.answers))]
        found = await (known[-1] if self.stops_work else asyncio.shield(known[-1]))
        return [await self.with_top(request, sampled) for sampled in found]

    # Paths

    def session(self, http: HTTPRequest) -> Session:
        """Returns the session of a request. Raises: BadRequest for pages of a browser, and names of other hosts."""
        if "origin" in http.headers or self.names <= {*LOCAL} and http.url.hostname not in LOCAL:
            raise BadRequest("this server answers programs of its machine, not pages of sites")
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        return self.session_of(key.strip() if kind.lower() == "bearer" else "")

    async def models(self, http: HTTPRequest) -> Response:
        self.session(http)
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "lmpo", "max_model_len": self.context}
        return JSONResponse({"object": "list", "data": [card]})

    async def respond(self, kind: type[Request], http: HTTPRequest) -> Response:
        """Answers a request, whole or as a stream."""
        self.session(http)
        request = kind.read(await http.body())
        prompts = [self.encode(prompt) for prompt in request.prompt] or [()]
        head = {request.id_name: f"lmpo-{next(self.numbers)}", "created": int(time.time()), "model": self.name}
        if request.stream:
            events = self.events(http, request, prompts, head)
            first = await anext(events)  # so that an error becomes a status, before the stream begins
            return StreamingResponse(chained(first, events), media_type="text/event-stream")
        work = self.replies(http, request, prompts)
        replies = await (while_connected(http, work) if self.stops_work else work)
        choices = [{"index": i, **choice_of(request, x, self.tokenizer, self.dialect)} for i, x in enumerate(replies)]
        ids = {"prompt_token_ids": list(replies[0].prompt_ids)} if request.return_token_ids else {}
        answer = head | {"object": request.object, "choices": choices, "usage": usage(replies, request.n)} | ids
        return JSONResponse(answer)

    async def events(
        self, http: HTTPRequest, request: Request, prompts: Sequence[Sequence[int]], head: Mapping[str, JSON]
    ) -> AsyncIterator[str]:
        """Yields the events of a stream: what each choice has more than before, and usage at the end."""
        grown: asyncio.Queue[tuple[int, Sampled] | None] = asyncio.Queue()
        work = asyncio.ensure_future(self.replies(http, request, prompts, lambda *begun: grown.put_nowait(begun)))
        work.add_done_callback(lambda _: grown.put_nowait(None))

        async def states() -> AsyncIterator[tuple[int, Sampled, bool]]:
            while begun := await grown.get():
                yield *begun, True
            for index, sampled in enumerate(await work):
                yield index, sampled, False

        def event(**fields: JSON) -> str:
            return f"data: {json.dumps({**head, 'object': request.chunk_object, **fields})}\n\n"

        sent: dict[int, dict[str, JSON]] = defaultdict(dict)
        try:
            async for index, sampled, is_partial in states():
                choice = choice_of(request, sampled, self.tokenizer, self.dialect, is_partial)
                if delta := changes(sent[index], choice):
                    yield event(choices=[{"index": index, **delta}], usage=None)
                    sent[index] = choice
            if request.stream_options.get("include_usage"):
                yield event(choices=[], usage=usage(work.result(), request.n))
            yield "data: [DONE]\n\n"
        finally:
            work.cancel()


async def while_connected(http: HTTPRequest, work: Awaitable[T]) -> T:
    """Returns the result of work. Raises: ClientDisconnect if the client leaves before, and cancels the work."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def chained(first: str, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async with contextlib.aclosing(rest):
        async for event in rest:
            yield event


async def say_error(_: HTTPRequest, error: Exception) -> Response:
    """Returns OpenAI's error object."""
    if not isinstance(error, BadRequest):
        return JSONResponse({}, status_code=408)  # which nobody reads: the client has left
    code = "context_length_exceeded" if "context length" in str(error) else None
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": error.field or None, "code": code}
    return JSONResponse({"error": body}, status_code=error.status)
