"""Conversations against a loop without cache or batch, and what draws do not depend on.

Letters: N prompts, G samples of each.
"""

import os
import random
import re
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from core.chains.attach import attach
from core.chains.turns import Conversations
from core.config import Config
from core.grpo import main
from core.records import Completions, Episodes
from core.rollout import make_worker
from core.sampler import Sampler
from envs import make_env
from envs.base import ForcedAnswer
from envs.scoring.scorer import WaitForMore
from envs.settings import RolloutSettings, resolve_environments, resolve_settings
from extras.replay import Stored, read_stored, replay, weights_before
from models import decoder
from models.architecture import FULL, SLIDING, Decoder
from models.checkpoint import load_model
from models.tokenizer import Tokenizer, load_tokenizer
from tests.conversations import (
    IDS,
    LIMIT,
    LOGIT,
    MAX_TURNS,
    OPERATIONS,
    PROMPTS,
    SEED,
    STOPS,
    TURN,
    WIDTH,
    G,
    Script,
    answer,
    assert_same,
    conversations,
    draw_all,
    rows_of,
)
from tests.helpers import HYBRID, MODEL, ROOT, assert_close, on_layout, random_params, slow
from tests.kill_runs import checksum, reached, records
from tests.oracles.generation import Address, Limits, conversation
from tests.processes import on_four_devices, start_processes, wait, wait_until_gone
from utils.devices.sharding import single_device
from utils.devices.startup import DeviceConfig, make_layout
from utils.processes import descendant_pids
from utils.settings.config import parse
from utils.settings.errors import UserError

TINY = ROOT / "models" / "tiny"
MODELS = MODEL, replace(MODEL, layer_types=(SLIDING, FULL), sliding_window=9), *slow(HYBRID)


teacher_forced = jax.jit(decoder.token_outputs, static_argnums=0)


def one_by_one(model: Decoder, prompt: list[int], task: int, sample: int) -> tuple[list[int], list[bool], bool]:
    address = Address(jax.random.key(SEED), task, sample)
    return conversation(model, prompt, address, Limits(LIMIT, WIDTH), ends_turn, answer)


def ends_turn(turn: list[int]) -> bool:
    return turn[-1] in STOPS or len(turn) == TURN


@pytest.mark.parametrize("model", MODELS, ids=["full", "windows", "hybrid"])
def test_tokens_are_those_of_a_loop_without_cache(model):
    found = rows_of(conversations(model))
    for prompt, task in zip(PROMPTS, IDS, strict=True):
        for sample in (0, 3):
            tokens, mask, _, finished = found[task, sample]
            assert (tokens, mask, finished) == one_by_one(model, prompt, task, sample)


@pytest.mark.parametrize("model", MODELS, ids=["full", "windows", "hybrid"])
def test_logprobs_are_those_of_the_training_pass(model):
    r = conversations(model)
    expected, *_ = teacher_forced(model, random_params(model), r.tokens)
    assert_close(r.logprobs, np.where(r.mask, expected, 0.0), OPERATIONS, LOGIT)
    is_behind = np.arange(r.tokens.shape[1]) >= r.prompt_lengths[:, None]
    is_behind &= np.arange(r.tokens.shape[1]) < r.lengths[:, None]
    np.testing.assert_array_equal(r.num_observed, (is_behind & ~r.mask).sum(1))


def test_the_cases_are_there():
    """Ends by themselves and by the limit, cut turns and stopped ones, chunks of observations of each width."""
    r, script = conversations(), Script()
    draw_all(script)
    turns = [turn for row in script.turns.values() for turn in row]
    assert 0 < r.finished.sum() < len(r.finished)
    assert any(turn[-1] in STOPS for turn in turns)
    assert any(turn[-1] not in STOPS for turn in turns)
    assert min(map(len, script.turns.values())) < max(map(len, script.turns.values())) == MAX_TURNS
    assert r.num_observed.max() > 64
    assert any(len(turn) == 1 for turn in turns)


def test_draws_do_not_depend_on_how_long_an_environment_takes():
    rng = random.Random(0)
    delays = defaultdict(lambda: rng.randrange(6))
    assert_same(rows_of(draw_all(Script(lambda *turn: delays[turn]))), rows_of(conversations()))
    assert_same(rows_of(draw_all(Script(lambda row, turn: 50 * (row % 5 == 0)))), rows_of(conversations()))


def test_nor_on_the_prompts_beside_it():
    ids = [99, *IDS[::-1]]
    found = rows_of(draw_all(prompts=[[1] * 40, *PROMPTS[::-1]], ids=ids), ids)
    assert_same({name: found[name] for name in rows_of(conversations())}, rows_of(conversations()))


@pytest.mark.parametrize("segment", [1, 32])
def test_nor_on_segments(segment):
    assert_same(rows_of(draw_all(segment=segment)), rows_of(conversations()))


