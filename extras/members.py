"""Samples completions of several policies over one base in one batch, each row with the adapters of its member.

Each member's loop runs in a thread of its own. A call of its sampler waits until all members that still run have called
theirs. Then one thread samples all requests, and each member gets its own rows. The samples equal a single run's, since
keys are made from the member's own.

B = N G rows, as in core/sampler.py.
"""

import contextlib
import io
import sys
import threading
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import partial
from threading import Lock

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt32

from core.records import Completions
from core.sampler import Sampler, Segment
from models.names import LAYERS, LORA_A, LORA_B, MEMBERS, Array, LayerParams, Weights
from utils.batching import select_rows
from utils.runs.shutdown import Signals, Stop


@dataclass(frozen=True)
class MemberSampler(Sampler):
    """The sampler of a member, which samples together with the other members' samplers."""

    member: str = ""
    signals: Signals | None = None  # of the member's run
    shared: "SharedSampler | None" = None

    def draw(
        self,
        weights: Weights,
        prompts: Sequence[list[int]],
        keys: UInt32[np.ndarray, "B 2"],
    ) -> Completions:
        """Samples a completion for each key: see `Sampler.draw`."""
        return self.shared.draw(Request(self, weights, prompts, keys))

    def alone(self) -> Sampler:
        """Returns a sampler with the same settings that does not wait for other members, and calls no hook."""
        return Sampler(**settings_of(self) | {"on_segment": None})


def settings_of(sampler: Sampler) -> dict[str, object]:
    """Returns the fields that every sampler has, by name."""
    return {setting.name: getattr(sampler, setting.name) for setting in fields(Sampler)}


@dataclass(frozen=True, eq=False)
class Request:
    """Completions that a member waits for."""

    sampler: MemberSampler
    weights: Weights
    prompts: Sequence[list[int]]
    keys: UInt32[np.ndarray, "B 2"]
    reply: Future[Completions] = field(default_factory=Future)

    @property
    def is_stopped(self) -> bool:
        """True if the member's run is asked to end, and may end at this moment."""
        return self.sampler.signals.may_raise and self.sampler.signals.received is not None

    def on_segment(self, segment: Segment, first_row: int) -> None:
        """Takes rows of a batch, from number `first_row` of this request on; it may include rows of other members."""
        rows = slice(max(0, -first_row), max(0, len(self.keys) - first_row))
        tokens, lengths = segment.tokens[rows], segment.lengths[rows]
        if self.sampler.on_segment and len(tokens):
            self.sampler.on_segment(Segment(max(0, first_row), tokens, segment.num_sampled, lengths))


