"""Reads optimized HLO, the text of a compiled program: its loops, its collectives, its traffic with memory.

A program of several slices of TPUs names groups within one slice; what crosses slices are its sends.

A line is an instruction: `%name = results op(%operands), attributes`. Space 1 and up in the layout of an array,
`S(1)`, is on the chip (VMEM of a TPU); everything else is in the device's memory (HBM).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

ITEMSIZE = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4,
    "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant"}  # instructions that move no data
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
SLICES = ("dynamic-slice", "gather", "slice")  # they read as much of their first operand as they return
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # written over their first operand: which operand is new
# "\n}" alone is in attributes; a TPU's threads stand behind the bracket.
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)\n\}(?:, [^\n]*)?$", re.S | re.M)
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # sizes, and an order of these axes


class Buffer(NamedTuple):
    """An array among the results of an instruction."""

    elements: int
    num_bytes: int
    is_in_memory: bool


class Instruction(NamedTuple):
    """A line of optimized HLO."""

    name: str
    op: str
    operands: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    line: str

    @property
    def elements(self) -> int:
        """Elements of the largest result."""
        return max((buffer.elements for buffer in self.buffers), default=0)

    @property
    def elements_in_memory(self) -> int:
        """Elements of the largest result that is written to the device's memory, not to that of the chip."""
        results = self.buffers[:1] if self.op == "copy-start" else self.buffers  # the others are its operand
        return max((buffer.elements for buffer in results if buffer.is_in_memory), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all results."""
        return sum(buffer.num_bytes for buffer in self.buffers)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the results that are in the device's memory."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.is_in_memory)

    @property
    def calls(self) -> str:
        """Name of the computation that it runs; empty: none."""
        return attribute(self.line, "calls|to_apply")


Computations = dict[str, list[Instruction]]


def attribute(line: str, names: str) -> str:
    """Returns the computation that an attribute names; empty: there is no such attribute."""
    match = re.search(rf"(?:{names})=%?([\w.\-]+)", line)
    return match[1] if match else ""


def computations(hlo: str) -> Computations:
    """Returns the instructions of each computation, by its name."""
    parsed = {}
    for name, body in COMPUTATION.findall(hlo):
        lines = map(read_instruction, body.splitlines())
        parsed[name] = [line for line in lines if line]
    return parsed


def read_instruction(line: str) -> Instruction | None:
    """Returns the instruction of a line; None: it holds none."""
    match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
    if not match:
        return None
    rest = line[match.end() :]
    results, call = split_at(rest, " ")
    op, _, rest = call.partition("(")
    arguments, _ = split_at(rest, ")")
    operands = re.findall(r"%([\w.\-]+)", arguments)
    return Instruction(match[1], op, tuple(operands), read_buffers(results), line.strip())


def split_at(text: str, letter: str) -> tuple[str, str]:
    """Returns what is before and behind the first such letter that is in no brackets."""
    depth = 0
    for i, x in enumerate(text):
        if x == letter and depth == 0:
            return text[:i], text[i + 1 :]
        depth += x in "([{"
        depth -= x in ")]}"
    return text, ""


def read_buffers(results: str) -> tuple[Buffer, ...]:
    """Returns the arrays in the type of an instruction's results."""
    buffers = []
    for dtype, dims, layout in ARRAY.findall(results):
        elements = math.prod(int(size) for size in dims.split(",") if size)
        is_in_memory = not re.search(r"S\([1-9]", layout)
        buffers.append(Buffer(elements, elements * ITEMSIZE.get(dtype, 0), is_in_memory))
    return tuple(buffers)


def loop_bodies(hlo: str) -> Computations:
    """Returns the computations that while loops repeat, by name."""
    parsed = computations(hlo)
    names = dict.fromkeys(re.findall(r"body=%?([\w.\-]+)", hlo))
    return {name: parsed[name] for name in names}


def step_kernels(hlo: str) -> int:
    """Returns the instructions in the longest loop of a program, a decode segment's step: on a GPU its kernels."""
    bodies = loop_bodies(hlo).values()
    return max(sum(line.op not in FREE and not line.op.endswith("-done") for line in body) for body in bodies)


def large_moves(hlo: str, num_elements: int) -> list[str]:
    """Returns what each iteration of a loop writes in pieces of at least `num_elements`: all but updates in place."""
    parsed = computations(hlo)
    moves = []

    def is_update(instruction: Instruction) -> bool:
        if instruction.op in ("fusion", "call"):
            inner = [line for line in parsed[instruction.calls] if line.elements_in_memory >= num_elements]
            return all(is_update(line) for line in inner if line.op not in FREE)
        return instruction.op in UPDATES

    for name, body in loop_bodies(hlo).items():
        for line in body:
            is_large = line.elements_in_memory >= num_elements and line.op not in {*FREE, "while"}
            if is_large and not is_update(line):
                moves.append(f"{name}: {line.line[:160]}")
    return moves


def collectives(hlo: str) -> list[Instruction]:
    """Returns what devices send each other in each iteration of a loop."""
    lines = (line for body in loop_bodies(hlo).values() for line in body)
    return [line for line in lines if line.op.startswith(COLLECTIVES) and not line.op.endswith("-done")]


class Transfer(NamedTuple):
    """A collective of a program."""

    kind: str
    times: int  # that it runs
    num_bytes: float  # that one device sends each time, as rings move them
    groups: tuple[tuple[int, ...], ...]  # devices that send each other, by their places in the mesh

    @property
    def sent(self) -> float:
        """Bytes that one device sends."""
        return self.times * self.num_bytes

    def crossing(self, slices: Sequence[int]) -> float:
        """Returns the bytes that one device sends to other slices, on average; `slices`: that of each device.

        A ring leaves each of its slices once.
        """
        num_borders = 0
        for group in self.groups:
            num_joined = len({slices[device] for device in group})
            num_borders += num_joined if num_joined > 1 else 0
        return self.sent * num_borders / len(slices)


def transfers(hlo: str, slices: Sequence[int]) -> list[Transfer]:
    """Returns the collectives of a program; those in a loop run as often as it does. `slices`: that of each device."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)[1]
    found = {}
    for key, transfer in transfers_of(computations(hlo), entry, slices):
        found.setdefault(key, transfer)
    return list(found.values())


def transfers_of(parsed: Computations, name: str, slices: Sequence[int]) -> Iterator[tuple[str, Transfer]]:
    """Yields the collectives of one run of a computation, each with its name.

    XLA for TPUs cuts an asynchronous one into a chain of fusions, all of which hold it: they give it one name. And it
    writes some reduce-scatters as a fusion of an all-reduce and a slice.
    """
    sources = {line.name: line for line in parsed[name]}
    for line in parsed[name]:
        kind = collective_kind(line)
        if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        if kind:
            num_bytes = sum(sources[operand].num_bytes for operand in line.operands)
            groups = transfer_groups(line, slices)
            chain = re.search(r'chain_id="\d+"', line.line)
            sent = ring_bytes(kind, num_bytes, len(groups[0]))
            yield chain[0] if chain else line.name, Transfer(kind, 1, sent, groups)
        elif line.op in ("while", "conditional", "call", "fusion", "async-start"):
            times = num_trips(parsed, line)
            for body in called(line):
                for key, transfer in transfers_of(parsed, body, slices):
                    yield key, transfer._replace(times=times * transfer.times)


def collective_kind(line: Instruction) -> str:
    """Returns the kind of a collective; empty: it is none, or the end of one that has begun."""
    kind = line.op.removesuffix("-start")
    if line.op == "send":
        megascale = re.search(r'megascale_transfer_type="(\w+)"', line.line)
        kind = megascale[1].lower().replace("_", "-") if megascale else ""
    return kind if kind in COLLECTIVES else ""


def ring_bytes(kind: str, num_bytes: int, group_size: int) -> float:
    """Returns the bytes that a ring moves out of one device, which gives `num_bytes` to a collective."""
    if kind == "collective-permute":
        return num_bytes
    factor = {"all-gather": group_size, "all-reduce": 2}.get(kind, 1)
    return factor * num_bytes * (group_size - 1) / group_size


def transfer_groups(line: Instruction, slices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the devices that a collective joins: as a list, as an iota or as axes of a mesh."""
    if line.op == "send":  # to the same place of other slices
        places = np.arange(len(slices)).reshape(len(set(slices)), -1)
        return tuple(map(tuple, places.T.tolist()))
    text = line.line
    if match := re.search(rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({IOTA}\))? \{{(.*?)\}}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        joined = re.findall(r"'(\w+)'", match[4])
        places = iota(match[2], match[3]) if match[2] else np.arange(math.prod(sizes.values()))
        return groups_of_axes(places, sizes, joined)
    if match := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={IOTA}", text):
        places = iota(match[3], match[4])
        return tuple(map(tuple, places.reshape(int(match[1]), int(match[2])).tolist()))
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text)
    return tuple(map(tuple, map(numbers, re.findall(r"\{([\d,]*)\}", listed[1]))))


