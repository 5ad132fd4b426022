"""Drafts against a plain search, and completions with drafts against those without."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from helpers import HYBRID, MODEL, on_four_devices, on_layout, slow
from test_sampling import IDS, KEY, LIMIT, PROMPTS, G, assert_same, completions, draw_all

from core.config import Config
from core.extensions import speculation
from core.extensions.attach import with_options
from core.extensions.speculation import look_up
from core.records import Completions
from core.sampler import Sampler
from models.distribution import Distribution
from utils.devices.startup import DeviceConfig, make_layout
from utils.settings.config import make_config
from utils.settings.errors import UserError


def plain_look_up(text: list[int], num_tokens: int) -> list[int]:
    """What followed the last place with most of the last tokens, at least 2 and at most 8, repeated."""
    found = []
    for place in range(1, len(text)):
        n = 0
        while n < min(8, place) and text[place - 1 - n] == text[len(text) - 1 - n]:
            n += 1
        found.append((n, place))
    n, place = max(found, default=(0, 0))
    if n < 2:
        return [-1] * num_tokens
    following = text[place:]
    return [following[i % len(following)] for i in range(num_tokens)]


def test_a_draft_is_what_followed_the_same_tokens():
    random = np.random.default_rng(0)
    texts = [random.integers(0, letters, n).tolist() for letters in (1, 2, 5) for n in range(1, 40)]
    texts += [part * 6 for part in ([1, 2, 3], [4, 4, 5, 6, 7, 8, 9, 1, 2])]
    padded = np.full((len(texts), 64), 3, np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    drafts = np.asarray(jax.jit(look_up, static_argnums=2)(padded, np.array([len(text) for text in texts]), 5))
    for draft, text in zip(drafts.tolist(), texts, strict=True):
        assert draft == plain_look_up(text, 5), text
    assert (drafts[:, 0] < 0).any() and (drafts[:, 0] >= 0).sum() > len(texts) // 3


MIXTURE = replace(MODEL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SETTINGS = [
    ("greedy", MODEL, Distribution(0.0), 100),
    ("experts, cut", MIXTURE, Distribution(0.3, top_k=20, top_p=0.95), 100),
    pytest.param("sharp, cut", MODEL, Distribution(0.3, top_k=20, top_p=0.95), 100, marks=pytest.mark.slow),
    pytest.param("flat", MODEL, Distribution(0.8), 20, marks=pytest.mark.slow),
    pytest.param("experts", MIXTURE, Distribution(0.3), 100, marks=pytest.mark.slow),
]


@pytest.fixture
def all_rows_are_a_tail(monkeypatch):
    monkeypatch.setattr(speculation, "TAIL_SLOTS_ON_CPU", 64)
    monkeypatch.setattr(speculation, "PAUSE", 8)


def stops(model, every: int) -> tuple[int, ...]:
    return tuple(range(every // 2, model.vocab_size, every))


@pytest.mark.parametrize(("name", "model", "distribution", "every"), SETTINGS, ids=lambda x: str(x)[:12])
@pytest.mark.parametrize("case", ["4", *slow("1 compacted", "4 compacted")])
@pytest.mark.usefixtures("all_rows_are_a_tail")
def test_what_is_drawn_does_not_depend_on_drafts(name, model, distribution, every, case, monkeypatch):
    """With all slots until the end, which takes few programs, and with fewer and fewer."""
    is_compacted, num_drafted = "compacted" in case, int(case[0])
    if not is_compacted:
        monkeypatch.setattr(speculation.SpeculativeChain, "compact", lambda chain: None)
    sampler = Sampler(model, 3 * LIMIT, stops(model, every), distribution, fewest_slots=8 if is_compacted else 1 << 20)
    alone, found = draw_all(sampler), draw_all(with_options(sampler, num_drafted))
    assert_same(completions(found), completions(alone))
    np.testing.assert_array_equal(found.mask, alone.mask)
    for drawn in ("support", "routes"):
        if getattr(alone, drawn) is not None:
            assert (getattr(found, drawn) == getattr(alone, drawn)).mean() > 0.999
    assert (0 <= found.num_accepted).all() and (found.num_accepted <= found.num_drafted).all()
    if name == "greedy":  # which falls into loops
        assert found.num_accepted.sum() > 50


SHARP = Sampler(MODEL, 4 * LIMIT, stops(MODEL, 20), Distribution(0.3))


@cache
def sharp() -> Completions:
    return draw_all(SHARP)


def test_only_the_tail_is_drafted():
    heard = []
    sampler = with_options(SHARP, 3)
    found = draw_all(replace(sampler, on_segment=lambda *segment: heard.append(segment)))
    assert_same(completions(found), completions(sharp()))
    drafted = np.flatnonzero(found.num_drafted)
    lengths = found.lengths - found.prompt_lengths
    assert 0 < len(drafted) <= 2 and lengths[drafted].min() >= np.sort(lengths)[-2]
    *_, num_drawn, ended = heard[-1]
    assert (ended <= num_drawn).all() and (ended == lengths[-len(ended) :]).all()


def draw_with_drafts_on_four_devices(file: str) -> None:
    speculation.TAIL_SLOTS_ON_CPU, speculation.PAUSE = 64, 8
    layout = make_layout(DeviceConfig(mesh="data=2,tp=2"))
    sampler = with_options(replace(SHARP, layout=layout), 3)
    r = sampler.generate(sampler.load_weights(on_layout(layout, MODEL)), PROMPTS, np.array(IDS), G, KEY)
    np.savez(file, **{name: x for name, x in vars(r).items() if np.ndim(x)})


@pytest.mark.slow
def test_devices_share_the_rows_of_a_tail(tmp_path):
    on_four_devices(__file__, f"draw_with_drafts_on_four_devices({str(tmp_path / 'drawn.npz')!r})")
    with np.load(tmp_path / "drawn.npz") as arrays:
        found = Completions(**arrays)
    assert_same(completions(found), completions(sharp()))
    assert found.num_drafted.sum() > 0


def test_what_cannot_be_drafted_is_said():
    with pytest.raises(UserError, match="Gated DeltaNet"):
        with_options(Sampler(HYBRID, LIMIT, ()), 3)
    with pytest.raises(UserError, match="force_answer_at 0"):
        with_options(Sampler(MODEL, LIMIT, ()), 3, 8)
    assert with_options(SHARP, 3) == with_options(SHARP, 3), "members of a population draw together"
    with pytest.raises(UserError, match="--precompile"):
        make_config(Config, num_speculative_tokens=3, precompile=True)
