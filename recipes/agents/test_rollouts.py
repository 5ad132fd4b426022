"""Programs against the same episodes within the run: equal tokens, masks, log-probabilities, training; and forks."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")

from core.config import Config  # noqa: E402
from core.grpo import main, rollout_batch  # noqa: E402
from core.records import Episodes  # noqa: E402
from core.rollout import RolloutWorker, make_worker  # noqa: E402
from core.sampler import SamplingConfig  # noqa: E402
from envs.scoring.shaping import RewardConfig  # noqa: E402
from envs.settings import EnvConfig, resolve_settings  # noqa: E402
from models.checkpoint import load_model  # noqa: E402
from tests.helpers import ROOT  # noqa: E402
from utils.devices.sharding import single_device  # noqa: E402
from utils.settings.config import parse  # noqa: E402
from utils.threefry import make_key  # noqa: E402

PLAYER = ROOT / "models/player"
CLASS = """
import re

class Guess:
    def reset(self, low, high, number):
        self.number = number
        return f"Guess {low} to {high}."

    def step(self, action):
        guess = int((re.findall(r"\\d+", action) or [-1])[-1])
        text = "higher" if self.number > guess else "lower"
        return text, float(guess == self.number), guess == self.number, {}
"""
PROGRAM = """
import json, os, random, re, signal, subprocess, threading, time, urllib.error, urllib.request

OTHER = [{"role": "user", "content": "\\nGuess 1 to 9."}]