def iota(sizes: str, order: str | None) -> Int[np.ndarray, "..."]:
    """Returns the numbers from 0 in an array of these sizes, its axes in another order if one is given."""
    places = np.arange(math.prod(numbers(sizes))).reshape(numbers(sizes))
    return places.transpose(numbers(order)) if order else places


def groups_of_axes(
    places: Int[np.ndarray, "..."], sizes: Mapping[str, int], joined: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """Returns the places of a mesh of these sizes that differ along the joined axes only."""
    places = places.reshape(list(sizes.values()))
    axes = [list(sizes).index(axis) for axis in joined]
    groups = np.moveaxis(places, axes, range(len(axes))).reshape(math.prod(sizes[axis] for axis in joined), -1)
    return tuple(map(tuple, groups.T.tolist()))


def numbers(text: str) -> list[int]:
    """Returns the numbers between commas."""
    return [int(number) for number in text.split(",")]


def fsdp_minimum(num_parameters: int, mesh: Mapping[str, int], itemsize: int) -> float:
    """Returns the bytes that a device must send in a micro-batch.

    Parameters, in the type of the products, go to all devices for both passes, float32 gradients to their owners, and
    these are summed over copies.
    """
    copies, cut = mesh["data"], mesh["fsdp"]
    num_parameters /= mesh["tp"]
    gathered = (2 * itemsize + 4) * num_parameters * (cut - 1) / cut
    return gathered + 2 * 4 * num_parameters / cut * (copies - 1) / copies


class Traffic(NamedTuple):
    """Bytes that one run of a computation reads from and writes to the device's memory."""

    read: dict[str, int]  # by operand
    written: int

    @property
    def num_bytes(self) -> int:
        return sum(self.read.values()) + self.written


def loop_traffic(hlo: str, cache: int = 0) -> dict[str, Traffic]:
    """Returns the traffic of one iteration of each loop, by the name of its body.

    Arrays that an iteration makes for itself do not leave a cache of so many bytes (of a GPU) that they fit into.
    """
    parsed = computations(hlo)
    return {name: traffic(parsed, name, cache) for name in loop_bodies(hlo)}


def traffic(parsed: Computations, name: str, cache: int = 0) -> Traffic:
    """Returns the traffic of one run of a computation, with that of the loops in it.

    What a kernel (custom-call) is given counts as read once, though it may be several of its operands. Slices count as
    much as they return.
    """
    sources = {line.name: line for line in parsed[name]}
    cached = {line.name for line in parsed[name] if is_cached(parsed, name, line, cache)}
    read, written = {}, 0

    def add(part: dict[str, int], times: int = 1) -> None:
        for operand, num_bytes in part.items():
            read[operand] = read.get(operand, 0) + times * num_bytes

    for line in parsed[name]:
        if line.op in FREE or line.op.endswith("-done"):
            continue
        if line.op in ("while", "conditional", "call"):
            parts = [traffic(parsed, body, cache) for body in called(line)]
            largest = max(parts, key=lambda part: part.num_bytes)
            trips = num_trips(parsed, line)
            add(largest.read, trips)
            written += trips * largest.written
        elif line.op in ("copy-start", "slice-start"):
            source, copied = sources[line.operands[0]], async_result(line)
            add({source.name: copied.num_bytes * (source.memory_bytes > 0)})
            written += copied.num_bytes * copied.is_in_memory
        else:
            operands = dict.fromkeys(line.operands) if line.op == "custom-call" else line.operands
            for i, operand in enumerate(operands):
                whole = sources[operand].memory_bytes if operand not in cached else 0
                add({operand: bytes_used(parsed, name, line, i, whole)})
            if line.name not in cached:
                written += bytes_written(parsed, name, line, line.memory_bytes)
    return Traffic(read, written)


def is_cached(parsed: Computations, name: str, line: Instruction, cache: int) -> bool:
    """True if an array is made in this computation, not written over another one, and fits into the cache."""
    while line.op in ("bitcast", "get-tuple-element"):
        line = find(parsed[name], line.operands[0])
    is_made = line.op not in FREE and not line.op.endswith(("-start", "-done"))
    is_small = line.memory_bytes <= cache
    return is_made and is_small and bytes_written(parsed, name, line, line.memory_bytes) == line.memory_bytes


def called(line: Instruction) -> list[str]:
    """Returns the computations of a loop, a branch or a call."""
    names = attribute(line.line, "body|to_apply|calls")
    branches = re.search(r"branch_computations=\{([^}]*)\}", line.line)
    return re.findall(r"[\w.\-]+", branches[1]) if branches else [names]


def num_trips(parsed: Computations, line: Instruction) -> int:
    """Returns how often a loop runs: as XLA knows, else by the number in its condition, from 0; 1: it is no loop."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line.line):
        return int(known[1])
    condition = parsed.get(attribute(line.line, "condition"), [])
    numbers = [re.search(r"constant\((\d+)\)", x.line) for x in condition]
    return max((int(number[1]) for number in numbers if number), default=1)


def async_result(line: Instruction) -> Buffer:
    """Returns the new array of an asynchronous copy: the first result, that of a slice the second."""
    return line.buffers[line.op == "slice-start"]


def bytes_used(parsed: Computations, name: str, line: Instruction, i: int, whole: int) -> int:
    """Returns the bytes that an instruction reads of its operand number `i`, which has `whole` bytes."""
    if moves_nothing(parsed, line):
        return bytes_read(parsed, name, line.name, whole)
    if i == 0 and line.op in SLICES:
        return min(whole, line.num_bytes)
    if i == 0 and line.op in UPDATES:
        return 0
    if line.op == "fusion":
        inner = parsed[line.calls]
        parameter = next(x for x in inner if x.op == "parameter" and f"parameter({i})" in x.line)
        return bytes_read(parsed, line.calls, parameter.name, whole)
    return whole


def moves_nothing(parsed: Computations, line: Instruction) -> bool:
    """True if an instruction in a fusion only gives another shape to its operand."""
    if line.op == "fusion":
        return all(x.op in FREE for x in parsed[line.calls])
    return line.op == "bitcast"


def bytes_read(parsed: Computations, name: str, value: str, whole: int) -> int:
    """Returns the bytes that a fused computation reads of one of its values: all its users', once at most."""
    total = 0
    for line in parsed[name]:
        for i, operand in enumerate(line.operands):
            if operand == value:
                total += bytes_used(parsed, name, line, i, whole)
    return min(total, whole)


def find(lines: list[Instruction], name: str) -> Instruction:
    """Returns the instruction of this name."""
    return next(line for line in lines if line.name == name)


def bytes_written(parsed: Computations, name: str, line: Instruction, whole: int) -> int:
    """Returns the bytes that an instruction writes: of an update in place only what is new."""
    if line.op in UPDATES:
        return min(whole, find(parsed[name], line.operands[UPDATES[line.op]]).num_bytes)
    if line.op == "fusion":
        root = next(x for x in parsed[line.calls] if x.line.startswith("ROOT"))
        return bytes_written(parsed, line.calls, root, whole)
    if line.op == "bitcast":
        return bytes_written(parsed, name, find(parsed[name], line.operands[0]), whole)
    if line.op == "tuple":
        results = [find(parsed[name], operand) for operand in line.operands]
        return min(whole, sum(bytes_written(parsed, name, x, x.memory_bytes) for x in results))
    if line.op == "custom-call":
        return min(whole, line.buffers[0].num_bytes)  # the others are its workspace
    return whole
