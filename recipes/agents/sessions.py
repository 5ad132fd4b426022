"""Sessions: which requests of a program continue which conversation, and in which row of the sampler it stands.

A request continues a conversation if its messages begin with those of the conversation and with the replies as they
were returned, and if its other fields say the same about how messages are rendered. Then only the rest is new. Any
other request begins a conversation of its own, in another row: a fork.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from envs.base import DIALECTS, Reply
from envs.scoring.patience import HURRY, Patience
from envs.scoring.worker import Failure
from models.tokenizer import Tokenizer
from recipes.agents.protocol import (
    ChatRequest,
    Message,
    Request,
    Sampled,
    SentMessage,
    as_json,
    changes,
    chat_answer,
    chat_choice,
    chat_chunk,
    head,
    reply_message,
    usage,
)
from recipes.agents.server import JSON, BadRequest, Caller, Payload, Server
from recipes.agents.texts import joint_of_parts, token_bytes, without_hidden_names

FULL = "the conversation is longer than the model's context length: the context length is reached"
BUDGET = "Step budget exhausted; stopping."
MAX_ANSWERS = 512  # that are kept for clients that ask again
OnTokens = Callable[[Sampled], None]


@dataclass(eq=False)
class Asked:
    """What a row waits for: messages after those that it has, and how its next reply ends."""

    messages: Sequence[Message]
    request: Request
    index: int  # of the choice among those of its request
    is_new: bool  # a conversation begins
    reply: asyncio.Future[Sampled]
    on_tokens: OnTokens | None = None  # gets the reply while it is sampled
    prompt: Sequence[int] = ()  # of a completion
    distribution: object = None  # that the request names; None: the sampler's
    has_left: bool = False  # nobody waits for the reply


class Ended(NamedTuple):
    """What a program has printed as its reward, by name; without "return" its last reply is to be graded."""

    rewards: Mapping[str, float]


@dataclass(eq=False)
class Dialogue:
    """A conversation: its row, all messages, and the request that waits for a reply."""

    row: int
    fixed: str = ""  # fields of its requests that cannot change
    said: list[Message] = field(default_factory=list)
    pending: Asked | None = None
    has_replied: bool = False
    is_auxiliary: bool = False  # its program asks that it is not trained

    def continues(self, request: ChatRequest, messages: Sequence[Message]) -> bool:
        """True if a request continues this conversation, or begins it: none before had a reply."""
        is_longer = len(messages) > len(self.said) > 0
        begins_alike = is_longer and messages[: len(self.said)] == self.said
        return not self.has_replied or begins_alike and self.fixed == request.fixed


@dataclass(eq=False)
class Session:
    """The conversations of one key."""

    key: str
    dialogues: list[Dialogue] = field(default_factory=list)
    num_calls: int = 0  # replies, sampled or not
    num_refused: int = 0  # conversations for which there was no row
    refused: str = ""  # why the last request was

    def find(self, request: ChatRequest, messages: Sequence[Message]) -> Dialogue | None:
        """Returns the conversation that a request continues, the longest one; None: it begins one."""
        found = [each for each in self.dialogues if not each.pending and each.continues(request, messages)]
        return max(found, key=lambda each: len(each.said), default=None) if request.n == 1 else None


RowOutcome = Asked | Ended | Failure


class Endpoint:
    """Sessions by key, and what their rows ask for. `take_row` gives a conversation its row.

    `take`, `answer`, `deny` and `close` are called by the thread that samples; all else happens in the server's thread.
    """

    tokenizer: Tokenizer

    def __init__(self, server: Server, name: str, dialect: str, max_calls: int = 0, num_places: int = 0):
        self.server, self.name, self.dialect = server, name, DIALECTS[dialect]
        self.max_calls = max_calls  # 0: no limit
        self.queue = asyncio.Semaphore(num_places) if num_places else contextlib.nullcontext()  # first come, first
        self.sessions: dict[str, Session] = {}
        self.outcomes: dict[int, RowOutcome] = {}  # by row
        self.pending: dict[int, Asked] = {}  # by row
        self.computing: set[int] = set()  # rows whose program owes an outcome; clients of a server owe none
        self.closed: set[int] = set()  # rows that take no more
        self.answers: OrderedDict[tuple[str, str], list[asyncio.Task]] = OrderedDict()  # by key and request
        self.remarks: set[str] = set()  # that were made
        self.numbers = count(1)
        self.has_changed = threading.Condition()

    # In the thread that samples

    def take(self, rows: Set[int], num_needed: int = 0, patience: Patience = HURRY) -> dict[int, RowOutcome]:
        """Removes and returns the outcomes of these rows that are there, by row.

        It waits until there are `num_needed`, then for programs that compute while it has `patience`.
        """

        def num_come() -> int:
            return len(rows & self.outcomes.keys())

        with self.has_changed:
            self.has_changed.wait_for(lambda: num_come() >= num_needed)
            patience.wait(self.has_changed, num_come, lambda: not self.computing & rows)
            return {row: self.outcomes.pop(row) for row in sorted(rows & self.outcomes.keys())}

    def answer(self, row: int, asked: Asked, sampled: Sampled) -> None:
        """Gives a request its reply."""
        self.server.call(self.reply, asked, sampled)

    def deny(self, asked: Asked, reason: str) -> None:
        """Refuses what a row asks."""
        self.server.call(self.refuse, asked, reason)

    def close(self, rows: Sequence[int]) -> None:
        """Refuses all that is asked of these rows from now on: their context is full."""
        self.closed.update(rows)
        for row in rows:
            self.server.call(self.refuse_row, row, FULL)

    # In the server's thread

    def take_row(self, session: Session) -> int:
        """Returns a row for a new conversation. Raises: BadRequest if there is none."""
        raise NotImplementedError

    def session_of(self, caller: Caller) -> Session:
        """Returns the session of a caller's key. Raises: Denied for another key than it must have."""
        raise NotImplementedError

    def ask(self, session: Session, dialogue: Dialogue, asked: Asked) -> None:
        """Hands a request to the thread that samples."""
        dialogue.pending = self.pending[dialogue.row] = asked
        if dialogue.row in self.closed:
            self.refuse(asked, FULL)
        else:
            self.publish(dialogue.row, asked)

    def publish(self, row: int, outcome: RowOutcome) -> None:
        with self.has_changed:
            self.outcomes[row] = outcome
            self.computing.discard(row)
            self.has_changed.notify_all()

    def remark(self, text: str) -> None:
        """Says once what is dropped from requests."""
        if text not in self.remarks:
            self.remarks.add(text)
            print(text, flush=True)

    def messages_of(self, sent: Sequence[SentMessage]) -> list[Message]:
        """Returns messages as the chat template reads them."""
        joint = joint_of_parts(self.tokenizer, self.tokenizer.template)
        messages, hidden = without_hidden_names(self.tokenizer, [message.as_template(joint) for message in sent])
        for role in sorted(hidden):
            self.remark(f"the chat template shows no names of messages of the role {role}: they are left out")
        return messages

    async def replies(
        self, caller: Caller, request: Request, prompt: Sequence[int] = (), on_tokens: Callable | None = None
    ) -> list[tuple[Message, Sampled]]:
        """Returns a reply for each choice; a client that asks again gets the answer of the one equal request."""
        session = self.session_of(caller)
        key = session.key, f"{[*prompt]} {request.model_dump_json()}"
        alive = [x for x in self.answers.get(key, []) if not (x.done() and (x.cancelled() or x.exception()))]
        if caller.is_retry and len(alive) == 1:
            with contextlib.suppress(asyncio.CancelledError):
                return await asyncio.shield(alive[0])
            if not alive[0].cancelled():
                raise asyncio.CancelledError
        parts = (self.sample(session, request, index, prompt, on_tokens) for index in range(request.n))
        task = asyncio.ensure_future(asyncio.gather(*parts))
        self.answers[key] = [*alive, task][-2:]
        while len(self.answers) > MAX_ANSWERS:
            self.answers.popitem(last=False)
        return await (task if self.server.stops_work else asyncio.shield(task))

    async def sample(
        self, session: Session, request: Request, index: int, prompt: Sequence[int], on_tokens: Callable | None
    ) -> tuple[Message, Sampled]:
        """Returns a reply as a message, and its tokens. Raises: BadRequest."""
        session.num_calls += 1
        if self.max_calls and session.num_calls > self.max_calls:
            return {"role": "assistant", "content": BUDGET}, Sampled(Reply(BUDGET))
        number = session.num_calls
        async with self.queue:
            messages = [] if prompt else self.messages_of(request.messages)
            dialogue = None if prompt else session.find(request, messages)
            if dialogue is None:
                dialogue = Dialogue(self.take_row(session))
                session.dialogues.append(dialogue)
            start, dialogue.fixed = len(dialogue.said), "" if prompt else request.fixed
            dialogue.is_auxiliary |= request.metadata.get("auxiliary") == "true"
            asked = Asked(
                messages[start:],
                request,
                index,
                is_new=not start,
                reply=asyncio.get_running_loop().create_future(),
                on_tokens=on_tokens and partial(on_tokens, index),
                prompt=prompt,
                distribution=self.distribution_of(request),
            )
            try:
                self.ask(session, dialogue, asked)
                sampled = await asked.reply
                dialogue.has_replied = True
            except asyncio.CancelledError:
                asked.has_left = True
                dialogue.said, dialogue.has_replied = [], True  # the row holds part of a reply
                raise
            except BadRequest as error:
                session.refused = str(error)
                raise
            finally:
                dialogue.pending = None
        if prompt:
            session.dialogues.remove(dialogue)
            return {}, sampled
        message = reply_message(request, sampled, self.dialect, number)
        read = SentMessage.read(message).as_template("")
        dialogue.said = [*messages, read] if sampled.is_whole else []
        return message, sampled

    def distribution_of(self, request: Request) -> object:
        """Returns the distribution that a request names. Raises: BadRequest for one that cannot be sampled."""
        return None

    def reply(self, asked: Asked, sampled: Sampled) -> None:
        """Gives the reply to the request that waits for it."""
        if not asked.reply.done():
            asked.reply.set_result(sampled)

    def refuse(self, asked: Asked, reason: str) -> None:
        if not asked.reply.done():
            asked.reply.set_exception(BadRequest(reason))

    def refuse_row(self, row: int, reason: str) -> None:
        if row in self.pending:
            self.refuse(self.pending[row], reason)

    def end(self, session: Session) -> None:
        """Forgets a session; its requests are refused."""
        for dialogue in session.dialogues:
            self.refuse_row(dialogue.row, "the session has ended")
        self.sessions.pop(session.key, None)

    # Paths

    async def models(self, _: JSON, caller: Caller) -> Payload:
        self.session_of(caller)
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "lmpo", "max_model_len": self.context}
        return {"object": "list", "data": [card]}

    async def chat(self, body: JSON, caller: Caller) -> Payload:
        self.session_of(caller)
        request = ChatRequest.read(body)
        if request.tool_choice == "required":
            self.remark("tool_choice required is read as auto: no call is forced")
        if any(tool.function.strict for tool in request.tools):
            self.remark("strict of tools is left out: arguments are not held to their schema")
        fields = head(self.name, f"chatcmpl-{next(self.numbers)}")
        if request.stream:
            return self.stream_chat(request, caller, fields)
        said, sampled = zip(*await self.with_top(request, await self.replies(caller, request)), strict=True)
        return as_json(chat_answer(request, said, sampled, partial(token_bytes, self.tokenizer), fields))

    async def with_top(self, request: Request, replies: list) -> list:
        """Returns replies with the likeliest candidates of each token, if the request asks for them."""
        if request.num_top > 0:
            raise BadRequest("top_logprobs needs recipes/agents/serve.py: leave it out", "top_logprobs")
        return replies

    async def stream_chat(self, request: ChatRequest, caller: Caller, fields: Mapping[str, JSON]) -> AsyncIterator[str]:
        """Yields a chat as the events of a stream, while its tokens come."""
        sent: list[Message] = [{} for _ in range(request.n)]

        def event(index: int, message: Message, **more: JSON) -> str:
            delta, sent[index] = changes(sent[index], message), message
            return sse(chat_chunk(fields, [{"index": index, "delta": delta, "finish_reason": None, **more}]))

        answers = []
        async for found in self.stream(request, caller, (), answers):
            index, sampled = found
            message = reply_message(request, sampled, self.dialect, 0, is_partial=True)
            if message["content"] or message.get("reasoning_content"):
                yield event(index, message)
        replies = await self.with_top(request, answers)
        for index, (message, sampled) in enumerate(replies):
            more = chat_choice(request, message, sampled, partial(token_bytes, self.tokenizer))
            yield event(index, message, **more)
        if request.stream_options.include_usage:
            yield sse(chat_chunk(fields, [], usage([sampled for _, sampled in replies], request.n)))
        yield "data: [DONE]\n\n"

    async def stream(
        self, request: Request, caller: Caller, prompt: Sequence[int], answers: list
    ) -> AsyncIterator[tuple[int, Sampled]]:
        """Yields the beginnings of replies as their tokens come, and appends the replies to `answers`."""
        come: asyncio.Queue[tuple[int, Sampled] | None] = asyncio.Queue()

        def on_tokens(index: int, sampled: Sampled) -> None:
            come.put_nowait((index, sampled))

        task = asyncio.ensure_future(self.replies(caller, request, prompt, on_tokens))
        task.add_done_callback(lambda _: come.put_nowait(None))
        try:
            while found := await come.get():
                yield found
            answers += await task
        finally:
            task.cancel()


def sse(answer: object) -> str:
    """Returns an event of a stream."""
    return f"data: {as_json(answer)}\n\n"