LAYOUTS = (DeviceConfig("fsdp"), DeviceConfig(mesh="data=2,tp=2"))


def draw_on_four_devices(file: str) -> None:
    arrays = {}
    for i, config in enumerate(LAYOUTS):
        layout = make_layout(config)
        sampler = Script().sampler(MODEL, layout=layout)
        r = sampler.generate(sampler.load_weights(on_layout(layout)), PROMPTS, np.array(IDS), G, jax.random.key(SEED))
        arrays |= {f"{i} {name}": x for name, x in vars(r).items() if np.ndim(x)}
    np.savez(file, **arrays)


@pytest.mark.slow
def test_nor_on_the_devices(tmp_path):
    on_four_devices(__file__, f"draw_on_four_devices({str(tmp_path / 'drawn.npz')!r})")
    with np.load(tmp_path / "drawn.npz") as arrays:
        for i in range(len(LAYOUTS)):
            names = [name for name, x in vars(conversations()).items() if np.ndim(x)]
            r = Completions(**{name: arrays[f"{i} {name}"] for name in names})
            assert_same(rows_of(r), rows_of(conversations()))


# With a real environment


def guess_worker(layout, model, tokenizer, options: str = "", name: str = "guess"):
    config = parse(Config, ["--env_name", name, "--env_options", "prompt=bare" + options, "--num_score_workers", "2"])
    settings = resolve_settings(config.env, name, 120, 0)
    return make_worker(settings, config.sampling, config.rewards, model, tokenizer, layout)


SMALL = ",max_turns=4,min_size=4,max_size=6,max_number=20"


def turns_of(r: Completions, row: int) -> list[tuple[bool, list[int]]]:
    """Returns the runs of drawn and of observed tokens of a row."""
    columns = slice(r.prompt_lengths[row], r.lengths[row])
    places = range(columns.start, columns.stop)
    runs = groupby(places, key=lambda place: bool(r.mask[row, place]))
    return [(is_drawn, [int(r.tokens[row, place]) for place in run]) for is_drawn, run in runs]


class Arrivals:
    """A condition by a clock of its own: rows come after these gaps."""

    def __init__(self, gaps: Sequence[float]):
        self.gaps, self.num, self.waited = list(gaps), 0, 0.0

    def wait_for(self, predicate, timeout: float) -> None:
        if self.gaps and self.gaps[0] <= timeout:
            self.num += 1
            timeout = self.gaps.pop(0)
        self.waited += timeout


def test_rows_wait_while_more_come_in_a_segment_than_are_there():
    """A segment of one second, two rows that can be sampled: 1/2, 1/3, 1/4 s for one more, and so on."""
    arrivals = Arrivals([0.4, 0.3, 0.2, 0.3])
    WaitForMore(1.0, 2).wait(arrivals, lambda: arrivals.num, lambda: False)
    assert (arrivals.num, arrivals.waited) == (3, pytest.approx(0.4 + 0.3 + 0.2 + 1 / 5))
    arrivals = Arrivals([0.1, 0.1])
    WaitForMore(1.0).wait(arrivals, lambda: arrivals.num, lambda: arrivals.num == 2)
    assert arrivals.waited == 0.2, "none is left"
    WaitForMore().wait(arrivals := Arrivals([0.1]), lambda: arrivals.num, lambda: False)
    assert arrivals.waited == 0


def test_an_episode_is_what_its_turns_make_of_it():
    """Played again by hand from the tokens of each row: what was said, rewards, ends."""
    layout = single_device()
    model, params, tokenizer = load_model(TINY, layout)
    with guess_worker(layout, model, tokenizer, SMALL) as worker:
        weights = worker.load_weights(params)
        episodes = worker.play(weights, np.arange(6), 4, jax.random.key(0))
        again = worker.play(weights, np.arange(6), 4, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, episodes.completions.tokens, again.completions.tokens)
    env = make_env(
        "guess",
        prompt="bare",
        max_turns=4,
        min_size=4,
        max_size=6,
        max_number=20,
    )
    for row, task in enumerate(episodes.task_ids):
        episode = env.episode(env.problem(int(task)), 0)
        total = 0.0
        runs = turns_of(episodes.completions, row)
        for is_drawn, tokens in runs:
            if is_drawn:
                step = episode.step(tokenizer.decode(tokens))
                total += step.reward
                is_closed = tokens[-1] in tokenizer.stop_ids
            else:
                closing = "" if is_closed else "<|im_end|>"
                text = f"{closing}\n<|im_start|>user\n{step.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
                assert tokenizer.hf.decode(tokens) == text + "<think>\n\n</think>\n\n"
        assert episodes.scores["return"][row] == np.float32(total)
        assert episodes.scores["turns"][row] == sum(is_drawn for is_drawn, _ in runs)
        assert episodes.completions.finished[row]
        assert (episodes.stops[row] == "done") == step.done
        if not step.done:
            assert episodes.stops[row] == "max_turns"
            assert episodes.scores["turns"][row] == 4
    assert {*episodes.stops} == {"done", "max_turns"}
    assert not episodes.failed.any()


