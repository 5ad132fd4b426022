"""Sessions: which requests of a program continue which conversation, and in which row of the sampler it stands.

A request continues a conversation if its messages begin with those of the conversation and with the replies as they
were returned. Then only the rest is new. Any other request begins a conversation of its own, in another row: a fork.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from envs.agents.protocol import BadRequest, ChatRequest, Message, Sampled, read_message, reply_message
from envs.agents.server import Server
from envs.base import Dialect
from envs.scoring.patience import HURRY, Patience
from envs.scoring.worker import Failure

FULL = "the conversation is longer than the model's context length: the context length is reached"
BUDGET = "Step budget exhausted; stopping."


class Asked(NamedTuple):
    """What a row waits for: messages behind those that it has, and how its next reply ends."""

    messages: Sequence[Message]
    request: ChatRequest
    is_new: bool  # a conversation begins


class Ended(NamedTuple):
    """What a program has printed as its reward, by name; without "return" its last reply is to be graded."""

    rewards: Mapping[str, float]


@dataclass(eq=False)
class Dialogue:
    """A conversation: its row, all messages, and the request that waits for a reply."""

    row: int
    said: list[Message] = field(default_factory=list)
    tools: tuple[Mapping, ...] = ()
    asked: tuple[Message, ...] = ()  # messages of the last request
    answer: tuple[Message, Sampled] | None = None  # to it
    pending: asyncio.Future[Sampled] | None = None
    refused: str = ""  # why the last request was

    def continues(self, request: ChatRequest) -> bool:
        """True if a request continues this conversation."""
        begins = list(request.messages[: len(self.said)]) == self.said
        return begins and len(request.messages) > len(self.said) and self.tools == request.tools

    def is_asked_again(self, request: ChatRequest) -> bool:
        return self.asked == request.messages and self.tools == request.tools


@dataclass(eq=False)
class Session:
    """The conversations of one key."""

    key: str
    dialogues: list[Dialogue] = field(default_factory=list)
    num_calls: int = 0  # replies, sampled or not

    def find(self, request: ChatRequest) -> Dialogue | None:
        """Returns the conversation that a request continues, the longest one; None: it begins one."""
        found = [each for each in self.dialogues if not each.pending and each.continues(request)]
        return max(found, key=lambda each: len(each.said), default=None)

    @property
    def turns(self) -> list[Dialogue]:
        """The conversations that are the program's work: of those with tools and without, those with.

        A program that has tools writes titles and summaries without them.
        """
        return [each for each in self.dialogues if each.tools] or self.dialogues

    def find_again(self, request: ChatRequest) -> Dialogue | None:
        """Returns the conversation whose last request was the same."""
        return next((each for each in reversed(self.dialogues) if each.is_asked_again(request)), None)


RowOutcome = Asked | Ended | Failure


class Book:
    """Sessions by key, and what their rows ask for. `take_row` gives a conversation its row.

    `take`, `answer`, `deny` and `close` are called by the thread that samples; all else happens in the server's thread.
    """

    def __init__(self, server: Server, dialect: Dialect, max_calls: int = 0):
        self.server, self.dialect, self.max_calls = server, dialect, max_calls  # 0: no limit
        self.sessions: dict[str, Session] = {}
        self.waiting: dict[int, Dialogue] = {}  # by row
        self.outcomes: dict[int, RowOutcome] = {}  # by row
        self.computing: set[int] = set()  # rows whose program owes an outcome; clients of a server owe none
        self.closed: set[int] = set()  # rows that take no more
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

    def answer(self, row: int, sampled: Sampled) -> None:
        """Gives a row its reply."""
        self.server.call(self.reply, row, sampled)

    def deny(self, row: int, reason: str) -> None:
        """Refuses what a row asks."""
        self.server.call(self.refuse, row, reason)

    def close(self, rows: Sequence[int]) -> None:
        """Refuses all that is asked of these rows from now on: their context is full."""
        self.closed.update(rows)
        for row in rows:
            self.deny(row, FULL)

    # In the server's thread

    def take_row(self, session: Session) -> int:
        """Returns a row for a new conversation. Raises: BadRequest if there is none."""
        raise NotImplementedError

    def ask(self, session: Session, dialogue: Dialogue, asked: Asked) -> None:
        """Hands a request to the thread that samples."""
        if dialogue.row in self.closed:
            self.refuse(dialogue.row, FULL)
        else:
            self.publish(dialogue.row, asked)

    def publish(self, row: int, outcome: RowOutcome) -> None:
        with self.has_changed:
            self.outcomes[row] = outcome
            self.computing.discard(row)
            self.has_changed.notify_all()

    async def reply_to(self, session: Session, request: ChatRequest, is_retry: bool) -> tuple[Message, Sampled]:
        """Returns the reply to a request as a message, and its tokens. Raises: BadRequest."""
        again = session.find_again(request) if is_retry else None
        if again and again.pending:
            await asyncio.shield(again.pending)
        if again and again.answer:
            return again.answer
        if request.messages and request.messages[-1]["role"] == "assistant":
            raise BadRequest("the last message is the assistant's: add a message that it answers")
        session.num_calls += 1
        if self.max_calls and session.num_calls > self.max_calls:
            return {"role": "assistant", "content": BUDGET}, Sampled(None)
        dialogue, start = session.find(request), 0
        if dialogue is None:
            dialogue = Dialogue(self.take_row(session), tools=request.tools)
            session.dialogues.append(dialogue)
        else:
            start = len(dialogue.said)
        dialogue.asked, dialogue.answer = request.messages, None
        pending = dialogue.pending = asyncio.get_running_loop().create_future()
        self.waiting[dialogue.row] = dialogue
        self.ask(session, dialogue, Asked(request.messages[start:], request, is_new=not start))
        try:
            sampled = await pending
        finally:
            dialogue.pending = None
        if request.prompts:
            session.dialogues.remove(dialogue)
            return {}, sampled
        message = reply_message(sampled.reply, self.dialect, session.num_calls, bool(request.tools))
        dialogue.said = [*request.messages, read_message(message)]
        dialogue.answer = message, sampled
        return dialogue.answer

    def reply(self, row: int, sampled: Sampled) -> None:
        """Gives a row's reply to the request that waits for it."""
        dialogue = self.waiting.pop(row, None)
        if dialogue and dialogue.pending and not dialogue.pending.done():
            dialogue.pending.set_result(sampled)

    def refuse(self, row: int, reason: str) -> None:
        """Refuses the request that waits for a row's reply."""
        dialogue = self.waiting.pop(row, None)
        if dialogue and dialogue.pending and not dialogue.pending.done():
            dialogue.refused = reason
            dialogue.pending.set_exception(BadRequest(reason))

    def end(self, session: Session) -> None:
        """Forgets a session; its requests are refused."""
        for dialogue in session.dialogues:
            self.refuse(dialogue.row, "the session has ended")
        self.sessions.pop(session.key, None)
