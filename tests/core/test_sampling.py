"""The sampler against loops without cache, batch or compilation, and its draws against float64 probabilities.

Letters: N prompts, G samples of each, V vocabulary.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from threading import Barrier, Event
from time import sleep
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, Int

from core.chains.attach import with_forced_answer
from core.records import Completions
from core.sampler import Sampler, sample_keys
from envs.base import ForcedAnswer
from models import decoder
from models.architecture import Decoder
from models.distribution import Distribution, inverse_cdf_sample, sampling_uniforms
from models.pages import Paging
from tests.helpers import HYBRID, MODEL, Letters, assert_close, depth, on_layout, random_params, slow
from tests.oracles.generation import NO_TOKENS, Address, Limits, reply, truncated
from tests.processes import on_four_devices
from tests.references import fill_pages
from utils.devices.compile_log import Compilations
from utils.devices.memory import fingerprint
from utils.devices.sharding import single_device
from utils.devices.startup import DeviceConfig, make_layout
from utils.devices.threads import LAUNCHING, between_turns, take_turns
from utils.threefry import make_key

LIMIT = 32  # tokens of a completion
WIDTH = 48  # of a row of the reference, which holds every row here
KEY = jax.random.key(35)
IDS = (11, 4, 290, 0, 5)
G = 4
OPERATIONS = depth(MODEL, WIDTH)  # of a log-probability
LOGIT = 12.0  # no logit of the model is larger
ROWS = [(i, sample) for i in IDS for sample in range(G)]  # (task, number of the sample) of each row
RANDOM = [np.random.default_rng(seed) for seed in range(5)]
PROMPTS = [rng.integers(0, MODEL.vocab_size, n).tolist() for rng, n in zip(RANDOM, (3, 12, 7, 1, 9), strict=True)]


class Row(NamedTuple):
    """A completion, without its prompt and its padding."""

    tokens: list[int]
    logprobs: np.ndarray
    finished: bool

    def up_to(self, ends: list[int]) -> "Row":
        """Returns the row up to the first of these lengths."""
        end = min(ends, default=LIMIT)
        return Row(self.tokens[:end], self.logprobs[:end], bool(ends))

    def ends_by(self, ids: Collection[int]) -> list[int]:
        """Returns the lengths at which one of these ids ends the row."""
        return [t + 1 for t, token in enumerate(self.tokens) if token in ids]


Rows = dict[tuple[int, int], Row]  # by task and number of the sample


def draw_all(
    sampler: Sampler,
    prompts: Sequence[list[int]] = PROMPTS,
    ids: Sequence[int] = IDS,
    num_samples: int = G,
    segment: int = 8,
) -> Completions:
    """Draws all completions, in several segments each."""
    sampler = replace(sampler, segment=segment)
    weights = sampler.load_weights(random_params(sampler.model))
    return sampler.generate(weights, prompts, np.array(ids), num_samples, KEY)


@cache
def free(temperature: float = 1.0) -> Completions:
    """Completions that nothing stops before the limit."""
    return draw_all(Sampler(MODEL, LIMIT, (), Distribution(temperature)))


def completions(r: Completions, ids: Sequence[int] = IDS, num_samples: int = G) -> Rows:
    found = {}
    names = [(i, sample) for i in ids for sample in range(num_samples)]
    for row, name in enumerate(names):
        behind_prompt = slice(r.prompt_lengths[row], r.lengths[row])
        tokens = r.tokens[row, behind_prompt].tolist()
        found[name] = Row(tokens, r.logprobs[row, behind_prompt], bool(r.finished[row]))
    return found


def assert_same(found: Rows, expected: Rows) -> None:
    assert found.keys() <= expected.keys()
    for name, row in found.items():
        assert row.tokens == expected[name].tokens, name
        assert row.finished == expected[name].finished, name
        assert_close(row.logprobs, expected[name].logprobs, OPERATIONS, LOGIT)


def assert_well_formed(r: Completions, forced: Mapping[int, Mapping[int, int]] = MappingProxyType({})) -> None:
    """Prompts stand in front, the mask covers the completion but for forced tokens, the rest is padding."""
    for row, prompt in enumerate(p for p in PROMPTS for _ in range(G)):
        p = int(r.prompt_lengths[row])
        end = int(r.lengths[row])
        assert p == len(prompt)
        assert r.tokens[row, :p].tolist() == prompt
        is_drawn = [t - p not in forced.get(row, ()) for t in range(r.tokens.shape[1])]
        mask = [p <= t < end and is_drawn[t] for t in range(r.tokens.shape[1])]
        assert r.mask[row].tolist() == mask
        assert not r.logprobs[row, :p].any()
        assert not r.logprobs[row, end:].any()
        assert not r.tokens[row, end:].any()


teacher_forced = jax.jit(decoder.token_outputs, static_argnums=(0, 3))
compute_logits = jax.jit(decoder.logits, static_argnums=0)


def assert_training_logprobs(r: Completions, model: Decoder = MODEL, temperature: float = 1.0) -> None:
    """Log-probabilities are those of the training pass, and 0 for forced tokens and padding."""
    found, *_ = teacher_forced(model, random_params(model), r.tokens, Distribution(temperature))
    expected = np.where(r.mask, found, 0.0)
    operations = depth(model, max(WIDTH, r.tokens.shape[1]))
    assert_close(r.logprobs, expected, operations, LOGIT / temperature)


def logits_of(tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T V"]:
    return np.asarray(compute_logits(MODEL, random_params(), tokens))


def one_by_one(
    prompt: list[int],
    task: int,
    sample: int,
    distribution: Distribution,
    forced: Mapping[int, int] = NO_TOKENS,
) -> list[int]:
    address = Address(KEY, task, sample)
    return reply(MODEL, prompt, address, Limits(LIMIT, WIDTH), distribution, forced)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_training_pass(temperature):
    r = free(temperature)
    assert_training_logprobs(r, temperature=temperature)
    assert r.logprobs[r.mask].std() > 0.5, "else the distributions are too flat to tell anything"


def test_an_int8_cache_is_half_as_large_and_rounds_to_127_steps():
    model = replace(MODEL, kv_dtype="int8")
    weights = Sampler(model, LIMIT, ()).load_weights(random_params())
    pools, exact = (fill_pages(each, weights, PROMPTS[1:2], 0)[0] for each in (model, MODEL))
    num_bytes, num_exact = (sum(x.nbytes for x in jax.tree.leaves(pools)) for pools in (pools, exact))
    assert num_bytes / num_exact == model.cache_bytes / MODEL.cache_bytes < 0.5
    true = np.asarray(exact[0], np.float64)  # of the first layer, whose input is the same
    step = np.abs(true).max(-1, keepdims=True) / 127
    rounded = np.asarray(pools[0].integers) * np.asarray(pools[0].scale, np.float64)
    assert (np.abs(rounded - true) <= 0.501 * step).all()


def test_an_int8_cache_is_nearly_as_good():
    r = draw_all(Sampler(replace(MODEL, kv_dtype="int8"), LIMIT, ()))
    expected, *_ = teacher_forced(MODEL, random_params(), r.tokens, Distribution())
    error = np.abs(r.logprobs - expected)[r.mask]
    assert 1e-5 < error.mean() < 0.02
    assert error.max() < 0.2


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_tokens_are_those_of_a_loop_without_cache(temperature):
    found = completions(free(temperature))
    for prompt, task in zip(PROMPTS, IDS, strict=True):
        for sample in (0, 3) if temperature else (0,):
            expected = one_by_one(prompt, task, sample, Distribution(temperature))
            assert found[task, sample].tokens == expected
    if temperature:
        different = {tuple(row.tokens) for row in found.values()}
        assert len(different) == len(ROWS), "each row its own draws"


# What ends a completion


def test_without_stop_ids_completions_reach_the_limit():
    r = free()
    assert_well_formed(r)
    assert not r.finished.any()
    assert (r.lengths - r.prompt_lengths == LIMIT).all()
    assert (r.tokens[r.mask] == 0).any(), "the id that also fills the padding is a token like others"


@cache
def stop_ids() -> tuple[int, ...]:
    """Ids with which rows end at once, later, just at the limit, and never.

    They are the id that fills the padding, the first token of some rows, and the last one of another.
    """
    rows = completions(free())
    ids = {0, *(rows[i, 0].tokens[0] for i in IDS)}
    for row in rows.values():
        *others, last = row.tokens
        if not ids & set(row.tokens) and last not in others:
            return (*ids, last)
    raise AssertionError("change KEY")


@cache
def stopped() -> Completions:
    return draw_all(Sampler(MODEL, LIMIT, stop_ids()))


def test_stop_ids_end_a_completion_and_belong_to_it():
    rows = completions(free())
    expected = {name: row.up_to(row.ends_by(stop_ids())) for name, row in rows.items()}
    ends = [(len(row.tokens), row.finished) for row in expected.values()]
    kinds = {(1, True), (LIMIT, True), (LIMIT, False)}
    assert kinds <= set(ends), "change KEY"
    assert sum(n > 8 for n, _ in ends) <= 8, "change KEY"
    assert any(row.tokens[-1] == 0 for row in expected.values()), "change KEY"
    assert_same(completions(stopped()), expected)
    assert_well_formed(stopped())


def late_token(row: list[int], others: list[int]) -> int:
    """Returns a token that comes late in a row, and not in others."""
    early = {*row[:16], *others}
    return next(x for x in row[16:] if x not in early)


def test_stop_strings_cut_at_the_token_that_completes_one():
    rows = completions(free())
    first, second, third = (rows[ROWS[i]].tokens for i in (2, 7, 12))
    word = late_token(second, first)
    stop = late_token(third, first + second)
    tokenizer = Letters({word: "<<STOP>>"})
    strings = (tokenizer.decode(first[7:9]), "STOP")  # one across two segments, one within a token
    expected = {}
    for name, row in rows.items():
        texts = {n: tokenizer.decode(row.tokens[:n]) for n in range(1, LIMIT + 1)}
        ends = [n for n, text in texts.items() if any(string in text for string in strings)]
        expected[name] = row.up_to(ends + row.ends_by([stop]))
    assert [len(expected[ROWS[i]].tokens) for i in (2, 7)] == [9, second.index(word) + 1], "change KEY"
    r = draw_all(Sampler(MODEL, LIMIT, (stop,), stop_strings=strings, tokenizer=tokenizer))
    assert_same(completions(r), expected)
    assert_well_formed(r)


def test_a_stop_string_is_found_around_tokens_without_text():
    sampler = Sampler(MODEL, LIMIT, (), tokenizer=Letters({1: ""}))
    assert sampler.string_end(np.array([97, *[1] * 50, 98]), 51, ("ab",)) == 52


def test_threads_take_turns_and_an_error_ends_the_others():
    working = []
    together = Barrier(2, timeout=30)
    cancelled = Event()

    def work(part: int) -> int:
        working.append(part)
        sleep(0.01)
        assert working == [part], "one at a time"
        working.clear()
        with between_turns():
            together.wait()  # for devices both wait at the same time
        return part

    def fail(part: int) -> None:
        with between_turns():
            together.wait()
            assert part == 0 or cancelled.wait(30)
        raise ZeroDivisionError

    assert take_turns(work, [0, 1], cancelled) == [0, 1]
    assert not cancelled.is_set()
    with pytest.raises(ZeroDivisionError):
        take_turns(fail, [0, 1], cancelled)


def test_programs_of_two_threads_are_not_launched_in_between():
    """A sampler over pages, and the checksum of a state that it may sample from, wait while another thread launches."""
    sampler = Sampler(MODEL, LIMIT, (3,), layout=single_device())
    weights = sampler.load_weights(on_layout(single_device()))
    ids = np.array(IDS)
    jobs = (lambda: sampler.generate(weights, PROMPTS, ids, 1, KEY).tokens.tolist()), (lambda: fingerprint(weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.devices.memory.host_views", lambda tree: tree)  # as on other devices than one CPU
        expected = [job() for job in jobs]
        with ThreadPoolExecutor(2) as pool:
            with LAUNCHING:
                waiting = [pool.submit(job) for job in jobs]
                assert not wait(waiting, timeout=0.5).done
            assert [future.result(30) for future in waiting] == expected


FORCED_AT = 16


def needed_ids(drawn: list[int], think: int, answer: int) -> list[int]:
    """Returns the ids that are forced behind these; none if the row has ended, or answers already."""
    if set(drawn) & set(stop_ids()) or answer in drawn:
        return []
    return [10, answer] if think in drawn else [think, 10, answer]


def test_a_forced_answer_goes_to_rows_that_need_one():
    rows = {name: row.tokens[:FORCED_AT] for name, row in completions(free()).items()}
    first, second, third, *_ = (row for row in rows.values() if not set(row) & set(stop_ids()))
    others = (0, 10, *third)
    think = next(t for t in first if t not in others)
    answer = next(t for t in second if t not in others)
    tokenizer = Letters({think: "</think>", answer: "<answer>"})
    sampler = Sampler(MODEL, LIMIT, stop_ids(), tokenizer=tokenizer)
    settings = (LIMIT - FORCED_AT, ForcedAnswer(opening="<think>\n"))
    forcing = with_forced_answer(sampler, *settings)
    assert forcing == with_forced_answer(sampler, *settings), "members of a population draw together"
    r = draw_all(forcing)
    found = completions(r)
    forced = {}
    sizes = []
    for number, (row, tokens) in enumerate(rows.items()):
        ids = needed_ids(tokens, think, answer)
        forced[number] = dict(enumerate(ids, FORCED_AT))
        sizes.append(len(ids) if ids else "answers" if answer in tokens else "finished")
        prompt = PROMPTS[IDS.index(row[0])]
        whole = Row(one_by_one(prompt, *row, Distribution(), forced[number]), np.zeros(LIMIT), False)
        expected = whole.up_to(whole.ends_by(stop_ids()))
        assert found[row].tokens == expected.tokens
        assert found[row].finished == expected.finished
    assert {2, 3, "answers", "finished"} == set(sizes), "change KEY"
    assert_well_formed(r, forced)
    assert_training_logprobs(r)


@pytest.mark.parametrize("prompt", [[], [1] * 13])
def test_a_prompt_that_does_not_fit_is_named(prompt):
    with pytest.raises(ValueError, match=rf"prompt 5 has {len(prompt)} tokens, allowed are 1 to 12"):
        draw_all(Sampler(MODEL, LIMIT, (), max_prompt_tokens=12), [PROMPTS[0], prompt], [3, 5])


# What a completion does not depend on


def test_neither_on_order_nor_on_the_prompts_beside_it():
    long = [1] * 40  # moves every other prompt to other columns
    sampler = Sampler(MODEL, LIMIT, stop_ids())
    r = draw_all(sampler, [long, *PROMPTS[::-1]], [99, *IDS[::-1]])
    found = completions(r, [99, *IDS[::-1]])
    assert_same({row: found[row] for row in ROWS}, completions(stopped()))


def test_nor_on_the_batch_nor_on_the_size_of_the_group():
    r = draw_all(Sampler(MODEL, LIMIT, stop_ids()), PROMPTS[1:3], IDS[1:3], 2)
    assert_same(completions(r, IDS[1:3], 2), completions(stopped()))


@pytest.mark.parametrize("paging", [Paging(64), Paging(8, num_pages=16, num_slots=4)], ids=str)
def test_nor_on_slots_and_pages(paging):
    r = draw_all(Sampler(MODEL, LIMIT, stop_ids(), paging=paging))
    assert_same(completions(r), completions(stopped()))


HYBRID_SAMPLER = Sampler(HYBRID, 2 * LIMIT, tuple(range(15, HYBRID.vocab_size, 20)))


@cache
def stopped_hybrid() -> Completions:
    return draw_all(HYBRID_SAMPLER)


@pytest.mark.slow
def test_states_of_linear_attention_follow_their_rows():
    """Against the training pass, which has no cache, and with other slots and prompts."""
    r = stopped_hybrid()
    lengths = r.lengths - r.prompt_lengths
    assert np.sort(lengths)[-8] < LIMIT < lengths.max(), "change KEY"
    assert_training_logprobs(r, HYBRID)
    assert_same(completions(draw_all(replace(HYBRID_SAMPLER, paging=Paging(16, num_slots=4)))), completions(r))
    ids = [99, *IDS[::-1]]
    found = completions(draw_all(HYBRID_SAMPLER, [[1] * 40, *PROMPTS[::-1]], ids), ids)
    assert_same({row: found[row] for row in ROWS}, completions(r))


LAYOUTS = (DeviceConfig("fsdp"), DeviceConfig(mesh="data=2,tp=2"))


def draw_on_four_devices(stops: tuple[int, ...], file: str) -> None:
    arrays = {}
    samplers = [Sampler(MODEL, LIMIT, stops) for _ in LAYOUTS]
    cases = zip([*LAYOUTS, LAYOUTS[-1]], [*samplers, HYBRID_SAMPLER], strict=True)
    for i, (config, sampler) in enumerate(cases):
        layout = make_layout(config)
        params = on_layout(layout, sampler.model)
        assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(params))
        sampler = replace(sampler, layout=layout, segment=16)
        r = sampler.generate(sampler.load_weights(params), PROMPTS, np.array(IDS), G, KEY)
        arrays |= {f"{i} {name}": x for name, x in vars(r).items() if np.ndim(x)}
    np.savez(file, **arrays)


@pytest.mark.slow
def test_nor_on_the_devices(tmp_path):
    on_four_devices(__file__, f"draw_on_four_devices({stop_ids()}, {str(tmp_path / 'drawn.npz')!r})")
    with np.load(tmp_path / "drawn.npz") as arrays:
        for i, alone in enumerate((stopped(), stopped(), stopped_hybrid())):
            fields = {name: arrays[f"{i} {name}"] for name, x in vars(alone).items() if np.ndim(x)}
            assert_same(completions(Completions(**fields)), completions(alone))


# Distributions


def test_truncated_sampling_in_a_completion():
    distribution = Distribution(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05)
    r = draw_all(Sampler(MODEL, 16, (), distribution), PROMPTS[:2], IDS[:2])
    logits = logits_of(r.tokens)
    sizes = set()
    for row, t in np.argwhere(r.mask):
        expected = truncated(logits[row, t - 1], distribution)
        logprob = expected[r.tokens[row, t]]
        assert_close(r.logprobs[row, t], logprob, OPERATIONS, LOGIT / 0.8)
        assert set(r.support[row, t].tolist()) - {-1} == expected.keys()
        sizes.add(len(expected))
    assert len(sizes) > 5, sizes


CUTS = slow({"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05})


@pytest.mark.parametrize("cut", [{"top_k": 8, "top_p": 0.9, "min_p": 0.05}, *CUTS], ids=str)
def test_the_policy_that_is_trained_is_the_one_that_was_sampled(cut):
    """Before the first update the ratio is 1, but for rounding; entropy is that of the cut distribution."""
    distribution = Distribution(temperature=0.6, **cut)
    sampler = Sampler(MODEL, 16, stop_ids(), distribution, tokenizer=Letters())
    r = draw_all(with_forced_answer(sampler, 4), PROMPTS[:2], IDS[:2])
    assert 0 < r.mask.sum() < (r.lengths - r.prompt_lengths).sum(), "some tokens are forced, whatever could be drawn"
    outputs = teacher_forced(MODEL, random_params(), r.tokens, distribution, support=r.support)
    ratio = np.exp(outputs.logprobs - r.logprobs)[r.mask]
    assert_close(ratio, 1, OPERATIONS, LOGIT / 0.6)
    assert np.isfinite(outputs.logprobs).all()
    assert np.isfinite(outputs.entropy).all(), "padding too: NaN has a gradient"
    logits = logits_of(r.tokens)
    for row, t in np.argwhere(r.mask)[::7]:
        logprobs = np.array(list(truncated(logits[row, t - 1], distribution).values()))
        entropy = -(np.exp(logprobs) * logprobs).sum()
        assert_close(outputs.entropy[row, t], entropy, OPERATIONS, LOGIT / 0.6)
    whole = teacher_forced(MODEL, random_params(), r.tokens, distribution).logprobs
    assert np.abs(whole - r.logprobs)[r.mask].max() > 0.01, "without the support it would not be"


def chi_square_passes(draws, probs, order=None, num_bins: int = 100) -> bool:
    """Pearson's test at p = 1e-4 over bins of about equal mass, made along `order` of the ids.

    The quantile of chi-square is Wilson and Hilferty's approximation.
    """
    order = np.arange(len(probs)) if order is None else order
    middle = np.cumsum(probs[order]) - probs[order] / 2
    bins = np.empty(len(probs), int)
    bins[order] = np.clip(middle * num_bins, 0, num_bins - 1).astype(int)
    expected = len(draws) * np.bincount(bins, probs, num_bins)
    observed = np.bincount(bins[draws], minlength=num_bins)
    small = expected < 10
    expected, observed = (np.append(x[~small], x[small].sum()) for x in (expected, observed))
    if expected[-1] == 0:
        assert observed[-1] == 0
        expected = expected[:-1]
        observed = observed[:-1]
    k, z = len(expected) - 1, 3.719
    statistic = ((observed - expected) ** 2 / expected).sum()
    quantile = k * (1 - 2 / (9 * k) + z * (2 / (9 * k)) ** 0.5) ** 3
    return statistic < quantile


SETTINGS = [
    (1.0, 1),
    (1.0, 12),
    (0.6, 0, 0.8),
    (1.0, 0, 1.0, 0.02),
    (1.0, 6, 0.7),
    (1.3, 40, 0.9, 0.03),
    (1.0, 128, 0.999),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_truncated_distributions(setting):
    d = Distribution(*setting)
    logits = jnp.float32(2 * np.random.default_rng(5).standard_normal(300))
    draw = jax.vmap(lambda uniforms: d.draw(logits[None], uniforms[None]))
    tokens, logprobs, _ = (np.asarray(x)[:, 0] for x in draw(jax.random.uniform(jax.random.key(1), (20_000, 2))))
    expected = truncated(logits, d)
    assert set(tokens.tolist()) <= expected.keys()
    size = np.abs(logits).max() / d.temperature
    assert_close(logprobs, [expected[token] for token in tokens.tolist()], len(logits), size)
    probs = np.zeros(300)
    probs[list(expected)] = np.exp(list(expected.values()))
    assert len(expected) == 1 or chi_square_passes(tokens, probs, np.argsort(-probs))


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
def test_keys_and_uniforms_are_those_of_jax(seed):
    key = jax.random.key(seed)
    ids = np.array([0, 5, 2**31 - 1])
    steps = np.arange(12).reshape(2, 6)
    fold_in = jax.vmap(jax.random.fold_in)
    keys = fold_in(fold_in(jnp.stack([key] * 6), ids.repeat(2)), np.tile(np.arange(2), 3))
    np.testing.assert_array_equal(sample_keys(key, ids, 2), jax.random.key_data(keys))
    with Compilations() as compilations:
        made = make_key(seed, 3, 2**31 - 1)
        assert not compilations.programs
    assert made == jax.random.fold_in(jax.random.fold_in(key, 3), 2**31 - 1)
    expected = [[jax.random.uniform(jax.random.fold_in(keys[i], row[i]), (2,)) for i in range(6)] for row in steps]
    np.testing.assert_array_equal(sampling_uniforms(jax.random.key_data(keys), jnp.asarray(steps)), np.array(expected))


def our_categorical(logits, keys):
    keys = jax.random.key_data(keys)
    return inverse_cdf_sample(logits, sampling_uniforms(keys, jnp.zeros((1, len(keys)), int))[0])


def lmpo_categorical(logits, keys):
    """How kvfrans/lmpo draws: Gumbel noise in bfloat16."""
    return jax.vmap(jax.random.categorical)(keys, logits.astype(jnp.bfloat16)), None


V = 151_936
SHAPES = {"peaked": 3.0, "flat": 0.01}  # deviation of the logits


@pytest.mark.parametrize(
    ("shape", "method", "num_draws"),
    [
        ("peaked", our_categorical, 20_000),
        pytest.param("flat", our_categorical, 100_000, marks=pytest.mark.slow),
        ("flat", lmpo_categorical, 300),
    ],
)
def test_draws_follow_the_softmax(shape, method, num_draws, optimized):
    rng = np.random.default_rng(3)
    logits = SHAPES[shape] * rng.standard_normal(V)
    if shape == "peaked":
        logits[rng.choice(V, 5)] = 14 + np.arange(5)
    logits = jnp.float32(logits)
    probs = np.exp(np.asarray(logits, np.float64))
    probs /= probs.sum()
    draw = jax.jit(lambda keys: jax.lax.map(lambda key: method(logits[None], key[None])[0][0], keys, batch_size=1000))
    draws = np.asarray(draw(jax.random.split(jax.random.key(4), num_draws)))
    ids = np.arange(V)
    orders = {
        "likeliest first": np.argsort(-probs),
        "by id": ids,
        "by place in a block": np.argsort(ids % 128, kind="stable"),
    }
    num_bins = min(100, num_draws // 15)
    passed = {name: chi_square_passes(draws, probs, order, num_bins) for name, order in orders.items()}
    assert all(passed.values()) if method is our_categorical else not all(passed.values()), passed
