"""Meshes: a step of GRPO of a small model is the same on all of them, what is large is cut, and little is sent."""

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from bench import hlo, scaling
from core import grpo
from core.advantages import ObjectiveConfig
from core.config import Config
from core.learner import accumulate, apply_gradients
from core.records import Batch, Completions
from core.sampler import Sampler
from core.slots.decode import decode_pages
from core.slots.prefill import prefill_pages
from models import decoder
from models.checkpoint import load_model
from models.distribution import Distribution
from models.memory import weights_bytes
from models.names import Params
from models.optimizers import OptimizerConfig, make_optimizer
from models.packing import pack_rows
from models.pages import Pages, new_state
from models.state import init_state
from tests.helpers import (
    HYBRID,
    MODEL,
    assert_close,
    depth,
    gradient_depth,
    on_layout,
    random_tokens,
    read_jsonl,
    rounding,
    slow,
    write_one_layer,
)
from tests.kill_runs import arguments, reproducible
from tests.processes import start_processes, wait
from utils.batching import MicrobatchShape, empty_rows
from utils.devices.sharding import Layout, bytes_on_device, sharding_of, single_device
from utils.devices.startup import (
    DeviceConfig,
    arrange_devices,
    arrange_mesh,
    ending_together,
    make_layout,
    mesh_sizes,
)
from utils.settings.config import parse
from utils.settings.lmpo import LMPO

SHARDINGS = ("dp", "fsdp", "tp", "fsdp_tp")
NUM_DEVICES, NUM_PROCESSES = (4, 8), (2, 4)
FLAGS = {
    "env_name": "poem", "test_env_name": "poem-test", "groups_per_batch": 2, "group_size": 4, "ppo_minibatch": 4,
    "num_generation_tokens": 12, "max_steps": 1, "advantage": "group_mean", "do_group_filter": 0, "num_eval_tasks": 2,
    "num_eval_samples": 4, "num_score_workers": 1, "tokens_per_microbatch": 128, "use_remat": 0, "entropy_coef": 0.1,
    "prompt_length": 64,
    # Steps of Adam that follow the size of the gradient: with its own epsilon, the sign of a rounding error is one.
    "lr": 1e-3, "adam_eps": 1e-2, "weight_decay": 0,
}  # fmt: skip
SURPRISE = 10.0  # nats of an unlikely token, which metrics are made from
WIDTH, NUM_TOKENS = 64 + FLAGS["num_generation_tokens"], 8 * FLAGS["num_generation_tokens"]  # of a row, of a batch


class Replaying(NamedTuple):
    """Takes the draws of a step back that fall on the other side of an edge, and shows that they do."""

    expected: list[Completions]  # of the step that this one is compared with; empty: there is none
    drawn: list[Completions]
    params: list[Params]  # that were loaded last

    def load(self, sampler: Sampler, params: Params) -> Params:
        self.params[:] = [params]
        return LOAD_WEIGHTS(sampler, params)

    def draw(self, sampler: Sampler, weights: Params, prompts: list[list[int]], keys: jax.Array) -> Completions:
        found = DRAW(sampler, weights, prompts, keys)
        self.drawn.append(found)
        if not self.expected:
            return found
        known = self.expected[len(self.drawn) - 1]
        for row in np.flatnonzero((found.tokens != known.tokens).any(axis=1)):
            self.assert_near_edge(sampler, found, known, row, keys[row])
        same = np.logical_and.accumulate(found.tokens == known.tokens, axis=1)
        # The last draws are those of the evaluation after the update, which comes from a gradient.
        operations = depth(sampler.model, WIDTH)
        if len(self.drawn) == len(self.expected):
            operations += gradient_depth(sampler.model, WIDTH, NUM_TOKENS)
        assert_close(found.logprobs[same], known.logprobs[same], operations)
        return known

    def assert_near_edge(self, sampler: Sampler, found: Completions, known: Completions, row: int, key) -> None:
        at = int(np.argmax(found.tokens[row] != known.tokens[row]))
        start = int(found.prompt_lengths[row])
        assert (found.prompt_lengths == known.prompt_lengths).all()
        assert at >= start
        params = sampler.layout.fetch(self.params[0])
        logits = decoder.logits(sampler.model, params, jnp.asarray(known.tokens[row, :at][None]))[0, -1]
        key = jax.random.fold_in(jax.random.wrap_key_data(key), at - start)
        distance = from_edge(logits, key, int(found.tokens[row, at]), int(known.tokens[row, at]))
        limit = rounding(depth(sampler.model, WIDTH), np.abs(logits).max())
        assert distance < limit, f"row {row}, token {at - start}: the draw is {distance} away from the edge"
        print(f"a draw {distance} from an edge fell on its other side: replaying the tokens")


