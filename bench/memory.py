"""Memory of training on one GPU, by model size and option: what XLA's compiled programs for it need.

    PYTHONPATH=~/h200 JAX_PLATFORMS=cpu python bench/memory.py --shapes Qwen3-0.6B,Qwen3-1.7B

Needs what bench/h200.py needs, cuDNN's libraries included. `update` and `optimiser` are the larger of the two programs'
peaks with all that is held beside them; `sampling` holds the state, the copy that samples, the cache at full length and
what decoding needs. All in GB (1e9 bytes).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dataclasses import dataclass, replace

import jax

from bench import h200
from bench.common import report, shape
from core.grpo import Config
from models.qwen3 import Qwen
from utils.devices.memory import longest_row, measure, update_bytes
from utils.devices.sharding import Layout, bytes_on_device
from utils.settings.config import option, parse

GB = 1e9
OPTIONS = {
    "AdamW": {},
    "AdamW, --mu_dtype bfloat16": {"mu_dtype": "bfloat16"},
    "--optimizer adafactor": {"optimizer": "adafactor"},
    "--optimizer adafactor --grad_dtype bfloat16": {"optimizer": "adafactor", "grad_dtype": "bfloat16"},
}
COLUMNS = ("model", "options", "--remat", "held", "update", "estimated", "optimiser", "sampling")


@dataclass(frozen=True)
class Command(Config):
    """Memory."""

    shapes: str = option("Qwen3-0.6B,Qwen3-1.7B,Qwen3-4B,Qwen3-8B", "comma-separated names")
    remats: str = option("dots,full", "comma-separated values of --remat")
    given: bool = option(False, "only the optimiser that the options or a preset name, in the place of all")
    num_generation_tokens: int = 1024
    tokens_per_microbatch: int = 16384
    json: str = option("", "file for the figures")


def peaks(config: Config, model: Qwen, layout: Layout) -> list[float]:
    """GB held, of the update, as utils/devices/memory.py estimates it, of the optimiser's step, and of sampling."""
    state = h200.state_shapes(model, layout, config)
    held, beside = bytes_on_device(state), bytes_on_device(state.opt_state)
    width, rows = longest_row(config), config.inference_batch_per_device
    num_rows = max(1, config.tokens_per_microbatch // width)
    update = beside + h200.train_step(model, layout, num_rows, width, config).peak
    estimate = update_bytes(measure(config, model, layout, state), model, model.remat, num_rows * width, width)
    optimiser = h200.apply_gradients(model, layout, config).peak
    sampling = held + h200.decode_segment(model, layout, rows, width).peak
    return [x / GB for x in (held, update, estimate, optimiser, sampling)]


def main(config: Command):
    layout, table = h200.imagine(), []
    options = {"as given": {}} if config.given else OPTIONS
    for name in config.shapes.split(","):
        for text, changes in options.items():
            for remat in config.remats.split(","):
                model = shape(name, dtype="bfloat16", remat=remat, mesh=layout.mesh)
                table.append((name, text, remat, *peaks(replace(config, **changes), model, layout)))
                print(table[-1], flush=True)
    what = (
        f"one GPU, micro-batches of {config.tokens_per_microbatch} tokens, {config.inference_batch_per_device} rows of "
        f"{longest_row(config)} tokens sampled; attention: {model.kernel}; GB"
    )
    report(f"Memory: {what}", COLUMNS, table, {"jax": jax.__version__}, config.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__)[0])