def play_on_two_processes(file: str) -> None:
    layout = make_layout(DeviceConfig("fsdp"))
    model, params, tokenizer = load_model(TINY, layout)
    with guess_worker(layout, model, tokenizer, SMALL) as worker:
        episodes = worker.play(worker.load_weights(params), np.arange(6), 4, jax.random.key(0))
    if layout.is_main:
        arrays = vars(episodes.completions) | {"return": episodes.scores["return"], "stops": episodes.stops}
        np.savez(file, **{name: x for name, x in arrays.items() if np.ndim(x)})


@pytest.mark.slow
def test_processes_share_the_turns_and_play_the_same(tmp_path):
    file = tmp_path / "played.npz"
    code = f"from tests.core.chains.test_turns import play_on_two_processes; play_on_two_processes({str(file)!r})"
    wait(start_processes(code, num_devices=1, num_processes=2))
    layout = single_device()
    model, params, tokenizer = load_model(TINY, layout)
    with guess_worker(layout, model, tokenizer, SMALL) as worker:
        alone = worker.play(worker.load_weights(params), np.arange(6), 4, jax.random.key(0))
    with np.load(file) as together:
        for name in ("tokens", "mask", "lengths", "finished"):
            np.testing.assert_array_equal(together[name], getattr(alone.completions, name))
        np.testing.assert_array_equal(together["return"], alone.scores["return"])
        assert together["stops"].tolist() == alone.stops


@pytest.mark.parametrize(
    ("model", "force_answer_at", "stop_strings", "message"),
    [
        (HYBRID, 0, ("x",), "Gated DeltaNet"),
        (MODEL, 10, (), "--force_answer_at 0"),
    ],
)
def test_what_cannot_be_played_is_refused(model, force_answer_at, stop_strings, message):
    sampler = Sampler(model, 100, (), stop_strings=stop_strings, tokenizer=load_tokenizer(TINY))
    settings = RolloutSettings("guess", {}, make_env("guess"), 100, force_answer_at, ForcedAnswer())
    with pytest.raises(UserError, match=message):
        attach(sampler, settings, lambda problem: [1])


RUN = (
    "--env_name guess --env_options prompt=bare,min_size=4,max_size=6,max_number=20 --num_generation_tokens 64 "
    "--max_steps 2 --groups_per_batch 6 --group_size 4 --max_resampling 1 --ppo_minibatch 0 --adam_eps 1e-2 "
    "--lr 1e-3 --save_interval 1 --save_rollouts all --advantage turn_zscore --do_group_filter 0"
)
NUM_STEPS, NUM_ROWS = 2, 24


