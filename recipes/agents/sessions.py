"""Which requests of a client continue which conversation, and in which row of the sampler it stands.

A request continues a conversation if its messages begin with those of the conversation and with the replies as they
were returned, and if its other fields say the same about how messages are rendered. Then only the rest is new. Any
other request begins a conversation of its own, in another row: a fork.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from envs.base import DIALECTS, Reply
from envs.scoring.scorer import NO_WAIT, WaitForMore
from envs.scoring.worker import Failure
from models.tokenizer import Tokenizer
from recipes.agents.protocol import (
    ChatRequest,
    Message,
    Request,
    Sampled,
    changes,
    chat_logprobs,
    reply_message,
    settled,
    template_message,
    text_logprobs,
    usage,
)
from recipes.agents.server import JSON, Answer, BadRequest, Caller, Server
from recipes.agents.texts import joint_of_parts, texts_of, token_bytes

FULL = "the conversation is longer than the model's context length: the context length is reached"
BUDGET = "Step budget exhausted; stopping."
MAX_ANSWERS = 512  # that are kept for clients that ask again
OnTokens = Callable[..., None] | None


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
    has_replied: bool = False
    is_auxiliary: bool = False  # its program asks that it is not trained

    def continues(self, request: Request, messages: Sequence[Message]) -> bool:
        """True if a request continues this conversation, or begins it: none before had a reply."""
        begins_alike = len(messages) > len(self.said) > 0 and messages[: len(self.said)] == self.said
        return not self.has_replied or begins_alike and self.fixed == request.fixed


Rewards = Mapping[str, float]  # that a program has printed; without "return" its last reply is to be graded
RowOutcome = Asked | Rewards | Failure


class Endpoint:
    """Conversations of sessions, and what their rows ask for. `take_row` gives a conversation its row.

    `take`, `answer` and `close` are called by the thread that samples; all else happens in the server's thread.
    """

    tokenizer: Tokenizer

    def __init__(self, server: Server, name: str, dialect: str, max_calls: int = 0, num_places: int = 0):
        self.server, self.name, self.dialect = server, name, DIALECTS[dialect]
        self.max_calls = max_calls  # 0: no limit
        self.queue = asyncio.Semaphore(num_places) if num_places else contextlib.nullcontext()  # first come, first
        self.dialogues: dict[int, Dialogue] = {}  # by row, the last used one last
        self.outcomes: dict[int, RowOutcome] = {}  # by row
        self.pending: dict[int, Asked] = {}  # by row
        self.computing: set[int] = set()  # rows whose program owes an outcome; clients of a server owe none
        self.closed: set[int] = set()  # rows that take no more
        self.answers: OrderedDict[tuple[str, str], list[asyncio.Future]] = OrderedDict()  # by key and request
        self.numbers = count(1)
        self.has_changed = threading.Condition()

    # In the thread that samples

    def take(self, rows: Set[int], num_needed: int = 0, more: WaitForMore = NO_WAIT) -> dict[int, RowOutcome]:
        """Removes and returns the outcomes of these rows that are there, by row.

        It waits until there are `num_needed`, then for programs that compute as long as `more` says.
        """

        def num_come() -> int:
            return len(rows & self.outcomes.keys())

        with self.has_changed:
            self.has_changed.wait_for(lambda: num_come() >= num_needed)
            more.wait(self.has_changed, num_come, lambda: not self.computing & rows)
            return {row: self.outcomes.pop(row) for row in sorted(rows & self.outcomes.keys())}

    def answer(self, row: int, asked: Asked, outcome: Sampled | BadRequest) -> None:
        """Gives a request its reply, or refuses it."""
        self.server.call(self.settle, asked, outcome)

    def close(self, rows: Sequence[int]) -> None:
        """Refuses all that is asked of these rows from now on: their context is full."""
        self.closed.update(rows)
        self.server.call(self.refuse, rows, FULL)

    # In the server's thread

    def take_row(self, session: Session) -> int:
        """Returns a row for a new conversation. Raises: BadRequest if there is none."""
        raise NotImplementedError

    def session_of(self, caller: Caller) -> Session:
        """Returns the session of a caller's key. Raises: BadRequest for another key than it must have."""
        raise NotImplementedError

    def distribution_of(self, request: Request) -> object:
        """Returns the distribution that a request names. Raises: BadRequest for one that cannot be sampled."""
        if request.num_top > 0:
            raise BadRequest("top_logprobs needs recipes/agents/serve.py: leave it out", "top_logprobs")

    async def with_top(self, request: Request, sampled: Sampled) -> Sampled:
        """Returns a reply with the likeliest candidates of each token, if the request asks for them."""
        return sampled

    def ask(self, dialogue: Dialogue, asked: Asked) -> None:
        """Hands a request to the thread that samples."""
        self.pending[dialogue.row] = asked
        if dialogue.row in self.closed:
            self.settle(asked, BadRequest(FULL))
        else:
            self.publish(dialogue.row, asked)

    def publish(self, row: int, outcome: RowOutcome) -> None:
        with self.has_changed:
            self.outcomes[row] = outcome
            self.computing.discard(row)
            self.has_changed.notify_all()

    def settle(self, asked: Asked, outcome: Sampled | BadRequest) -> None:
        """Ends the wait of a request, unless its client has left."""
        if not asked.reply.done():
            (asked.reply.set_exception if isinstance(outcome, BadRequest) else asked.reply.set_result)(outcome)

    def refuse(self, rows: Sequence[int], reason: str) -> None:
        for row in self.pending.keys() & {*rows}:
            self.settle(self.pending[row], BadRequest(reason))

    def find(self, session: Session, request: Request, messages: Sequence[Message]) -> Dialogue:
        """Returns the conversation that a request continues, the longest one, or a new one."""
        own = [x for x in self.dialogues.values() if x.session.key == session.key and x.row not in self.pending]
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
            messages = [] if prompt else [template_message(message, joint) for message in request.messages]
            dialogue = self.find(session, request, messages)
            asked = Asked(
                messages[len(dialogue.said) :], request, index, is_new=not dialogue.said, on_tokens=on_tokens,
                prompt=prompt, distribution=distribution, reply=asyncio.get_running_loop().create_future(),
            )  # fmt: skip
            dialogue.is_auxiliary |= request.metadata.get("auxiliary") == "true"
            sampled = await self.reply_to(dialogue, asked)
            if prompt:
                del self.dialogues[dialogue.row]  # nothing continues it
            else:
                message = template_message(reply_message(request, sampled, self.dialect), "")
                dialogue.said = [*messages, message] if sampled.is_whole else []
                dialogue.fixed = request.fixed
        return sampled

    async def reply_to(self, dialogue: Dialogue, asked: Asked) -> Sampled:
        """Waits for a reply in the row of a conversation. Raises: BadRequest."""
        self.dialogues[dialogue.row] = self.dialogues.pop(dialogue.row)  # the last used one
        self.ask(dialogue, asked)
        try:
            sampled = await asked.reply
            dialogue.has_replied = True
            return sampled
        except asyncio.CancelledError:
            asked.has_left = dialogue.has_replied = True
            dialogue.said = []  # the row holds part of a reply
            raise
        except BadRequest as error:
            dialogue.session.refused = str(error)
            raise
        finally:
            if self.pending.get(dialogue.row) is asked:  # another rollout may have the row by now
                del self.pending[dialogue.row]

    async def samples(
        self, caller: Caller, request: Request, prompts: Sequence[Sequence[int]] = ((),), on_tokens: OnTokens = None
    ) -> Sequence[Sampled]:
        """Returns n replies for each prompt; a client that asks again gets the answer of the one equal request."""
        session = self.session_of(caller)
        key = session.key, f"{prompts} {request.model_dump_json()}"
        known = [x for x in self.answers.get(key, []) if not (x.done() and (x.cancelled() or x.exception()))]
        if caller.is_retry and len(known) == 1:
            await asyncio.wait(known)
            if not known[0].cancelled():
                return known[0].result()
        numbered = enumerate((prompt, index) for prompt in prompts for index in range(request.n))
        tells = [(prompt, index, on_tokens and partial(on_tokens, place)) for place, (prompt, index) in numbered]
        work = asyncio.gather(*[self.sample(session, request, *each) for each in tells])
        self.answers[key] = [*known, work][-2:]
        if len(self.answers) > MAX_ANSWERS:
            self.answers.popitem(last=False)
        return await (work if self.server.stops_work else asyncio.shield(work))

    async def states(
        self, request: Request, prompts: Sequence[Sequence[int]], caller: Caller
    ) -> AsyncIterator[tuple[int, Sampled, bool]]:
        """Yields each reply with its index: the beginnings of one that is streamed, and the whole one, True."""
        grown: asyncio.Queue[tuple[int, Sampled] | None] = asyncio.Queue()

        def on_tokens(place: int, sampled: Sampled) -> None:
            grown.put_nowait((place, sampled))

        work = asyncio.ensure_future(self.samples(caller, request, prompts, on_tokens if request.stream else None))
        work.add_done_callback(lambda _: grown.put_nowait(None))
        try:
            while found := await grown.get():
                yield *found, False
            for place, sampled in enumerate(await work):
                yield place, await self.with_top(request, sampled), True
        finally:
            work.cancel()

    # Paths

    async def models(self, _: JSON, caller: Caller) -> JSON:
        self.session_of(caller)
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "lmpo", "max_model_len": self.context}
        return {"object": "list", "data": [card]}

    async def chat(self, body: JSON, caller: Caller) -> Answer:
        self.session_of(caller)
        return await self.respond(ChatRequest.read(body), [()], caller)

    async def respond(self, request: Request, prompts: Sequence[Sequence[int]], caller: Caller) -> Answer:
        """Returns the answer to a request, or the events of its stream."""
        head = {request.id_name: f"lmpo-{next(self.numbers)}", "created": int(time.time()), "model": self.name}
        if request.stream:
            return self.events(request, prompts, caller, head)
        replies = [sampled async for _, sampled, is_whole in self.states(request, prompts, caller) if is_whole]
        choices = [{"index": index, **self.choice(request, sampled)} for index, sampled in enumerate(replies)]
        ids = {"prompt_token_ids": list(replies[0].prompt_ids)} if request.return_token_ids else {}
        return head | {"object": request.object, "choices": choices, "usage": usage(replies, request.n)} | ids

    async def events(
        self, request: Request, prompts: Sequence[Sequence[int]], caller: Caller, head: Mapping[str, JSON]
    ) -> AsyncIterator[str]:
        """Yields the events of a stream: what each choice has more than before, and usage at the end."""
        sent: list[dict[str, JSON]] = [{} for _ in range(request.n * len(prompts))]
        head, replies = {**head, "object": request.chunk_object}, []

        def event(**fields: JSON) -> str:
            return f"data: {json.dumps(head | fields)}\n\n"

        async for index, sampled, is_whole in self.states(request, prompts, caller):
            choice = self.choice(request, sampled, is_partial=not is_whole)
            if delta := changes(sent[index], choice):
                yield event(choices=[{"index": index, **delta}], usage=None)
                sent[index] = choice
            replies += [sampled] * is_whole
        if request.stream_options.get("include_usage"):
            yield event(choices=[], usage=usage(replies, request.n))
        yield "data: [DONE]\n\n"

    def choice(self, request: Request, sampled: Sampled, is_partial: bool = False) -> dict[str, JSON]:
        """Returns a choice of an answer, or its beginning, as its path renders it."""
        bytes_of, choice, logprobs = partial(token_bytes, self.tokenizer), {}, None
        has_logprobs = request.num_top >= 0 and not is_partial
        if request.object == "text_completion":
            prompt = self.tokenizer.decode(sampled.prompt_ids) if request.echo else ""
            text = request.before_stop(sampled.reply.text)
            choice["text"] = prompt + (settled(text, request.stop) if is_partial else text)
            if has_logprobs:
                ids = [*sampled.prompt_ids, *sampled.ids] if request.echo else sampled.ids
                logprobs = text_logprobs(request, sampled, texts_of(self.tokenizer, ids, choice["text"]), bytes_of)
        else:
            if request.object == "chat.completion":
                choice["message"] = reply_message(request, sampled, self.dialect, is_partial)
            logprobs = chat_logprobs(sampled, request.num_top, bytes_of) if has_logprobs else None
        has_calls = bool(choice.get("message", {}).get("tool_calls"))
        reason = "length" if sampled.is_truncated else "tool_calls" if has_calls else "stop"
        choice |= {"logprobs": logprobs, "finish_reason": None if is_partial else reason}
        if request.return_token_ids and not is_partial:
            choice |= {"token_ids": list(sampled.ids), "prompt_token_ids": list(sampled.prompt_ids)}
        return choice
