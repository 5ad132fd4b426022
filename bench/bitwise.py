"""Sampler against trainer: how far their log-probabilities of the drawn tokens differ, for models of each family.

    python bench/bitwise.py                                              # the small models of the tests
    python bench/bitwise.py --model_dirs ~/checkpoints/hf/Qwen3-1.7B     # a model of your own

The sampler decodes with a cache, in segments, and rows that end leave the others; the trainer computes whole rows, a
mixture with the experts that the sampler took. Both compute in one of --dtypes, from the same float32 parameters.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from functools import partial

import jax
import numpy as np
from jaxtyping import Float

from bench.common import ROOT, environment, make_prompts, report
from core.chains.pages import with_pages
from core.sampler import Sampler
from models.checkpoint import load_model
from models.decoder import token_outputs
from models.names import Params
from utils.settings.config import parse
from utils.settings.options import option


@dataclass(frozen=True)
class Command:
    """Sampler against trainer."""

    model_dirs: str = option("", "Hugging Face folders, with commas between; empty: one of tests/fixtures per family")
    dtypes: str = option("float32,bfloat16", "Data types of matrix multiplications, with commas between")
    num_prompts: int = option(8, "Prompts, of 24 random tokens")
    group_size: int = option(8, "Completions of each prompt")
    num_generation_tokens: int = option(64, "Tokens of a completion")
    json: str = option("", "File for the figures; empty: not written")


def first_of_families() -> list[str]:
    """Returns a folder of tests/fixtures for each family, whose name ends at the first hyphen."""
    folders = sorted((ROOT / "tests" / "fixtures").glob("*-*/config.json"), reverse=True)
    by_family = {file.parent.name.split("-")[0]: str(file.parent) for file in folders}
    return [by_family[family] for family in sorted(by_family)]


def gaps(folder: str, dtype: str, config: Command) -> Float[np.ndarray, "n"]:
    """Returns |log p of the sampler - log p of the trainer| of each drawn token."""
    model, params, _ = load_model(folder, dtype=dtype)
    prompts = make_prompts(model.vocab_size, config.num_prompts, 24)
    num_stop_ids = max(1, model.vocab_size // 50)
    sampler = Sampler(model, config.num_generation_tokens, tuple(range(num_stop_ids)), segment=16)
    sampler = with_pages(sampler, -1)
    return token_gaps(sampler, params, prompts, config.group_size)


def token_gaps(
    sampler: Sampler, params: Params, prompts: Sequence[list[int]], group_size: int
) -> Float[np.ndarray, "n"]:
    """Returns |log p of the sampler - log p of the trainer| of each token that it draws."""
    weights = sampler.load_weights(params)
    drawn = sampler.generate(weights, prompts, np.arange(len(prompts)), group_size, jax.random.key(0))
    rows = sampler.layout.put({"tokens": drawn.tokens, "routes": drawn.routes})
    outputs = jax.jit(partial(token_outputs, sampler.model))(params, **rows)
    return np.abs(drawn.logprobs - sampler.layout.fetch_array(outputs.logprobs))[drawn.mask]


def main(config: Command) -> None:
    folders = config.model_dirs.split(",") if config.model_dirs else first_of_families()
    table = []
    for folder in folders:
        for dtype in config.dtypes.split(","):
            found = gaps(folder, dtype, config)
            table.append((Path(folder).name, dtype, f"{found.size:,}", f"{found.max():.1e}", f"{found.mean():.1e}"))
    columns = ("model", "dtype", "tokens", "largest", "mean")
    report("|log p of the sampler - log p of the trainer|, nats", columns, table, environment(), config.json)


if __name__ == "__main__":
    main(parse(Command, sys.argv[1:], __doc__))