LOAD_WEIGHTS = Sampler.load_weights
DRAW = Sampler.draw


def step_of_grpo(folder: Path, recorded: Path, **flags) -> None:
    """The command on this mesh; draws that fall on the other side of an edge are shown to do so and taken back."""
    records = pickle.loads(recorded.read_bytes()) if recorded.exists() else []
    replaying = Replaying(records, [], [])
    flags |= {"model_dir": recorded.parent / "model", "save_dir": folder}
    config = parse(Config, arguments(**FLAGS | flags), spellings=LMPO)
    with pytest.MonkeyPatch.context() as patch:
        # What is drawn is compared with the record, and then replaced by it.
        patch.setattr(Sampler, "load_weights", lambda *given: replaying.load(*given))
        patch.setattr(Sampler, "draw", lambda *given: replaying.draw(*given))
        grpo.main(config)
    assert replaying.drawn
    assert len(replaying.drawn) == len(records or replaying.drawn)
    if not records:
        recorded.write_bytes(pickle.dumps(replaying.drawn))


def from_edge(logits, key, *tokens: int) -> float:
    """How far the uniform number that chose between two tokens lies from the edge between them, of a total of 1."""
    mass = np.exp(np.asarray(logits, np.float64))
    mass = np.pad(mass, (0, -len(mass) % 128)).reshape(128, -1)
    uniform = np.asarray(jax.random.uniform(key, (2,)), np.float64)
    (low, high), level = sorted(t // mass.shape[1] for t in tokens), 0
    masses = mass.sum(1)
    if low == high:
        (low, high), level, masses = sorted(t % mass.shape[1] for t in tokens), 1, mass[low]
    edges = np.cumsum(masses)[low:high] / masses.sum()
    return float(np.abs(edges - uniform[level]).max())


def step_on_mesh(folder: str, name: str) -> None:
    """A step under this sharding, in this process, on all devices that there are."""
    folder = Path(folder)
    n = jax.device_count()
    flags = {"rollout_tp": n} if name == "rollout_tp" else {"sharding": name}
    step_of_grpo(folder / f"{n}-{name}", folder / "recorded", **flags)


def hosts_step(folder: str, num_processes: int) -> None:
    """This process's part of a step on several."""
    folder = Path(folder)
    mesh = {"mesh": "fsdp=2,tp=2", "rollout_tp": 4} if num_processes == 2 else {"mesh": f"data={num_processes},fsdp=-1"}
    with ending_together():
        step_of_grpo(folder / f"hosts-{num_processes}", folder / "recorded", **mesh)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folder of runs, with the one that the others are compared with: on 1 device."""
    folder = tmp_path_factory.mktemp("runs")
    write_one_layer(folder / "model")
    step_on_mesh(str(folder), "dp")
    return folder


CALL = "from tests.core.test_meshes import *; "
CASES = [f"{n}-{name}" for n in NUM_DEVICES for name in (*SHARDINGS, "rollout_tp")]
CASES += [f"hosts-{n}" for n in NUM_PROCESSES]
QUICK = ("4-fsdp_tp",)


@pytest.mark.parametrize("case", [*QUICK, *slow(*(case for case in CASES if case not in QUICK))])
def test_a_step_does_not_depend_on_the_mesh(runs, case):
    """On several devices under each sharding, and in several processes with 2 devices each."""
    first, second = case.split("-")
    if first == "hosts":
        call = f"hosts_step({str(runs)!r}, {second})"
        n = int(second)
        wait(start_processes(CALL + call, num_devices=2, num_processes=n))
    else:
        wait(start_processes(f"{CALL}step_on_mesh({str(runs)!r}, {second!r})", num_devices=int(first)))
    before = load_file(runs / "model" / "model.safetensors")
    expected, found = (load_file(runs / name / "step1" / "model.safetensors") for name in ("1-dp", case))
    assert max(np.abs(expected[name] - before[name]).max() for name in before) > 1e-3, "a step that can be seen"
    records = [read_jsonl(runs / name / "metrics.jsonl") for name in ("1-dp", case)]
    assert [r["global_step"] for r in records[1]] == [0, 1]
    assert records[0][1]["grad_norm"] > 0
    model = load_model(runs / "model")[0]
    operations = gradient_depth(model, WIDTH, NUM_TOKENS)
    # Adam's first step is lr g / (|g| + eps): at its steepest it moves by lr / eps of what g does.
    moved = FLAGS["lr"] / FLAGS["adam_eps"] * rounding(operations, records[0][1]["grad_norm"])
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=rounding(4), atol=moved, err_msg=name)
    for one, other in zip(*records, strict=True):
        assert one.keys() == other.keys()
        for name in reproducible(one):
            size = np.abs(one[name]).max(initial=SURPRISE)  # how far sampler and trainer differ is rounding itself
            assert_close(other[name], one[name], operations, size, err_msg=name)
    texts = [[row["text"] for row in read_jsonl(runs / name / "rollouts" / "step_1.jsonl")] for name in ("1-dp", case)]
    assert texts[0] == texts[1]


# What lies where


def shardings_on_eight_devices() -> None:
    """Asserts on the arrays of a step under fsdp=4,tp=2."""
    layout = make_layout(DeviceConfig(mesh="fsdp=4,tp=2"))
    params = on_layout(layout)
    q = params["model.layers"]["self_attn.q_proj.weight"]
    norm = params["model.norm.weight"]
    assert q.sharding.spec == P(None, "tp", "fsdp")
    assert norm.sharding.is_fully_replicated
    found = params["model.embed_tokens.weight"].addressable_shards[0].data.size * 8
    assert found == MODEL.vocab_size * 32
    updated = shardings_of_an_update(layout, params)
    shardings_of_the_sampler(layout, updated)


def assert_same_shardings(tree: Params, params: Params) -> None:
    for x, p in zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
        assert x.sharding.is_equivalent_to(p.sharding, p.ndim)


def batch_of_ones(B: int, T: int) -> Batch:
    ones = np.ones((B, T), np.float32)
    rows = {"rewards": ones[:, 0], "lengths": np.full(B, T), "prompt_lengths": np.full(B, 1)}
    rows |= {"denominator": ones[:, 0], "num_tokens": ones[:, 0]}
    tokens = {"tokens": np.ones((B, T), np.int32), "mask": ones > 0, "sample_logprobs": ones, "old_logprobs": -ones}
    return Batch(**rows, **tokens, advantages=ones)


def shardings_of_an_update(layout: Layout, params: Params) -> Params:
    B, T = 8, 32
    optimizer = make_optimizer(OptimizerConfig())
    state = init_state(params, optimizer)
    states = jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    (moments,) = (x for x in states if hasattr(x, "mu"))
    assert_same_shardings(moments.mu, params)
    assert_same_shardings(moments.nu, params)
    batch = layout.put(batch_of_ones(B, T))
    assert {x.sharding.spec for x in jax.tree.leaves(batch)} == {P(("data", "fsdp"))}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), params)
    packing = layout.put(pack_rows(empty_rows(B, T), MicrobatchShape(2, T, 2 * T), shards=4))
    sums = (zeros, np.float32(0))
    (grads, _), _ = accumulate(MODEL, ObjectiveConfig().loss, Distribution(), params, sums, batch, packing)
    assert_same_shardings(grads, params)
    state, _ = apply_gradients(optimizer, 0, state, grads)
    assert_same_shardings(state.params, params)
    return state.params


def shardings_of_the_sampler(layout: Layout, params: Params) -> None:
    weights = Sampler(MODEL, 8, (3,), layout=layout).load_weights(params)
    specs = {x.sharding.spec for x in jax.tree.leaves(weights)}
    assert not any("fsdp" in spec or "data" in spec for spec in specs)
    assert any("tp" in spec for spec in specs)
    state = new_state(MODEL, layout, num_pages=32, page=8, num_slots=16)
    by_pages = sharding_of(layout.mesh, (32, 8, 4, 8), ("rows", None, "kv_heads", None))
    assert by_pages.shard_shape((32, 8, 4, 8)) == (8, 8, 2, 8)
    in_shard = np.arange(16) % 4
    table = 2 * in_shard[:, None] + np.arange(2)
    columns, counts = np.zeros(16), np.full(16, 8)
    pages, tokens = layout.put((Pages(*map(np.int32, (table, in_shard, columns, counts))), np.ones((16, 8), np.int32)))
    state = prefill_pages(MODEL, weights, state, pages, tokens, None)
    last_tokens, *rows = layout.put((*np.zeros((3, 16), np.int32), np.ones((16, 2), np.uint32)))
    arguments = MODEL, Distribution(), 4, (), weights, state, last_tokens, pages, *rows
    text = decode_pages.lower(*arguments).compile().as_text()
    groups = {frozenset(group) for transfer in hlo.transfers(text, [0] * 8) for group in transfer.groups}
    assert groups == {frozenset((i, i + 1)) for i in range(0, 8, 2)}, "rows stay on their device: tp alone sends"
    state, _, (tokens, *_) = decode_pages(*arguments)
    assert all(x.sharding.is_equivalent_to(by_pages, 4) for x in jax.tree.leaves(state))
    assert tokens.sharding.shard_shape(tokens.shape) == (4, 4)


def test_all_that_is_large_is_cut():
    wait(start_processes(f"{CALL}shardings_on_eight_devices()", num_devices=8))


SMALLER = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": True}
ODD = {"vocab_size": 201}  # which no number of devices divides
ODD_HEADS = HYBRID.delta._replace(num_key_heads=1, num_value_heads=3)
KINDS = {"dense": replace(MODEL, **ODD), "hybrid": HYBRID, "experts": replace(MODEL, **ODD, **SMALLER)}
KINDS["odd hybrid"] = replace(HYBRID, delta=ODD_HEADS)


def tokens_of_cut_weights(kind: str, *cases: tuple[str, int]) -> None:
    """Asserts that meshes whose weights --rollout_tp cuts draw what a device draws that has them whole."""

    def draw(layout, rollout):
        sampler = Sampler(replace(KINDS[kind], mesh=layout.mesh), 12, (3,), layout=layout).on(rollout)
        weights = sampler.load_weights(on_layout(layout, KINDS[kind]))
        assert bytes_on_device(weights) == weights_bytes(sampler.model, rollout)
        return sampler.generate(weights, [[1, 7], [2, 7, 9], [3, 7], [4, 7, 9]], np.arange(4), 2, jax.random.key(0))

    expected = draw(single_device(), single_device())
    for mesh, tp in cases:
        layout = make_layout(DeviceConfig(mesh=mesh))
        found = draw(layout, layout.with_tp(tp))
        assert (found.tokens == expected.tokens).all(), mesh
        assert_close(found.logprobs, expected.logprobs, depth(KINDS[kind], 16), err_msg=mesh)


@pytest.mark.parametrize("kind", ["dense", *slow("hybrid", "experts")])
def test_weights_that_are_cut_for_sampling_draw_the_same_tokens(kind):
    """Over 8 devices each of 2 key heads is whole on all of them."""
    cases = ("fsdp=8", 8), ("fsdp=4,tp=2", 8), ("data=2,fsdp=4", 4)
    cases += (("fsdp=8", 2), ("data=2,fsdp=4", 2)) if kind != "dense" else ()
    wait(start_processes(f"{CALL}tokens_of_cut_weights({kind!r}, *{cases})", num_devices=8))


def scores_of_any_rows(kind: str, *cases: tuple[int, str]) -> None:
    """Asserts that meshes score rows which they do not divide as one device does, gradients too."""
    model = KINDS[kind]

    def scores(layout: Layout, num_rows: int) -> tuple[np.ndarray, dict]:
        on_mesh = replace(model, mesh=layout.mesh)
        tokens = layout.put(random_tokens(model.vocab_size, num_rows, 24))

        def total(params: Params) -> tuple[jax.Array, jax.Array]:
            logprobs = decoder.token_outputs(on_mesh, params, tokens).logprobs
            return -logprobs.mean(), logprobs

        gradient, logprobs = jax.jit(jax.grad(total, has_aux=True))(on_layout(layout, model))
        return layout.fetch((logprobs, gradient))

    for num_rows in (1, 3, 5):
        expected, gradient = scores(single_device(), num_rows)
        assert np.abs(expected).max() > 1
        for num_devices, mesh in cases:
            found, moved = scores(arrange_mesh(DeviceConfig(mesh=mesh), jax.devices()[:num_devices]), num_rows)
            assert_close(found, expected, depth(model, 24), err_msg=mesh)
            operations = gradient_depth(model, 24, num_rows * 24)
            for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(gradient), strict=True):
                assert_close(x, y, operations, max(1.0, np.abs(y).max()), err_msg=mesh)


@pytest.mark.parametrize("kind", ["dense", *slow("hybrid", "experts", "odd hybrid")])
def test_any_number_of_rows_is_scored_on_any_mesh(kind):
    cases = (2, "fsdp=2"), (4, "data=4"), (4, "fsdp=2,tp=2")
    wait(start_processes(f"{CALL}scores_of_any_rows({kind!r}, *{cases})", num_devices=4))


def communication_on_eight_devices() -> None:
    n = jax.device_count()
    found = scaling.measure(scaling.Command(tokens=128), n)
    assert found["held"] * n == pytest.approx(found["whole"], rel=0.1)
    sent = sum(found.get(kind, 0) for kind in hlo.COLLECTIVES)
    least = hlo.fsdp_minimum(scaling.QWEN3.num_parameters, {"data": 1, "fsdp": n, "tp": 1}, itemsize=4)
    assert 0.6 < sent / least < 1.5, found


@pytest.mark.slow
def test_an_update_sends_little_more_than_the_parameters():
    """Within 1.5 of what fsdp must send, for the shape of Qwen3-0.6B."""
    wait(start_processes(f"{CALL}communication_on_eight_devices()", num_devices=8))


def test_copies_stand_on_slices():
    """Hosts of GPUs, or TPU slices, as JAX numbers them: the slow network carries the data axis alone."""
    kind = {"platform": "gpu", "device_kind": "NVIDIA H200"}
    devices = [SimpleNamespace(id=i, process_index=i // 4, slice_index=i // 4, **kind) for i in range(16)]
    slices_of = np.vectorize(lambda device: device.slice_index)
    sizes = mesh_sizes(DeviceConfig("fsdp_tp"), 16, 4)
    assert sizes == {"data": 4, "fsdp": 2, "tp": 2}
    slices = slices_of(arrange_devices(sizes, devices))
    assert slices.shape == (4, 2, 2)
    assert all(len(set(copy.ravel())) == 1 for copy in slices)
    asked = mesh_sizes(DeviceConfig(mesh="data=-1,fsdp=8"), 16, 4)
    assert asked == {"data": 2, "fsdp": 8, "tp": 1}
    slices = slices_of(arrange_devices({"data": 1, "fsdp": 16, "tp": 1}, devices))
    assert [len(set(part)) for part in slices.reshape(4, 4)] == [1] * 4, "neighbors first"
    with pytest.raises(ValueError, match="--mesh .* multiple of the 4 slices"):
        arrange_devices({"data": 2, "fsdp": 2, "tp": 2}, devices)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DeviceConfig(mesh="fsdp"), "--mesh 'fsdp' has another form"),
        (DeviceConfig(mesh="rows=4"), "--mesh has no axis rows"),
        (DeviceConfig(mesh="fsdp=3"), "--mesh fsdp=3 makes .* JAX finds 8 devices"),
        (DeviceConfig("fsdp_tp"), "--sharding fsdp_tp makes .* JAX finds 1 device: give sizes"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_its_flag(config, words):
    with pytest.raises(ValueError, match=words):
        mesh_sizes(config, 1 if config.sharding == "fsdp_tp" else 8, 1)