def ask(base_url, api_key, messages, **more):
    body = json.dumps({"messages": messages, "return_token_ids": True, "logprobs": True, **more}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
    return json.loads(urllib.request.urlopen(request).read())

def reply(base_url, api_key, messages, **more):
    messages.append(ask(base_url, api_key, messages, **more)["choices"][0]["message"])
    return messages[-1]

def opening(low, high):
    return [{"role": "user", "content": f"\\nGuess {low} to {high}."}]

def guess(low, high, number, base_url, api_key):
    messages = opening(low, high)
    for turn in range(5):
        time.sleep(random.random() / 50)
        said = int((re.findall(r"\\d+", reply(base_url, api_key, messages)["content"]) or [-1])[-1])
        if said == number:
            return 1.0
        messages.append({"role": "user", "content": "higher" if number > said else "lower"})
    return 0.0

def forking(low, high, number, base_url, api_key):
    result = guess(low, high, number, base_url, api_key)
    if number % 8:
        ask(base_url, api_key, OTHER)
    return result

def leaving(low, high, number, base_url, api_key):
    ask(base_url, api_key, opening(low, high))
    threading.Thread(target=ask, args=(base_url, api_key, OTHER), daemon=True).start()
    time.sleep(0.02 * (number % 7))
    return 0.5

def planning(low, high, number, base_url, api_key):
    messages = opening(low, high)
    reply(base_url, api_key, messages)
    time.sleep(0.5)
    messages.append(reply(base_url, api_key, [*OTHER]) | {"role": "user"})
    ask(base_url, api_key, messages)
    return 0.5

def writing(low, high, number, base_url, api_key, folder):
    answer = ask(base_url, api_key, opening(low, high))
    choice = answer["choices"][0]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    with open(f"{folder}/{api_key}.json", "w") as file:
        json.dump([answer["prompt_token_ids"], choice["token_ids"], logprobs], file)
    return 0.5

def killed(low, high, number, base_url, api_key):
    if number % 5 > 1:
        return guess(low, high, number, base_url, api_key)
    subprocess.Popen(["sleep", str(10**6 + number)], start_new_session=True)
    messages = opening(low, high)
    for turn in range(number % 3):
        reply(base_url, api_key, messages)
        messages.append({"role": "user", "content": "lower"})
    threading.Timer(random.random() / 20, os.kill, (os.getpid(), signal.SIGKILL)).start()
    ask(base_url, api_key, messages)
    time.sleep(60)

def fragile(low, high, number, base_url, api_key):
    if number % 8 == 3:
        raise ValueError("before it asks")
    if number % 8 == 2:
        try:
            ask(base_url, api_key, [{"role": "user", "content": "\\nGuess 1 to 9." * 50}])
        except urllib.error.HTTPError:
            return 0.0
    return guess(low, high, number, base_url, api_key)

def stopping(low, high, number, base_url, api_key):
    messages = opening(low, high)
    for turn in range(3):
        reply(base_url, api_key, messages, stop=["1", "3", "5", "7"])
        messages.append({"role": "user", "content": "lower"})
    return 0.5

def long(low, high, number, base_url, api_key):
    messages = opening(low, high)
    try:
        while True:
            reply(base_url, api_key, messages)
            messages.append({"role": "user", "content": "lower"})
    except urllib.error.HTTPError as error:
        return float("context length" in error.read().decode()) / 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "game.py").write_text(CLASS)
    (folder / "agent.py").write_text(PROGRAM)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        low, size = int(rng.integers(1, 69)), int(rng.integers(16, 32))
        row = {"low": low, "high": low + size, "number": low + int(rng.integers(0, size + 1))}
        rows.append(row | {"folder": str(folder)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def worker_of(folder: Path, name: str, **options: object) -> tuple[RolloutWorker, object]:
    """A worker over pages, and the weights of models/player."""
    layout = single_device()
    model, params, tokenizer = load_model(PLAYER, layout)
    turns = ",max_turns=5" if name == "dataset" else ""
    options = EnvConfig(name, f"path={folder / 'rows.jsonl'},tokens_per_action=96{turns}", **options)
    sampling, settings = SamplingConfig(prompt_length=64, page_size=16), resolve_settings(options, name, -1, -1)
    worker = make_worker(settings, sampling, RewardConfig(num_score_workers=1), model, tokenizer, layout)
    return worker, worker.load_weights(params)


def rows_of(episodes: Episodes) -> list[tuple]:
    completions = episodes.completions
    ends = completions.lengths.tolist()
    return [
        (completions.tokens[i, :end].tolist(), completions.mask[i, :end].tolist(), completions.logprobs[i, :end])
        for i, end in enumerate(ends)
    ]


@pytest.fixture(scope="module")
def play(folder):
    """Plays tasks by a function of agent.py."""

    def play(function: str, num_tasks: int = 16, num_samples: int = 2, num_slots: int = 0) -> Episodes:
        worker, weights = worker_of(folder, "agent", agent=f"{folder / 'agent.py'}:{function}")
        paging = replace(worker.sampler.paging, num_slots=num_slots)
        worker = replace(worker, sampler=replace(worker.sampler, paging=paging))
        with worker:
            return worker.play(weights, np.arange(num_tasks), num_samples, make_key(3))

    return play


def test_rows_are_those_of_the_native_environment(folder, play):
    """Arrival is random: the program waits at random before each request."""
    worker, weights = worker_of(folder, "dataset", episode=f"{folder / 'game.py'}:Guess")
    with worker:
        native = worker.play(weights, np.arange(16), 2, make_key(3))
    agent = play("guess")
    assert agent.scores["forks"].sum() == 0
    np.testing.assert_array_equal(agent.scores["return"], native.scores["return"])
    for own, other in zip(rows_of(agent), rows_of(native), strict=True):
        assert own[:2] == other[:2], "the same tokens are sampled and trained"
        np.testing.assert_allclose(own[2], other[2], atol=1e-5)


def test_a_program_gets_the_tokens_that_are_trained(folder, play):
    episodes = play("writing", num_samples=1)
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    rows = {
        (tuple(tokens), tuple(np.flatnonzero(mask).tolist())): logprobs[np.array(mask)]
        for tokens, mask, logprobs in rows_of(episodes)
    }
    assert len(found) == len(rows) == 16
    for prompt, ids, logprobs in found:
        place = tuple(range(len(prompt), len(prompt) + len(ids)))
        np.testing.assert_array_equal(np.float32(logprobs), np.minimum(rows[(*prompt, *ids), place], 0))


def test_another_conversation_is_another_row_of_its_rollout(play):
    native, episodes = play("guess"), play("forking")
    numbers = np.array([problem.answer["number"] for problem in episodes.problems])
    np.testing.assert_array_equal(episodes.scores["forks"], numbers % 8 > 0)
    np.testing.assert_array_equal(episodes.rollout, np.repeat(np.arange(len(numbers)), 1 + (numbers % 8 > 0)))
    rows, firsts = rows_of(episodes), episodes.first_rows.tolist()
    for own, other in zip([rows[row] for row in firsts], rows_of(native), strict=True):
        assert own[:2] == other[:2], "the program's first row is as without another"
    others = [row for number, row in enumerate(rows) if number not in firsts]
    assert all(any(mask) for _, mask, _ in others)
    assert len({tuple(tokens) for tokens, *_ in others}) > 1, "they have keys of their own"


@pytest.mark.parametrize("function", ["leaving", "planning"])
def test_conversations_that_outlive_programs_or_wait(function, play):
    """The first ends while its second conversation is answered; in the second, eight slots serve 16 conversations."""
    episodes = play(function, num_tasks=4, num_slots=8)
    assert not episodes.failed.any()
    if function == "planning":
        assert np.bincount(episodes.rollout).tolist() == [2] * 8


def test_rows_hold_the_replies_that_programs_got(play):
    """A reply without its stop text is what the next turn continues, in its row or in another."""
    tokenizer, episodes = load_model(PLAYER, single_device())[2], play("stopping", num_tasks=8)
    last = set(np.flatnonzero(np.diff(episodes.rollout, append=-1)).tolist())
    for row, (tokens, _, _) in enumerate(rows_of(episodes)):
        said = tokenizer.hf.decode(tokens).partition("lower")
        replies = said[0].rpartition("Guess")[2].partition("assistant")[2] if said[1] else ""
        assert not set(replies) & set("1357"), (row, row in last, tokenizer.hf.decode(tokens))
    assert not episodes.failed.any()
    batch = rollout_batch(episodes, Config())
    np.testing.assert_array_equal(batch.token_rewards.sum(axis=1), 0.5 * batch.mask.any(axis=1))


def test_a_full_context_is_told_and_the_reward_still_counts(play):
    episodes = play("long", num_tasks=4)
    assert set(episodes.scores["return"]) == {0.5}
    assert not episodes.completions.finished.any()
    assert set(episodes.stops) == {"max_tokens"}


@pytest.mark.slow
def test_killed_programs_cost_their_own_episodes(folder, play):
    """About 100 of 250, each at another place, with a process of its own that would go on."""
    whole, episodes = play("guess", 125), play("killed", 125)
    numbers = np.array([problem.answer["number"] for problem in episodes.problems])
    np.testing.assert_array_equal(episodes.failed, numbers % 5 < 2)
    assert 80 < episodes.failed.sum() < 120
    rows = zip(rows_of(episodes), rows_of(whole), episodes.failed, strict=True)
    assert all(own[:2] == other[:2] for own, other, is_killed in rows if not is_killed)
    left = [file for file in Path("/proc").glob("[0-9]*/cmdline") if re.match(rb"sleep\x0010000", file.read_bytes())]
    assert not left


def test_training_is_that_of_the_native_environment(folder, tmp_path):
    """Two steps of a run, to the digit of their metrics; forks are trained too, and programs may get no reply."""
    shared = [
        "--config", str(ROOT / "recipes/games/preset.py"), "--test_env_name", "", "--prompt_length", "64",
        "--groups_per_batch", "4", "--group_size", "4", "--ppo_minibatch", "16", "--max_steps", "2",
        "--page_size", "16", "--save_interval", "0",
        "--num_generation_tokens", "96", "--env_options",
    ]  # fmt: skip
    rows, agent = f"path={folder / 'rows.jsonl'}", str(folder / "agent.py")
    game = "--env_name", "dataset", "--episode", f"{folder / 'game.py'}:Guess"
    runs = {
        "native": [f"{rows},max_turns=5", *game],
        "agent": [rows, "--env_name", "agent", "--agent", f"{agent}:guess"],
        "forking": [rows, "--env_name", "agent", "--agent", f"{agent}:forking"],
        "fragile": [rows, "--env_name", "agent", "--agent", f"{agent}:fragile"],
    }
    metrics = {}
    for name, options in runs.items():
        main(parse(Config, [*shared, *options, "--save_dir", str(tmp_path / name)]))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        metrics[name] = [json.loads(line) for line in lines]
    for native, agent in zip(metrics["native"], metrics["agent"], strict=True):
        for key in ("env/return", "entropy", "grad_norm", "policy_loss", "num_rows"):
            assert agent[key] == pytest.approx(native[key], rel=1e-4), key
    assert metrics["forking"][0]["env/forks"] > 0
    assert metrics["forking"][0]["grad_norm"] != metrics["agent"][0]["grad_norm"]
    assert sum(step["env/reward_errors"] for step in metrics["fragile"]) > 0
    reasons = (tmp_path / "fragile/reward_failures.jsonl").read_text()
    assert "before it asks" in reasons
    assert "its program got no reply: the conversation is longer than the model's context length" in reasons
