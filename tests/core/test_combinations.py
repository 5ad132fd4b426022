"""What is dropped, kept and counted, by how episodes end: scripted turns against a loop written from the definitions.

A row is the turns of an episode. A turn is a letter (D: its last, G: another one follows, L: the answer to it is longer
than the row, F: the environment or the grader fails), its reward in tenths, ~ where the policy never ends it, and =
where it ends it with the last token that fits.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import numpy as np
import pytest

from core.advantages import compute_advantages
from core.chains.replies import Replies
from core.chains.turns import Conversations
from core.config import Config
from core.grpo import groups_with_signal, make_batch
from core.records import Batch, Episodes
from core.rollout import RolloutWorker
from core.run.metrics import rollout_metrics
from core.sampler import Sampler, Scheduler
from core.terms.lengths import with_length_reward
from envs.base import Env, Episode, Problem, Step
from envs.scoring.scorer import Failure
from envs.tools.episode import ToolEpisode, ToolSettings
from models.checkpoint import load_model
from tests.helpers import reading_script, write_one_layer
from tests.playing import HereScorer
from utils.devices.sharding import single_device
from utils.metrics.health import HealthChecks
from utils.settings.config import make_config

G = 4  # rows of a group
LIMIT, MAX_TURNS = 256, 3  # tokens and turns of an episode
COST = 0.1  # price of a call
SAME_SUMS = {"games": "D4 | G1 D3 | G3 D1 | G2 G1 D1", "tools": "D4 | G0 D5 | G0 G0 D6 | G0 D5"}  # other turns
GROUPS = (
    "D7 | G1 D2~ | G1 F0 | G1 G1 G1",
    "D4 | D4 | D4 | D4",
    SAME_SUMS,
    "D3~ | G8~ | G1 D3~ | F0~",
    "D5= | G5= | D5 | D5~",
    "L1 | D9 | F0 | F0",
    "F0 | F0 | D5 | F0",
    "G1 G1 G1 | G1 G1 L2 | G2 G0 G1 | G1 D1",
    "D2~ | D2~ | D2~ | D2~",
)


def look(long: bool) -> str:
    """Looks around.

    Args:
        long: Whether to say much.
    """
    return "ok " * (LIMIT if long else 1)


def reward_of(text: str) -> float:
    """Returns the reward of a turn. Raises: ValueError where it is to fail."""
    if text[0] == "F":
        raise ValueError("of a test")
    return int(text[1]) / 10


class GameEpisode(Episode):
    def step(self, reply: str) -> Step:
        said = look(long=reply[0] == "L")
        is_done = reply[0] == "D"
        return Step([{"role": "user", "content": said}], reward_of(reply), is_done, {"correct_answer": float(is_done)})


class MadeUp(Env):
    """Games, tools or single replies."""

    num_tasks = len(GROUPS)

    def __init__(self, kind: str):
        self.kind = kind
        self.max_turns = 1 if kind == "single" else MAX_TURNS
        self.dialect = "qwen" if kind == "tools" else ""

    def problem(self, index: int) -> Problem:
        return Problem([{"role": "user", "content": "?"}])

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        return {"return": reward_of(text), "correct_answer": 1.0}

    def episode(self, problem: Problem, seed: int) -> Episode:
        if self.kind == "tools":
            return ToolEpisode([look], ToolSettings(call_cost=COST), partial(self.score, problem))
        return GameEpisode()


class PlayingScorer(HereScorer):
    """Plays episodes from their beginning, without worker processes."""

    def request_outcomes(self, jobs):
        self.settings = self.settings._replace(max_error_share=1.0)
        return [self.outcome(self.env.problem(i), reply) for i, reply in jobs]

    def outcome(self, problem, reply):
        try:
            if isinstance(reply, str):
                return self.env.score(problem, reply)
            episode = self.env.episode(problem, reply.seed)
            steps = [episode.act(turn) for turn in reply.replies]
            return episode.truncate() if reply.is_truncated else steps[-1]
        except ValueError as error:
            return Failure("reward_errors", str(error))


def rows_of(kind: str) -> list[list[str]]:
    """Returns the turns of each row; single replies are the last ones."""
    groups = [group if isinstance(group, str) else group.get(kind, group["games"]) for group in GROUPS]
    rows = [row.split() for group in groups for row in group.split("|")]
    return [row[-1:] for row in rows] if kind == "single" else rows


def script(kind: str, row: Sequence[str], tokenizer) -> list[int]:
    """Returns the tokens that the policy draws."""
    tokens = []
    filler = tokenizer.encode("x")
    stop = tokenizer.encode("<|im_end|>")
    for turn in row:
        is_call = kind == "tools" and turn[0] in "GL"
        call = f'<tool_call>{{"name": "look", "arguments": {{"long": {str(turn[0] == "L").lower()}}}}}</tool_call>'
        tokens += tokenizer.encode(turn[:2] + call * is_call)
        if turn.endswith("="):
            tokens += filler * (LIMIT - 1 - len(tokens))
        tokens += stop * (not turn.endswith("~"))
    return tokens + filler * 2 * LIMIT


def play(kind: str) -> Episodes:
    """Plays all rows by the real worker, whose policy draws what is written."""
    layout = single_device()
    with TemporaryDirectory() as folder:
        path = write_one_layer(Path(folder))
        model, params, tokenizer = load_model(path, layout, "float32")
    scripts = [script(kind, row, tokenizer) for row in rows_of(kind)]
    env = MadeUp(kind)
    make_replies = Replies if kind == "single" else Conversations
    sampler = Sampler(model, LIMIT, tokenizer.stop_ids, max_prompt_tokens=LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        # The tokens of the scripts take the place of those that were sampled.
        patch.setattr(Scheduler, "end", reading_script(lambda row: scripts[row]))
        worker = RolloutWorker(
            env=env,
            name=kind,
            tokenizer=tokenizer,
            sampler=sampler,
            scorer=PlayingScorer(env),
            layout=layout,
            make_replies=make_replies,
        )
        weights = worker.load_weights(params)
        return worker.play(weights, np.arange(len(GROUPS)), G, jax.random.key(0))


def ending(kind: str, row: Sequence[str]) -> tuple[list[float], str]:
    """Returns the reward of each turn, and why the episode ends."""
    rewards = [int(turn[1]) / 10 for turn in row]
    last = row[-1]
    is_last_turn = len(row) == MAX_TURNS
    if kind == "tools":  # calls cost, and the last reply is graded, also where it is a call that a limit ends
        rewards = [-COST * (turn[0] in "GL") for turn in row]
        rewards[-1] += int(last[1]) / 10
    has_no_room = last[0] == "L" or (last[0] == "G" and last.endswith("="))
    if last.endswith("~") or (has_no_room and not is_last_turn and kind != "single"):
        return rewards, "max_tokens"
    return rewards, {"F": "failed", "D": "done"}.get(last[0], "max_turns")


def length_reward(name: str, num_tokens: int, is_correct: bool) -> float:
    """DAPO's soft penalty over the last fifth of the limit, and open-r1's cosine."""
    buffer = LIMIT // 5
    sign = 1 if is_correct else -1
    return {
        "": 0.0,
        "overlong": max(-1.0, min(0.0, (LIMIT - buffer - num_tokens) / buffer)),
        "cosine": sign * (0.5 + 0.25 * (1 + math.cos(math.pi * num_tokens / LIMIT))),
    }[name]


def spread(values: Sequence[float]) -> float:
    return max(values) - min(values) if values else 0.0


def mean(values: Iterable[float | None]) -> float:
    values = [value or 0.0 for value in values]
    return sum(values) / len(values)


class Table(NamedTuple):
    """What becomes of the rows."""

    rewards: list[list[float]]  # by row and turn
    stops: list[str]
    failed: list[bool]
    extra: list[float]  # reward for the length


class Expected(NamedTuple):
    advantages: list[list[float] | None]  # by row and turn; None: the row leaves
    signal: list[bool]  # by group
    rewards: list[list[float]]
    metrics: dict[str, float]


Flags = Mapping[str, str | bool]


def table_of(kind: str, lengths: Sequence[int], flags: Flags) -> Table:
    """Returns the rewards with those for lengths. Of a failed episode there is nothing."""
    rows = rows_of(kind)
    failed = [row[-1][0] == "F" for row in rows]
    rewards, stops = map(list, zip(*[ending(kind, row) for row in rows], strict=True))
    extra = []
    for i, row in enumerate(rows):
        num_tokens = LIMIT if stops[i] == "max_tokens" else lengths[i]
        is_correct = kind != "games" or row[-1][0] == "D"
        extra.append(0.0 if failed[i] else length_reward(flags["length_reward"], num_tokens, is_correct))
        rewards[i] = [0.0] * len(row) if failed[i] else [*rewards[i][:-1], rewards[i][-1] + extra[i]]
    return Table(rewards, stops, failed, extra)


def compared_values(table: Table, group: Iterable[int], flags: Flags) -> list[dict[int, float | None]]:
    """Returns for each turn that is compared the rewards to go by row; None if they are all equal.

    What has no grade is no part of a baseline.
    """
    compared = []
    for turn in range(MAX_TURNS if flags["advantage"] == "turn_mean" else 1):
        rows = [i for i in group if not table.failed[i] and len(table.rewards[i]) > turn]
        values = {i: sum(table.rewards[i][turn:]) for i in rows}
        with_zero = [0.0] * (flags["advantage"] == "reinforce")
        differ = spread([*values.values(), *with_zero]) > 1e-6
        compared.append(values if differ else dict.fromkeys(values))
    return compared


def advantages_of(i: int, table: Table, compared: list[dict[int, float | None]], flags: Flags) -> list[float]:
    """Returns the advantage of each turn of a row."""
    advantages = []
    for turn in range(len(table.rewards[i])):
        values = compared[turn if flags["advantage"] == "turn_mean" else 0]
        baseline = 0.0 if flags["advantage"] == "reinforce" or not values else mean(values.values())
        advantages.append(0.0 if values.get(i) is None else values[i] - baseline)
    return advantages


def expected_metrics(kind: str, table: Table, signal: Sequence[bool], flags: Flags) -> dict[str, float]:
    num_rows = len(table.stops)
    graded = [i for i in range(num_rows) if not table.failed[i]]
    metrics = {
        "env/return": mean(sum(table.rewards[i]) for i in graded),
        "env/finished": 1 - table.stops.count("max_tokens") / num_rows,
        "env/groups_without_signal": 1 - sum(signal) / len(signal),
        "env/reward_errors": sum(table.failed),
    }
    if flags["length_reward"]:
        metrics["env/length_reward"] = mean(table.extra[i] for i in graded)
    if kind != "single":
        metrics |= {f"stop/{stop}": table.stops.count(stop) / num_rows for stop in table.stops}
    return metrics


def expected(kind: str, lengths: Sequence[int], flags: Flags) -> Expected:
    table = table_of(kind, lengths, flags)
    advantages = []
    signal = []
    for first in range(0, len(table.stops), G):
        group = range(first, first + G)
        compared = compared_values(table, group, flags)
        signal.append(any(value is not None for values in compared for value in values.values()))
        for i in group:
            leaves = table.failed[i] or (flags["do_group_filter"] and not signal[-1])
            leaves |= flags["do_truncation_filter"] and table.stops[i] == "max_tokens"
            advantages.append(None if leaves else advantages_of(i, table, compared, flags))
    return Expected(advantages, signal, table.rewards, expected_metrics(kind, table, signal, flags))


FLAGS = {
    "do_truncation_filter": (False, True),
    "length_reward": ("", "overlong", "cosine"),
    "do_group_filter": (False, True),
}
COMPARISONS = (
    {"advantage": "group_mean"},
    {"advantage": "turn_mean"},
    {"advantage": "reinforce"},  # against 0: --do_group_normalization 0 of kvfrans/lmpo
)


@pytest.mark.parametrize("kind", ["tools", "games", "single"])
def test_what_leaves_what_stays_and_what_is_counted(kind):
    played = play(kind)
    r = played.completions
    assert played.stops == ([] if kind == "single" else [ending(kind, row)[1] for row in rows_of(kind)])
    lengths = (r.lengths - r.prompt_lengths).tolist()
    sizes = set()
    for *values, comparison in itertools.product(*FLAGS.values(), COMPARISONS):
        flags = dict(zip(FLAGS, values, strict=True)) | comparison
        config = make_config(Config, group_size=G, **flags)
        episodes = played
        if flags["length_reward"]:
            episodes = with_length_reward(played, LIMIT, flags["length_reward"])
        table = expected(kind, lengths, flags)
        signal = groups_with_signal(episodes, config)
        assert signal.tolist() == table.signal, flags
        assert_metrics(rollout_metrics(replace(episodes, has_signal=signal)), table.metrics)
        batch = make_batch(replace(episodes, batch_rollouts=np.arange(len(episodes))), config)
        batch = compute_advantages(batch, config.objective)
        assert batch.rollout.tolist() == [i for i, x in enumerate(table.advantages) if x is not None], flags
        sizes.add(len(batch))
        assert_advantages(batch, table)
    assert len(sizes) > 3, "filters and turns make a difference"


def assert_metrics(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    stops = sorted(name for name in expected if name.startswith("stop/"))
    assert [name for name in found if name.startswith("stop/")] == stops
    is_told = "env/finished" in HealthChecks().find_warnings(1, found)
    assert is_told == (expected["env/finished"] < 0.5)


def assert_advantages(batch: Batch, table: Expected) -> None:
    for row, mask, found in zip(batch.rollout.tolist(), batch.mask, batch.advantages, strict=True):
        columns = np.flatnonzero(mask)
        turns = np.cumsum(np.diff(columns, prepend=columns[0]) > 1)
        np.testing.assert_allclose(found[mask], np.array(table.advantages[row])[turns], atol=2e-6)
        assert turns[-1] == len(table.rewards[row]) - 1
        assert not found[~mask].any()