class SharedSampler:
    """Brings the requests of all members together."""

    def __init__(self, members: Sequence[str]):
        self.members = members
        self.lock = Lock()
        self.running = set(members)
        self.requests: dict[str, Request] = {}  # by member: requests that wait until the others have made theirs
        self.weights: dict[str, Weights] = {}  # latest weights of each member; all are joined: shapes do not change

    def draw(self, request: Request) -> Completions:
        """Returns the completions of a request. Raises: Stop, and the error of its batch."""
        with self.lock:
            self.requests[request.sampler.member] = request
            self.weights[request.sampler.member] = request.weights
            requests = self.take_requests()
        self.draw_all(requests)
        return request.reply.result()

    def leave(self, member: str) -> None:
        """Removes a member: the others wait for it no longer."""
        with self.lock:
            self.running.discard(member)
            requests = self.take_requests()
        self.draw_all(requests)

    def stop(self) -> None:
        """Ends the waiting of members whose runs are asked to end, and may end at this moment."""
        with self.lock:
            stopped = [request for request in self.requests.values() if request.is_stopped]
            for request in stopped:
                del self.requests[request.sampler.member]
                request.reply.set_exception(Stop())

    def take_requests(self) -> list[Request]:
        """Removes and returns all requests, in the order of the members, if all running members have made theirs."""
        if self.requests.keys() < self.running:
            return []
        requests = [self.requests[member] for member in self.members if member in self.requests]
        self.requests = {}
        return requests

    def draw_all(self, requests: Sequence[Request]) -> None:
        """Samples requests with equal settings together, and different ones one after the other."""
        batches: dict[tuple[Sampler, int], list[Request]] = {}
        for request in requests:
            settings = request.sampler.alone(), len(request.keys) // len(request.prompts)
            batches.setdefault(settings, []).append(request)
        for (sampler, num_samples), batch in batches.items():
            try:
                self.draw_batch(sampler, num_samples, batch)
            except BaseException as error:  # noqa: BLE001 (raised again by each member)
                for request in batch:
                    if not request.reply.done():
                        request.reply.set_exception(error)

    def draw_batch(self, sampler: Sampler, num_samples: int, batch: Sequence[Request]) -> None:
        """Samples these requests, and hands each its completions."""
        prompts = [prompt for request in batch for prompt in request.prompts]
        keys = np.concatenate([request.keys for request in batch])
        starts = np.cumsum([0, *(len(request.keys) for request in batch)]).tolist()
        weights, members = self.join_weights(batch)
        sampler = replace(sampler, on_segment=partial(self.on_segment, batch, starts))
        if members is not None:
            sampler = replace(sampler, weights_of=lambda weights, rows: with_members(weights, members[rows]))
        completions = sampler.draw(weights, prompts, keys)
        for request, start in zip(batch, starts[:-1], strict=True):
            rows = np.arange(start, start + len(request.keys))
            width = int(completions.lengths[rows].max())
            request.reply.set_result(select_rows(completions, rows, width))

    def join_weights(self, batch: Sequence[Request]) -> tuple[Weights, Int[np.ndarray, "B"] | None]:
        """Returns the weights of a batch, and the member of each row: of one request its own weights, and None."""
        if len(batch) == 1:
            return batch[0].weights, None
        names = [member for member in self.members if member in self.weights]
        numbers = [names.index(request.sampler.member) for request in batch]
        num_rows = [len(request.keys) for request in batch]
        return join_members([self.weights[name] for name in names]), np.repeat(numbers, num_rows)

    def on_segment(self, batch: Sequence[Request], starts: Sequence[int], segment: Segment) -> None:
        """Hands each member its rows of a segment. Raises: Stop if all runs of the batch are asked to end, and may."""
        if all(request.is_stopped for request in batch):
            raise Stop
        for request, start in zip(batch, starts, strict=False):
            request.on_segment(segment, segment.first_row - start)


def join_members(members: Sequence[Weights]) -> Weights:
    """Returns weights over the base of these ones, their adapters joined along the rank; the base is not copied.

    Each row uses only its member's ranks: see `with_members`.
    """
    first = members[0]
    layers = zip(*(weights[LAYERS] for weights in members), strict=True)
    layers = [layer[0] | join_adapters(layer) for layer in layers]
    rank = next(x.shape[0] for layer in first[LAYERS] for name, x in layer.items() if name.endswith(LORA_A))
    return first | {LAYERS: layers, MEMBERS: jnp.repeat(jnp.arange(len(members)), rank)}


def join_adapters(members: Sequence[LayerParams]) -> LayerParams:
    """Returns A [k r, in] and B [k r, out] of a layer, joined from k members."""
    names = [name for name in members[0] if name.endswith((LORA_A, LORA_B))]
    return {name: jnp.concatenate([layer[name] for layer in members]) for name in names}


def with_members(weights: Weights, members: Int[Array, "B"] | None) -> Weights:
    """Returns weights for rows of these members: other members' ranks count as 0. None: the weights as they are."""
    if members is None:
        return weights
    is_own = members[:, None] == weights[MEMBERS]
    return weights | {LAYERS: [layer | {MEMBERS: is_own} for layer in weights[LAYERS]]}


class LabeledOutput(io.TextIOBase):
    """Writes whole lines of threads, each behind the name of its thread if that is one of `names`.

    It is no terminal, so that nothing is drawn or colored, and has no descriptor.
    """

    def __init__(self, stream: io.TextIOBase, names: Container[str]):
        self.stream, self.names = stream, names
        self.pending = threading.local()  # a thread's line that has not ended

    @property
    def encoding(self) -> str | None:
        return self.stream.encoding

    def write(self, text: str) -> int:
        """Writes the lines that end in a text, in one piece."""
        name = threading.current_thread().name
        label = f"[{name}] " if name in self.names else ""
        *lines, self.pending.text = (getattr(self.pending, "text", "") + text).split("\n")
        self.stream.write("".join(f"{label}{line}\n" for line in lines))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


@contextlib.contextmanager
def labeled_output(names: Container[str]) -> Iterator[None]:
    """Labels the lines of threads with these names inside: see LabeledOutput."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(LabeledOutput(sys.stdout, names)))
        stack.enter_context(contextlib.redirect_stderr(LabeledOutput(sys.stderr, names)))
        yield
