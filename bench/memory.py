"""Memory of training on one GPU, by model size and option: what XLA's compiled programs for it need.

    PYTHONPATH=~/compilers JAX_PLATFORMS=cpu python bench/memory.py --shapes Qwen3-0.6B,Qwen3-1.7B

Needs what bench/compiled.py needs, cuDNN's libraries included. `update` and `optimizer` are the larger of the two
programs' peaks with all that is held beside them; `sampling` holds the state, the copy that samples, pages for all rows
at full length, and what decoding needs. All in GB (1e9 bytes).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from dataclasses import dataclass, replace

import jax

from bench import compiled
from bench.common import report, shape
from core.config import Config
from models.architecture import Decoder
from models.memory import MemoryConfig, measure_sizes, update_bytes
from utils.devices.sharding import Layout, bytes_on_device
from utils.settings.config import parse, with_options
from utils.settings.errors import UserError, user_errors
from utils.settings.options import group, option

GB = 1e9
OPTIONS = {
    "AdamW": {},
    "--optimizer adafactor": {"optimizer": "adafactor"},
    "--optimizer adafactor --grad_dtype bfloat16": {"optimizer": "adafactor", "grad_dtype": "bfloat16"},
}
COLUMNS = ("model", "options", "--remat", "held", "update", "estimated", "optimizer", "sampling")


@dataclass(frozen=True)
class TableConfig:
    """Table."""

    shapes: str = option("Qwen3-0.6B,Qwen3-1.7B,Qwen3-4B,Qwen3-8B", "Names of models, with commas between")
    remats: str = option("dots,full", "Values of --remat, with commas between")
    given: bool = option(False, "Run only the optimizer that the options or a preset name, instead of all")
    json: str = option("", "File for the figures; empty: not written")


@dataclass(frozen=True)
class TableMemory(MemoryConfig):
    """Memory."""

    tokens_per_microbatch: int = 16384


@dataclass(frozen=True)
class Command(Config):
    """Memory of training."""

    table: TableConfig = group(TableConfig)
    sampling: compiled.TableSampling = group(compiled.TableSampling)
    memory: TableMemory = group(TableMemory)


def peaks(config: Command, model: Decoder, layout: Layout) -> list[float]:
    """Returns GB held, of the update, as models/memory.py estimates it, of the optimizer, and of sampling."""
    state = compiled.state_shapes(model, layout, config)
    held = bytes_on_device(state)
    width = compiled.row_length(config)
    largest = compiled.largest_shape(config, model, layout, config.memory.tokens_per_microbatch)
    update = bytes_on_device(state.opt_state) + compiled.gradient(model, layout, largest, config).peak
    sizes = measure_sizes(config.memory, model, layout, state, None, width)
    estimate = update_bytes(sizes, model, model.remat, largest)
    optimizer = compiled.apply_gradients(model, layout, config).peak
    num_slots = config.sampling.inference_batch_per_device
    sampling = held + compiled.decode_segment(config, model, layout, num_slots).peak
    return [x / GB for x in (held, update, estimate, optimizer, sampling)]


def main(config: Command) -> None:
    if config.lora.lora_rank:
        raise UserError("bench/memory.py is about all parameters: give --lora_rank to bench/compiled.py")
    layout = compiled.imagine("h200")
    options = {"as given": {}} if config.table.given else OPTIONS
    table = []
    for name in config.table.shapes.split(","):
        base = shape(name, dtype="bfloat16", mesh=layout.mesh)
        for text, changes in options.items():
            for remat in config.table.remats.split(","):
                model = replace(base, remat=remat)
                figures = peaks(with_options(config, **changes), model, layout)
                table.append((name, text, remat, *figures))
                print(table[-1], flush=True)
    title = (
        f"Memory: one GPU, micro-batches of {config.memory.tokens_per_microbatch} tokens, "
        f"{config.sampling.inference_batch_per_device} rows of {compiled.row_length(config)} tokens sampled; "
        f"attention: {model.kernel}; GB"
    )
    report(title, COLUMNS, table, {"jax": jax.__version__}, config.table.json)


if __name__ == "__main__":
    with user_errors():
        main(parse(Command, sys.argv[1:], __doc__))
