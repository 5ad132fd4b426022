"""Memory and communication of an update by devices: from parameters laid out on them, and from the compiled program.

    python bench/scaling.py                       # Qwen3-0.6B under fsdp on 1 to 64 virtual devices, and a projection
    python bench/scaling.py --sharding fsdp_tp --devices 8

Bytes are those of one device in one micro-batch, as rings move them.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike

from bench import hlo
from core.advantages import ObjectiveConfig
from core.learner import accumulate
from core.records import Batch
from models.architecture import Decoder, is_spec
from models.distribution import Distribution
from models.packing import pack_rows
from utils.batching import MicrobatchShape, empty_rows
from utils.devices.sharding import MESH_AXES, Layout
from utils.devices.startup import DeviceConfig, arrange_devices, mesh_sizes
from utils.settings.config import parse
from utils.settings.options import group, option

QWEN3 = Decoder(  # 0.6B; float32, since XLA:CPU has no bfloat16 collectives
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128,
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """Programs to compile, and a projection."""

    devices: str = option("1,2,4,8,16,32,64", "Numbers of virtual devices, with commas between")
    tokens: int = option(1024, "Length of a row")
    rows: int = option(2, "Rows of a micro-batch on each device")
    efficiency: float = option(0.4, "Share of the peak that matmuls reach, for the projection")
    step_tokens: int = option(16384, "Tokens of a micro-batch on each device, for the projection")
    layout: DeviceConfig = group(DeviceConfig)


def measure(config: Command, num_devices: int) -> dict[str, float]:
    """Returns the bytes on and between the devices, for one micro-batch of Qwen3-0.6B."""
    devices = jax.devices()[:num_devices]
    sizes = mesh_sizes(config.layout, num_devices, num_slices=1)
    layout = Layout(Mesh(arrange_devices(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * 3))
    model = replace(QWEN3, mesh=layout.mesh)
    shapes = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, np.float32, sharding=layout.sharding(*spec)),
        model.parameter_table(),
        is_leaf=is_spec,
    )
    batch = batch_shapes(config.rows * layout.row_shards, config.tokens, layout)
    num_rows = len(batch.tokens)
    shape = MicrobatchShape(config.rows, config.tokens, config.rows * config.tokens)
    packing = layout.put(pack_rows(empty_rows(num_rows, config.tokens), shape, layout.row_shards))
    settings = model, ObjectiveConfig().loss, Distribution()
    lowered = accumulate.lower(*settings, shapes, (shapes, np.float32(0)), batch, packing)
    text = lowered.compile().as_text()
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    make_zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape), shapes), out_shardings=shardings)
    arrays = jax.tree.leaves(make_zeros())
    held = Counter()
    for x in arrays:
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    whole = sum(x.nbytes for x in arrays)
    sent = Counter()
    for transfer in hlo.transfers(text, [0] * num_devices):
        sent[transfer.kind] += transfer.sent
    return {"whole": whole, "held": max(held.values())} | sent


def batch_shapes(num_rows: int, length: int, layout: Layout) -> Batch:
    """Returns the shapes of a micro-batch, laid out on the devices."""

    def shape(dtype: DTypeLike, *columns: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *columns), dtype, sharding=layout.rows)

    by_token = shape(np.float32, length)
    by_row = shape(np.float32)
    return Batch(
        tokens=shape(np.int32, length),
        mask=shape(bool, length),
        sample_logprobs=by_token,
        rewards=by_row,
        lengths=shape(np.int32),
        prompt_lengths=shape(np.int32),
        old_logprobs=by_token,
        advantages=by_token,
        denominator=by_row,
        num_tokens=by_row,
        group_size=2,
    )


def table(config: Command) -> None:
    """Prints what each number of devices holds and sends."""
    counts = [int(n) for n in config.devices.split(",")]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(counts))
    print(f"Qwen3-0.6B, float32, --sharding {config.layout.sharding}; MB of one device and micro-batch")
    header = ("devices", "parameters", "x devices / whole", *hlo.COLLECTIVES, "sent", "fsdp minimum", "ratio")
    print("".join(f"{name:>19}" for name in header))
    for n in counts:
        sizes = measure(config, n)
        by_kind = [sizes.get(kind, 0) for kind in hlo.COLLECTIVES]
        total = sum(by_kind)
        least = hlo.fsdp_minimum(QWEN3.num_parameters, {"data": 1, "fsdp": n, "tp": 1}, itemsize=4)
        megabytes = [size / 1e6 for size in (*by_kind, total, least)]
        ratio = total / least if least else 1
        figures = [sizes["held"] / 1e6, sizes["held"] * n / sizes["whole"], *megabytes, ratio]
        print(f"{n:>19}" + "".join(f"{x:>19,.2f}" for x in figures), flush=True)


@dataclass(frozen=True)
class Machine:
    """One accelerator and its links; bytes and operations a second, each way."""

    peak: float  # bfloat16 operations
    group: int  # accelerators that the fast link joins
    fast: float  # bytes that one sends in its group
    slow: float  # bytes that one sends beyond it


# Sources. NVIDIA's data sheets of H100 SXM, H200 SXM and DGX: 989 TFLOP/s of dense bfloat16, NVLink 900 GB/s (both
# directions together) among 8, one ConnectX-7 of 400 Gb/s for each GPU. docs.cloud.google.com/tpu/docs/v5e and /v5p:
# 197 and 459 TFLOP/s, interconnect 400 and 1200 GB/s (both directions together) in pods of 256 and 8960, data-center
# network 6.4 Tb/s for a pod of v5e (25 Gb/s a chip) and 50 Gb/s a chip of v5p.
MACHINES = {
    "H100/H200": Machine(989e12, 8, 450e9, 50e9),
    "TPU v5e": Machine(197e12, 256, 200e9, 3.1e9),
    "TPU v5p": Machine(459e12, 8960, 600e9, 6.2e9),
}


def efficiency(machine: Machine, num_devices: int, config: Command, is_hybrid: bool) -> float:
    """Returns the share of the time spent computing when communication does not overlap with it: a lower bound.

    Gathers are bfloat16, gradients float32; `is_hybrid` cuts within the fast group and sums gradients across groups.
    """
    parameters = QWEN3.num_parameters
    compute = 8 * parameters * config.step_tokens / (machine.peak * config.efficiency)  # 6, and 2 of rematerialization
    inner = min(num_devices, machine.group) if is_hybrid else num_devices
    outer = num_devices // inner
    bandwidth = machine.fast if inner <= machine.group else machine.slow
    seconds = (2 + 2 + 4) * parameters * (inner - 1) / inner / bandwidth
    seconds += 2 * 4 * parameters / inner * (outer - 1) / outer / machine.slow
    return compute / (compute + seconds)


def project(config: Command) -> None:
    """Prints the efficiency that the links allow."""
    print(f"\nProjected efficiency: {config.step_tokens:,} tokens a device and micro-batch, matmuls at ", end="")
    print(f"{config.efficiency:.0%} of the peak, nothing overlapped: fsdp on all | fsdp in a group, data across")
    counts = [2**n for n in range(3, 13)]
    print("".join(f"{name:>15}" for name in ("", *counts)))
    for name, machine in MACHINES.items():
        line = f"{name:>15}"
        for n in counts:
            plain = efficiency(machine, n, config, is_hybrid=False)
            hybrid = efficiency(machine, n, config, is_hybrid=True)
            line += f"{f'{plain:.1%} | {hybrid:.1%}':>15}"
        print(line)


def main(config: Command) -> None:
    table(config)
    project(config)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