def train(folder: Path) -> None:
    main(parse(Config, [*RUN.split(), "--model_dir", str(TINY), "--save_dir", str(folder)]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder)
    return folder


def rollouts(folder: Path, step: int) -> str:
    return str(folder / "rollouts" / f"step_{step}")


def test_stored_episodes_are_drawn_again(whole, capsys):
    layout = single_device()
    for step, row in ((1, 6), (2, 3)):
        path = rollouts(whole, step)
        stored, _ = read_stored(path, row)
        capsys.readouterr()
        replay(path, row, layout)
        num_tokens = len(stored.tokens) - stored.prompt_length
        printed = capsys.readouterr().out
        assert f"all {num_tokens} tokens are those of the run" in printed
        title = f"step {step}, row {row}, sample {row % G} of problem {stored.task}: "
        assert re.search(rf"^{title}.*Guess \d+ to \d+\.", printed, re.MULTILINE | re.DOTALL)


def play_again(groups: list[Sequence[Stored]], config: Config, step: int) -> Episodes:
    """Plays stored groups from the run's seed, by the weights of their step."""
    layout = single_device()
    model, params, tokenizer = load_model(weights_before(groups[0][0], config), layout)
    settings = resolve_environments(config.env, config.held_out, config.sampling)["env"]
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    with make_worker(settings, config.sampling, config.rewards, model, tokenizer, layout) as worker:
        tasks = np.array([group[0].task for group in groups])
        places = np.array([group[0].position for group in groups])
        return worker.play(worker.load_weights(params), tasks, G, key, places)


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_all_stored_episodes_of_a_step_are_drawn_again(step, whole):
    """48 rows in all, from what is stored of each; the groups are played in reverse."""
    rows = [read_stored(rollouts(whole, step), row) for row in range(NUM_ROWS)]
    stored, (config, *_) = zip(*rows, strict=True)
    reverse = [stored[i : i + G] for i in range(NUM_ROWS - G, -1, -G)]
    episodes = play_again(reverse, config, step)
    assert len({len(conversation) for conversation in episodes.conversations}) > 2
    masks = np.load(Path(rollouts(whole, step)).with_suffix(".npz"))["mask"]
    order = np.arange(NUM_ROWS).reshape(-1, G)[::-1].ravel()
    for row, old in enumerate(order):
        length = episodes.completions.lengths[row]
        np.testing.assert_array_equal(episodes.completions.tokens[row, :length], stored[old].tokens)
        np.testing.assert_array_equal(episodes.completions.mask[row, :length], masks[old, :length])


def train_until_killed(folder: str) -> None:
    """Trains up to the first third turn of the last step; prints the processes that were started, and kills itself."""
    on_end = Conversations.on_end
    calls = []

    def kill_in_third_turn(self, turn):
        on_end(self, turn)
        if self not in calls:
            calls.append(self)
        if len(calls) == NUM_STEPS and len(self.episodes[turn.row].replies) == 3:
            while not Path(folder, "state", "1").is_dir():  # written in the background
                time.sleep(0.01)
            print(*descendant_pids(os.getpid()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    Conversations.on_end = kill_in_third_turn
    train(Path(folder))


def reproducible_records(folder: Path) -> list[dict]:
    """All but the rounding of the sampler: which rows draw together depends on when the environment answers."""
    return [{k: v for k, v in row.items() if not k.startswith("inference_recompute/")} for row in records(folder)]


def test_a_replay_says_why_its_tokens_may_be_others(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "a")
    file = Path(rollouts(tmp_path / "a", 1)).with_suffix(".npz")
    arrays = dict(np.load(file))
    arrays["tokens"][6, arrays["lengths"][6] - 1] += 1  # no weights draw this one
    np.savez(file, **arrays)
    replay(str(file), 6, single_device())
    assert "is another than in the run: its weights, devices or" in capsys.readouterr().out


@pytest.mark.slow
def test_run_killed_within_episodes_ends_as_a_whole_one(whole, tmp_path):
    code = f"from tests.core.chains import test_turns; test_turns.train_until_killed({str(tmp_path)!r})"
    (process,) = start_processes(code, num_devices=1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, output
    pids = [int(pid) for pid in output.splitlines()[-1].split()]
    assert len(pids) > 2, "the helper of the scorer, its keepers and workers"
    wait_until_gone(*pids)
    assert reached(tmp_path) == NUM_STEPS - 1
    train(tmp_path)
    assert reproducible_records(tmp_path) == reproducible_records(whole)
    assert checksum(tmp_path, NUM_STEPS) == checksum(whole, NUM_STEPS)
    found, expected = (load_file(folder / f"step{NUM_STEPS}" / "model.safetensors") for folder in (tmp_path, whole))
    assert found.keys() == expected.keys()
    assert all((found[name] == x).all() for name, x in expected.items())


def test_row_that_is_not_stored_is_named(whole):
    with pytest.raises(UserError, match="give 0 to 23"):
        replay(rollouts(whole, 1), 24, single_device())


QWEN = ROOT.parent / "shared" / "data" / "qwen3-tokenizer"


@pytest.mark.skipif(not QWEN.exists(), reason="the tokenizer of Qwen3 is in shared/data")
@pytest.mark.parametrize("thinking", [True, False])
def test_the_bridge_is_that_of_qwen3(thinking):
    """Ids as written out in Prime Intellect's renderers, Qwen3Renderer.bridge_to_next_turn."""
    tokenizer = load_tokenizer(QWEN)
    opening = "<|im_start|>assistant\n" + "<think>\n\n</think>\n\n" * (not thinking)
    asked = [{"role": "user", "content": "?"}]
    found = tokenizer.bridge(asked, [{"role": "user", "content": "say <|im_end|>"}], thinking)
    assert found.end == [151645]
    assert found.after(151645) == found.ids != found.after(0)
    text = "\n<|im_start|>user\nsay <|im_end|><|im_end|>\n" + opening
    assert tokenizer.hf.decode(found.ids) == text
    assert found.ids.count(151645) == 2, "what a message spells is a token"
    found = tokenizer.bridge(asked, [{"role": "tool", "content": x} for x in "ab"], thinking)
    response = "<tool_response>\n{}\n</tool_response>"
    text = f"\n<|im_start|>user\n{response.format('a')}\n{response.format('b')}<|im_end|>\n"
    assert tokenizer.hf.decode(found.ids) == text + opening


def test_a_template_that_ends_a_reply_otherwise_is_refused():
    tokenizer = load_tokenizer(TINY)
    hf = copy(tokenizer.hf)
    hf.chat_template = "{% for m in messages %}{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="closes a reply differently"):
        Tokenizer(hf).bridge([{"role": "user", "content": "1"}], [{"role": "user", "content": "x"}])
