"""Limits of chat templates: they are programs of downloaded folders, which see every conversation.

Loops are stopped by the CPU time of their thread. What a single operation may allocate is checked before it is done.
"""

import contextlib
import gc
import math
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 0.25  # of CPU for a rendering: published templates take milliseconds
MAX_SIZE = 10**8  # characters or items that an operation may make
FORMATS = ("%", "format", "format_map")
GROWING = (  # operators, methods and filters whose results may be larger than all that goes in
    *FORMATS, "+", "*", "**", "batch", "center", "expandtabs", "indent", "join", "ljust", "replace", "rjust", "slice",
    "tojson", "wordwrap", "zfill",
)  # fmt: skip


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates without operations that fill the memory."""

    intercepted_binops = frozenset(GROWING)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator."""
        check_growth(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function, a macro or a method."""
        method = getattr(function, "__wrapped__", function)  # of str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            check_growth(method.__name__, owner, *args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)

    def from_string(self, source: str, *args: Any, **kwargs: Any) -> Template:
        """Compiles a template."""
        for name in GROWING:
            if name in self.filters:
                self.filters[name] = bounded(name, self.filters[name])
        self.globals.pop("lipsum", None)
        return super().from_string(source, *args, **kwargs)


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that checks its arguments."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_growth(name, *args, *kwargs.values())
        return function(*args, **kwargs)

    return checked


def check_growth(name: str, *values: Any) -> None:
    """Raises TemplateRuntimeError for an operation whose result may be larger than MAX_SIZE."""
    if name not in GROWING:
        return
    sizes = [*map(size_of, values)]
    if name in FORMATS:
        sizes += [int(width[:10]) for value in values if isinstance(value, str) for width in re.findall(r"\d+", value)]
    if (sum(sizes) if name == "+" else math.prod(sizes)) > MAX_SIZE:
        raise TemplateRuntimeError(f"{name} may make more than {MAX_SIZE:,} characters")


def size_of(value: object) -> int:
    """Returns an integer itself, else a length, with that of texts in a list."""
    if isinstance(value, int):
        return max(1, abs(value))
    if isinstance(value, (list, tuple)):
        return max(1, sum(len(item) if isinstance(item, str) else 1 for item in value))
    if isinstance(value, Sized):
        return max(1, len(value))
    return MAX_RANGE if isinstance(value, Iterable) else 1


def largest(frame: FrameType) -> int:
    """Returns the length of the longest text among the variables of a template."""
    values = [*frame.f_locals.values()]
    for space in values[:]:
        if isinstance(space, Namespace):
            values += object.__getattribute__(space, "_Namespace__attrs").values()
    return max((len(value) for value in values if isinstance(value, str)), default=0)


@contextlib.contextmanager
def limited_rendering() -> Iterator[None]:
    """Raises TimeoutError in a template that takes more than SECONDS of this thread's CPU time."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # of templates that are compiled from now on
    end = math.inf

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal end
        if time.thread_time() > end:
            raise TimeoutError(f"it takes more than {SECONDS} seconds")
        if frame.f_code.co_filename != "<template>":
            return None  # of other functions only the calls are seen
        end = min(end, time.thread_time() + SECONDS)  # from its first line on: it was compiled before
        if end - time.thread_time() < 0.98 * SECONDS and largest(frame) > MAX_SIZE:  # what it joins is not counted
            raise MemoryError(f"it makes more than {MAX_SIZE:,} characters")
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection would count as the template's time: of JAX's objects it takes as long as SECONDS
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


@contextlib.contextmanager
def limited(seconds: float, num_bytes: int) -> Iterator[None]:
    """Limits the CPU seconds (TimeoutError) and the new memory (MemoryError) of untrusted code in the block.

    In the main thread of a POSIX system; elsewhere without limits. It stops loops of Python, and allocations: so also
    single operations, which no signal interrupts, are as short as their memory is small.
    """

    def stop(*_) -> None:
        raise TimeoutError(f"it takes more than {seconds} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not Path("/proc/self/statm").exists() or threading.current_thread() is not threading.main_thread():
        yield
        return
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + num_bytes
    most = most if soft == resource.RLIM_INFINITY else min(soft, most)
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)  # again each second: Python drops errors in destructors
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
