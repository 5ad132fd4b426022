"""Sampler against trainer: differences of the log-probabilities of sampled tokens, by dtype, cache and batch.

    python bench/bitwise.py                                                      # models/tiny
    python bench/bitwise.py --model_dirs families --caches pages --rows 64       # a small model of each family
    python bench/bitwise.py --model_dirs ~/checkpoints/hf/Qwen3-1.7B

The same 64 completions are sampled --rows at a time, with a KV cache, in segments. The trainer computes their old
log-probabilities as a run does: whole rows, packed into micro-batches, an MoE model with the sampler's experts. Both
compute from the same parameters. The cache "none" compares the trainer with itself, with micro-batches of --rows.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

import jax
import numpy as np
import optax
from jaxtyping import Float

from bench.common import ROOT, Figure, environment, make_prompts, report
from bench.train_step import batch_of
from core.config import Config
from core.learner import Learner
from core.records import Completions
from core.sampler import Sampler, sample_keys
from models.architecture import Decoder
from models.checkpoint import load_model
from models.names import Params, Weights
from models.pages import Paging
from utils.batching import bucket, concatenate, resize_columns, select_rows
from utils.settings.config import make_config, parse
from utils.settings.errors import UserError, user_errors
from utils.settings.options import option

NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS = 8, 8, 24
MICROBATCH = 4096  # packed tokens
CACHES = {  # page size, dtype of keys and values
    "none": (0, ""),
    "pages": (16, ""),
    "pages-int8": (16, "int8"),
}
Nats = Float[np.ndarray, "B T"]


@dataclass(frozen=True)
class Command:
    """Sampler against trainer."""

    model_dirs: str = option("models/tiny", "Hugging Face folders, with commas between; families: one of each family")
    dtypes: str = option("float32,bfloat16", "Data types of matrix multiplications, with commas between")
    caches: str = option("", f"Caches, with commas between: {', '.join(CACHES)}; empty: all")
    rows: str = option("1,8,64", "Rows sampled at a time, divisors of 64, with commas between")
    num_generation_tokens: int = option(64, "Token limit of a completion")
    json: str = option("", "File for the figures; empty: not written")


def first_of_families() -> list[str]:
    """Returns a folder of tests/fixtures for each family, whose name ends at the first hyphen."""
    folders = sorted((ROOT / "tests" / "fixtures").glob("*-*/config.json"), reverse=True)
    by_family = {file.parent.name.split("-")[0]: str(file.parent) for file in folders}
    return [by_family[family] for family in sorted(by_family)]


def make_sampler(model: Decoder, cache: str, num_tokens: int) -> Sampler:
    """Returns a sampler with this cache. One id in fifty ends a completion, so that rows end at different columns."""
    page_size, kv_dtype = CACHES[cache]
    stop_ids = tuple(range(max(1, model.vocab_size // 50)))
    sampler = Sampler(replace(model, kv_dtype=kv_dtype), num_tokens, stop_ids, segment=16)
    return replace(sampler, paging=Paging(page_size))


def sample(
    sampler: Sampler, weights: Weights, prompts: Sequence[list[int]], group_size: int, num_rows: int
) -> Completions:
    """Returns completions of prompts, of which `num_rows` are sampled at a time: a group's share, or whole groups."""
    keys = sample_keys(jax.random.key(0), np.arange(len(prompts)), group_size)
    calls = []
    for start in range(0, len(keys), num_rows):
        of_call = prompts[start // group_size : (start + num_rows - 1) // group_size + 1]
        calls.append(sampler.draw(weights, of_call, keys[start : start + num_rows]))
    return concatenate(calls)


def trainer_logprobs(sampler: Sampler, params: Params, completions: Completions, num_rows: int) -> Nats:
    """Returns the old log-probabilities of a run, which computes `num_rows` at a time."""
    longest_prompt = int(completions.prompt_lengths.max())
    limits = {"prompt_length": longest_prompt, "num_generation_tokens": sampler.max_new_tokens}
    config = make_config(Config, groups_per_batch=1, group_size=max(2, num_rows), ppo_minibatch=0, **limits)
    model = replace(sampler.model, kv_dtype="")
    learner = Learner(model, optax.identity(), sampler.layout, config, sampler.max_new_tokens, MICROBATCH)
    batch = batch_of(completions, group_size=1)
    width = bucket(batch.tokens.shape[1])  # as Learner.add_logprobs: few widths to compile
    parts = np.arange(len(batch)).reshape(-1, num_rows)
    logprobs = [learner.compute_outputs(params, select_rows(batch, rows, width)).logprobs for rows in parts]
    return resize_columns(np.concatenate(logprobs), batch.tokens.shape[1])


def token_gaps(
    sampler: Sampler, params: Params, prompts: Sequence[list[int]], group_size: int
) -> Float[np.ndarray, "n"]:
    """Returns |log p of the sampler - log p of the trainer| of each sampled token, all rows in one call."""
    num_rows = len(prompts) * group_size
    completions = sample(sampler, sampler.load_weights(params), prompts, group_size, num_rows)
    trained = trainer_logprobs(sampler, params, completions, num_rows)
    return np.abs(completions.logprobs - trained)[completions.mask]


def measure(model: Decoder, params: Params, config: Command) -> Iterator[tuple[Figure, ...]]:
    """Yields cache, rows, tokens, the share of equal ones, differences, and how many ratios leave [0.9, 1.1]."""
    prompts, num_rows = make_prompts(model.vocab_size, NUM_PROMPTS, PROMPT_TOKENS), NUM_PROMPTS * GROUP_SIZE
    for cache in config.caches.split(",") if config.caches else CACHES:
        sampler = make_sampler(model, "pages" if cache == "none" else cache, config.num_generation_tokens)
        weights = sampler.load_weights(params)
        for at_a_time in map(int, config.rows.split(",")):
            sampled_at_a_time = num_rows if cache == "none" else at_a_time
            completions = sample(sampler, weights, prompts, GROUP_SIZE, sampled_at_a_time)
            trained, other = trainer_logprobs(sampler, params, completions, num_rows), completions.logprobs
            if cache == "none":
                other = trainer_logprobs(sampler, params, completions, at_a_time)
            logs = (other - trained)[completions.mask]
            gaps, outside = np.abs(logs), np.mean(np.abs(np.expm1(logs)) > 0.1)
            equal = "all" if not gaps.any() else f"{np.mean(gaps == 0):.1%}"
            sizes = [f"{x:.1e}" for x in (np.median(gaps), gaps.mean(), gaps.max())]
            yield cache, at_a_time, gaps.size, equal, *sizes, f"{outside:.2%}"


def main(config: Command) -> None:
    rows = config.rows.split(",")
    if not all(x.isdecimal() and int(x) and NUM_PROMPTS * GROUP_SIZE % int(x) == 0 for x in rows):
        raise UserError(f"--rows {config.rows}: give divisors of {NUM_PROMPTS * GROUP_SIZE}, with commas between")
    if unknown := set(filter(None, config.caches.split(","))) - CACHES.keys():
        raise UserError(f"--caches {', '.join(sorted(unknown))}: give some of {', '.join(CACHES)}")
    folders = first_of_families() if config.model_dirs == "families" else config.model_dirs.split(",")
    table = []
    for folder in folders:
        for dtype in config.dtypes.split(","):
            model, params, _ = load_model(folder, dtype=dtype)
            for row in measure(model, params, config):
                table.append((Path(folder).name, dtype, *row))
                print(*table[-1], sep="  ", file=sys.stderr, flush=True)
    columns = ("model", "dtype", "cache", "rows", "tokens", "equal", "median", "mean", "largest", "ratio off by 10%")
    report("|log p of the sampler - log p of the trainer|, nats", columns, table, environment(), config.json)


if __name__ == "__main__":
    with user_errors():
        main(parse(Command, sys.argv[1:], __doc__))
