"""Memory and communication of an update by devices: from parameters laid out on them, and from the compiled program.

    python bench/scaling.py                       # Qwen3-0.6B under fsdp on 1 to 64 virtual devices
    python bench/scaling.py --sharding fsdp_tp --devices 8

Bytes are those of one device in one micro-batch, as rings move them. bench/compiled.py compiles for accelerators.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from dataclasses import dataclass, replace

import jax
from jax.sharding import AxisType, Mesh

from bench import compiled, hlo
from bench.common import markdown_table, shape
from utils.devices.sharding import MESH_AXES, Layout, bytes_on_device
from utils.devices.startup import DeviceConfig, arrange_devices, mesh_sizes
from utils.settings.config import parse
from utils.settings.options import group, option

QWEN3 = shape("Qwen3-0.6B")  # float32, since XLA:CPU has no bfloat16 collectives


@dataclass(frozen=True)
class Command:
    """Programs to compile."""

    devices: str = option("1,2,4,8,16,32,64", "Numbers of virtual devices, with commas between")
    tokens: int = option(1024, "Length of a row")
    rows: int = option(2, "Rows of a micro-batch on each device")
    layout: DeviceConfig = group(DeviceConfig)


def measure(config: Command, num_devices: int) -> dict[str, float]:
    """Returns the bytes on and between the devices, for one micro-batch of Qwen3-0.6B."""
    sizes = mesh_sizes(config.layout, num_devices, num_slices=1)
    devices = arrange_devices(sizes, jax.devices()[:num_devices])
    layout = Layout(Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3))
    model = replace(QWEN3, mesh=layout.mesh)
    params = compiled.parameter_shapes(model, layout)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    transfers = hlo.transfers(compiled.train_step(model, layout, config.rows, config.tokens).hlo, [0] * num_devices)
    sent = {kind: sum(x.sent for x in transfers if x.kind == kind) for kind in hlo.COLLECTIVES}
    return {"whole": whole, "held": bytes_on_device(params)} | sent


def main(config: Command) -> None:
    """Prints what each number of devices holds and sends."""
    counts = [int(n) for n in config.devices.split(",")]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(counts))
    rows = []
    for n in counts:
        found = measure(config, n)
        by_kind = [found[kind] / 1e6 for kind in hlo.COLLECTIVES]
        least = hlo.fsdp_minimum(QWEN3.num_parameters, {"data": 1, "fsdp": n, "tp": 1}, itemsize=4) / 1e6
        held = found["held"] / 1e6, found["held"] * n / found["whole"]
        rows.append((n, *held, *by_kind, sum(by_kind), least, sum(by_kind) / least if least else 1))
    print(f"Qwen3-0.6B, float32, --sharding {config.layout.sharding}; MB of one device and micro-batch\n")
    columns = "devices", "parameters", "x devices / whole", *hlo.COLLECTIVES, "sent", "fsdp minimum", "ratio"
    print(*markdown_table(columns, rows), sep="\n")


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
