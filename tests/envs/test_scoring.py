"""Replies that hang, crash or make the reward raise cost one score, not the run; nothing outlives the run."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from envs.base import MAX_OBSERVED, Reply, Step
from envs.scoring import scorer as scoring
from envs.scoring.scorer import Failure, Scorer, ScoringStream
from envs.scoring.trial import check_reward
from envs.scoring.worker import MAX_PRINTED, Outcome, Turns
from tests.helpers import read_jsonl
from tests.processes import is_alive, wait_until_gone
from utils.processes import descendant_pids
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "tests.hostile:make"
FAILING = (
    "raise", "exit 0", "kill", "kill group 9", "kill parent", "close files", "nan", "cancel", "mute", "memory",
    "huge", "name of the log",
)  # fmt: skip
HANGING = ("sleep", "regex", "endless", "stop")


@pytest.fixture(scope="module")
def scorer():
    with Scorer(HOSTILE, num_workers=2, timeout=0.5) as scorer:
        yield scorer


def test_scores_come_in_order_from_processes_without_jax(scorer):
    import jax  # noqa: F401 (so that this process has what the workers must not have)

    scores, counts = scorer.score_replies(range(100), ["ok"] * 100)
    assert [score["index"] for score in scores] == list(range(100))
    assert {score["jax"] for score in scores} == {0.0}
    assert os.getpid() not in {score["pid"] for score in scores}
    assert counts == {"reward_timeouts": 0, "reward_errors": 0}


def test_a_stream_has_the_job_and_the_outcome_of_each_row(scorer):
    with ScoringStream(scorer) as stream:
        stream.add({3: (7, "ok"), 1: (8, "ok")})
        stream.add({})
        stream.add({0: (9, "raise"), 2: (5, "ok")})
        outcomes = stream.finish()
    assert [outcomes[row][0] for row in range(4)] == [(9, "raise"), (8, "ok"), (5, "ok"), (7, "ok")]
    assert [outcomes[row][1]["index"] for row in (1, 2, 3)] == [8, 5, 7]
    assert isinstance(outcomes[0][1], Failure)


def test_a_stream_gives_outcomes_while_another_reply_hangs(scorer):
    with ScoringStream(scorer) as stream:
        stream.add({0: (0, "sleep"), 1: (1, "ok")})
        assert stream.take({0, 1}, num_needed=1)[1]["index"] == 1
        stream.add({1: (2, "ok"), 2: (3, "raise")})
        assert [*stream.take({1, 2}, num_needed=2)] == [1, 2], "both of which were added while it hangs"
        assert not stream.take({0})
        assert stream.take({0}, num_needed=1)[0].kind == "reward_timeouts"


def ask(scorer: Scorer, *replies: str, seed: int = 5, is_truncated: bool = False) -> Outcome:
    """What follows the last of these turns of an episode."""
    turns = Turns(seed, tuple(map(Reply, replies)), is_truncated)
    return scorer.request_outcomes([(7, turns)])[0]


@pytest.fixture(scope="module")
def patient_scorer():
    """For what a busy machine may hold up for a second: turns, 120 MB of text and lists."""
    with Scorer(HOSTILE, num_workers=2, timeout=10) as scorer:
        yield scorer


@pytest.mark.parametrize("end", ["process", "none"])
def test_episode_goes_on_or_is_replayed_if_lost(patient_scorer, end):
    scorer = patient_scorer
    replies = ["ok"]
    first = ask(scorer, *replies)
    for number in (2, 3):
        if end == "process":
            os.kill(int(first.info["pid"]), signal.SIGKILL)
            wait_until_gone(int(first.info["pid"]))
        replies.append("ok")
        step = ask(scorer, *replies)
        assert (step.messages, step.reward, step.done) == ([{"role": "user", "content": "more"}], 1.0, False)
        assert step.info["turn"] == number
        assert (step.info["pid"] == first.info["pid"]) == (end == "none")
        assert end == "process" or step.info["object"] == first.info["object"]
        first = step
    assert ask(scorer, *replies, is_truncated=True) == Step([], 0.3, True, {})
    assert ask(scorer, *replies, "ok").done, "played again from the start, as its end was asked for"


@pytest.mark.parametrize(
    ("text", "kind"),
    [("sleep", "reward_timeouts"), ("exit 0", "reward_errors"), ("raise", "reward_errors")],
)
def test_a_turn_that_fails_costs_its_episode_alone(scorer, text, kind):
    jobs = [(i, Turns(0, (Reply("ok"), Reply(text if i == 3 else "ok")))) for i in range(8)]
    outcomes = scorer.request_outcomes(jobs)
    assert [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Failure)] == [3]
    assert outcomes[3].kind == kind
    assert all(step.info["turn"] == 2 for step in outcomes if isinstance(step, Step))


def test_what_an_environment_says_is_cut(patient_scorer):
    (message,) = ask(patient_scorer, "much").messages
    note = f" ... (truncated at {MAX_OBSERVED} of {4 * 10**7} characters)"
    assert message["content"] == "more" * (MAX_OBSERVED // 4) + note


def test_leaving_a_stream_does_not_wait_for_a_reply_that_hangs():
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), Scorer(HOSTILE, num_workers=1, timeout=600) as scorer:
        process = scorer.lanes[0].process
        with ScoringStream(scorer) as stream:
            stream.add({0: (0, "sleep"), 1: (1, "ok")})
            while len(scorer.queues[-1]) == 2:
                time.sleep(0.01)
            raise ZeroDivisionError
    assert time.monotonic() - start < 30
    wait_until_gone(process.pid)
    assert scorer.lanes[0].process is process, "nor starts another one"


def test_leaving_a_stream_frees_threads_that_wait_and_leaves_nothing_to_the_next(scorer):
    """A signal may leave such a thread behind: Python would wait for it at the end of the run."""

    def wait() -> None:
        with pytest.raises(ZeroDivisionError):
            stream.take({0}, num_needed=1)

    with pytest.raises(ZeroDivisionError), ScoringStream(scorer) as stream:
        stream.add({row: (0, "sleep") for row in range(100)})
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        raise ZeroDivisionError
    thread.join(5)
    assert not thread.is_alive()
    start = time.monotonic()
    assert scorer.score_replies([7], ["ok"])[0][0]["index"] == 7
    assert time.monotonic() - start < 20, "or those of the first one were done, too"


def test_rewards_that_do_not_return_are_killed(scorer):
    """A timeout each, and their neighbors keep their scores."""
    texts = [reply for text in HANGING for reply in ["ok"] * 20 + [text] + ["ok"] * 19]
    start = time.monotonic()
    scores, counts = scorer.score_replies(range(len(texts)), texts)
    failed = [texts[i] for i, score in enumerate(scores) if score is None]
    assert failed == [*HANGING]
    assert counts == {"reward_timeouts": len(HANGING), "reward_errors": 0}
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("text", FAILING)
def test_a_reward_that_fails_costs_one_score(scorer, text):
    scores, counts = scorer.score_replies(range(40), ["ok"] * 20 + [text] + ["ok"] * 19)
    assert [i for i, score in enumerate(scores) if score is None] == [20]
    assert counts == {"reward_timeouts": 0, "reward_errors": 1}


def test_a_child_that_returns_from_a_reward_scores_nothing(scorer):
    scores, _ = scorer.score_replies(range(40), ["fork"] * 40)
    assert [score["index"] for score in scores] == list(range(40))


def test_replies_that_hang_are_waited_for_together():
    texts = ["sleep"] * 16 + ["ok"] * 496
    random.Random(0).shuffle(texts)
    with Scorer(HOSTILE, num_workers=8, timeout=0.5) as scorer:
        scorer.score_replies(range(64), ["ok"] * 64)
        start = time.monotonic()
        scores, counts = scorer.score_replies(range(512), texts)
        assert time.monotonic() - start < 10
    assert [score is None for score in scores] == [text == "sleep" for text in texts]
    assert counts == {"reward_timeouts": 16, "reward_errors": 0}


def test_slow_replies_of_a_chunk_each_have_the_whole_limit(scorer):
    texts = ["slow"] * 2 + ["ok"] * 14  # chunks of two: 2 x 0.3 s, limit 0.5 s
    scores, counts = scorer.score_replies(range(16), texts)
    assert all(score["return"] == 1.0 for score in scores)
    assert sum(counts.values()) == 0


def test_failures_are_told_once_and_written_down(tmp_path, capsys):
    with Scorer(HOSTILE, num_workers=1, failures_dir=tmp_path) as scorer:
        scorer.score_replies([6, 7], ["ok", "raise"])
        scorer.score_replies([8], ["nan"])
    written = read_jsonl(tmp_path / "reward_failures.jsonl")
    assert [(line["problem"], line["text"]) for line in written] == [(7, "raise"), (8, "nan")]
    assert "ZeroDivisionError: of the reward" in written[0]["reason"]
    assert capsys.readouterr().err.count("warning") == 1


def test_prints_of_rewards_come_by_clean_whole_lines(capfd):
    with Scorer(HOSTILE, num_workers=2) as scorer:
        scorer.score_replies(range(40), ["print"] * 40)
    captured = capfd.readouterr()
    lines = [line for i in range(40) for line in (f"[31mone and    two {i}", f"three ? {i}", "x" * MAX_PRINTED)]
    assert sorted(captured.out.split("\n")) == sorted(["", *(f"reward: {line}" for line in lines)])
    assert sorted(captured.err.splitlines()) == sorted(f"reward: four {i}" for i in range(40))


@pytest.mark.parametrize("number", [1, 8])
def test_run_stops_if_a_reward_fails_for_all_first_replies(number):
    with Scorer(HOSTILE, num_workers=1) as scorer:
        scorer.score_replies([], [])
        with pytest.raises(UserError, match=f"failed for {number} of {number} replies, first by 'ZeroDivisionError"):
            scorer.score_replies(range(number), ["raise"] * number)
        scorer.score_replies(range(20), ["raise"] * 10 + ["ok"] * 10)
        assert scorer.score_replies([0], ["raise"])[0] == [None]
        with pytest.raises(UserError, match="failed for 11 of 20 replies"):
            scorer.score_replies(range(20), ["raise"] * 11 + ["ok"] * 9)
    with Scorer(HOSTILE, num_workers=1, max_error_share=1) as scorer:
        assert scorer.score_replies([0], ["raise"])[0] == [None]


def test_a_reward_that_always_hangs_stops_the_run_in_time():
    with Scorer(HOSTILE, num_workers=4, timeout=0.5) as scorer:
        start = time.monotonic()
        with pytest.raises(UserError, match="failed for 32 of 32 replies, first by 'it took longer than 0.5 seconds'"):
            scorer.score_replies(range(32), ["sleep"] * 32)  # one by one these were 8 s
        assert time.monotonic() - start < 7.5


def test_an_environment_that_cannot_be_made_is_the_users_mistake():
    with pytest.raises(ValueError, match="no such data set"):
        Scorer("tests.hostile:make_missing", num_workers=1)


def test_processes_that_are_always_lost_end_the_run(monkeypatch, tmp_path):
    # Each loss takes a tenth of a second.
    monkeypatch.setattr(scoring, "MAX_LOST", 2)
    with Scorer("tests.hostile:make_once", {"folder": str(tmp_path / "made")}, num_workers=1) as scorer:
        with pytest.raises(UserError, match="failed 3 times in a row .FileExistsError"):
            scorer.score_replies(range(20), ["ok", "kill"] * 10)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signals_that_a_scheduler_sends_to_all_processes_cost_no_score(name, patient_scorer):
    """Slurm sends them to the whole job; the last step of the run must be that of an undisturbed one."""
    with ScoringStream(patient_scorer) as stream:
        stream.add({row: (row, "slow") for row in range(4)})
        while any(patient_scorer.queues):
            time.sleep(0.01)
        for lane in patient_scorer.lanes.values():
            for pid in (lane.process.pid, *descendant_pids(lane.process.pid)):
                os.kill(pid, signal.Signals[name])
        assert [outcome["return"] for _, outcome in stream.finish().values()] == [1.0] * 4


def test_a_reward_that_ends_its_group_ends_what_it_started(scorer):
    (score,), _ = scorer.score_replies([0], ["child and kill group"])
    wait_until_gone(int(score["child"]))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody adopts what is left in another session")
@pytest.mark.parametrize("ending", ["closed", "stuck", "hangs", "exits"])
def test_what_a_reward_starts_in_another_session_ends_with_it(ending):
    with Scorer(HOSTILE, num_workers=1, timeout=0.5) as scorer:
        (score,), _ = scorer.score_replies([0], ["daemon"])
        daemon = int(score["daemon"])
        assert is_alive(daemon)
        if ending in ("hangs", "exits"):
            scorer.score_replies([0], ["sleep" if ending == "hangs" else "exit 0"])
            wait_until_gone(daemon)
        if ending == "stuck":
            os.kill(scorer.lanes[0].process.pid, signal.SIGSTOP)
    wait_until_gone(daemon)


@pytest.mark.parametrize("text", ["ok", "sleep", "regex"])
def test_workers_die_with_a_run_that_is_killed(text):
    """Killed between two calls, or while a reward hangs with its interpreter locked."""
    program = (
        "from envs.scoring.scorer import Scorer\n"
        f"scorer = Scorer({HOSTILE!r}, num_workers=1, timeout=60)\n"
        "print(int(scorer.score_replies([0], ['ok'])[0][0]['pid']), scorer.lanes[0].process.pid, flush=True)\n"
        f"scorer.score_replies([0], [{text!r}])\n"
        "input()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in run.stdout.readline().split()]
    time.sleep(0.3)  # now it hangs
    run.kill()
    run.communicate()
    wait_until_gone(*pids)


def test_a_reward_that_fails_for_every_reply_ends_the_start(tmp_path):
    """An empty reply alone costs its score, as in training."""
    (tmp_path / "own.py").write_text(
        "def some(completion, **row): return 1 / len(completion)\n"
        "def raises(completion, **row):\n    return int('x' + completion)\n"
    )
    rows = [json.dumps({"prompt": f"What is {i}?", "answer": str(i)}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    for name in ("some", "raises"):
        options = {"path": str(tmp_path / "rows.jsonl"), "reward": f"{tmp_path / 'own.py'}:{name}"}
        fails = pytest.raises(UserError, match=r"ValueError: invalid literal .*\(line 3 of .*own.py\)")
        with Scorer("dataset", options, num_workers=1) as scorer, fails if name == "raises" else nullcontext():
            check_reward(scorer, [(0, "one"), (1, "")])
