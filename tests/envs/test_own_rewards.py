"""Rewards of users: their forms, groups and weights, how they are named, what they import, and what they see."""

import json
import re
import sys
import time

import jax
import numpy as np
import pytest

from envs import make_env
from envs.base import Episode, Reply, Step
from envs.own_code import read_names
from envs.scoring.scorer import Scorer, ScoringStream
from envs.scoring.worker import Turns, answer
from envs.settings import EnvConfig
from utils.devices.sharding import Layout
from utils.settings.errors import UserError

REWARDS = """
import functools, types
import numpy as np
def own(completion, answer): return len(completion) + float(answer)
def shortest(prompts, completions, **columns):
    return [0.5 * (len(c) == min(map(len, completions))) for c in completions]
def how_many(completions): return [len(completions)] * len(completions)
def tensor(completions):
    return types.SimpleNamespace(tolist=lambda: [1.0] * len(completions))
def some(completions): return [None if c == "a" else 1 for c in completions]
def one(completions): return [1.0]
def texts(completions): return ["1" for _ in completions]
def endless(completions):
    while True: yield 1.0
def logs(completions, log_extra, log_metric, **columns):
    log_extra("size", [len(c) for c in completions])
    log_extra("text", completions)
    log_metric("mean", 2)
    return [0.0] * len(completions)
def state(completions, trainer_state): return [0.0] * len(completions)
def nothing(): return 1.0
def no_state(completions, trainer_state=None): return [0.0] * len(completions)
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth == solution_str), "acc": True, "pred": "x"}
def plain_score(solution_str, ground_truth, method="strict"): return solution_str == ground_truth
def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(a == b) + len(solution_strs) for a, b in zip(solution_strs, ground_truths)]
def unscored(solution_str, ground_truth): return {"acc": 1.0}
def wrong_score(prediction, gold): return 1.0
fine = functools.partial(lambda completion, answer, weight: weight, weight=0.5)
lacks = functools.partial(lambda completion, weight: weight)
none = functools.partial(lambda completion, weight: None, weight=0.5)
class Object:
    def __call__(self, completions, **columns): return [2.0 for _ in completions]
thing = Object()
length = lambda completion, **row: 1.0
def raises_for_a(completions): return [1 / (c != "a") + len(completions) for c in completions]
"""


@pytest.fixture
def folder(tmp_path):
    """A folder of a reward and its rows, whose modules are forgotten afterwards, as in a new process."""
    modules, paths = {*sys.modules}, [*sys.path]
    yield fill(tmp_path)
    sys.path[:] = paths
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def fill(tmp_path):
    (tmp_path / "own.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{i} + 1", "answer": str(i)}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return tmp_path


def dataset(folder, reward: str, weights: str = ""):
    file = folder / "own.py"
    return make_env("dataset", path=str(folder / "rows.jsonl"), reward=f"{file}:{reward}", reward_weights=weights)


def returns(env, *texts: str) -> list[float]:
    return [scores["return"] for scores in env.score_group(env.problem(0), texts)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own", [1, 2, 3]),
        ("shortest", [0.5, 0, 0]),
        ("how_many", [3, 3, 3]),
        ("tensor", [1, 1, 1]),
        ("some", [np.nan, 1, 1]),  # the first has no score
        ("thing", [2] * 3),
        ("fine", [0.5] * 3),
        ("no_state", [0] * 3),
        ("plain_score", [0, 0, 0]),
        ("batch", [3, 3, 3]),
    ],
)
def test_a_reward_of_each_form_gets_what_its_trainer_gives(folder, name, expected):
    env = dataset(folder, name)
    offset = int(env.problem(0).answer["answer"]) if name == "own" else 0
    np.testing.assert_array_equal(returns(env, "a", "bb", "ccc"), [x + offset for x in expected])
    assert env.takes_groups == (name not in ("own", "fine", "plain_score"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one", r"one\(\) in line \d+ of .*own.py returned \[1.0\]: return a list .* which are 2 here"),
        ("texts", r"texts\(\) in line \d+ .* returned '1': return a list with a number for each completion"),
        ("endless", r"endless\(\) in line \d+ .* returned <generator"),
        ("unscored", r"unscored\(\) in line \d+ .* returned .*: return a number, or a dict with a \"score\""),
        ("none", r"<lambda>\(\) in line \d+ of .* returned None: return a number"),
    ],
)
def test_reward_without_numbers_is_named_by_function_and_line(folder, name, words):
    env = dataset(folder, name)
    with pytest.raises(TypeError, match=words):
        env.score_group(env.problem(0), ["a", "b"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lacks", r"<lambda>\(\) in line \d+ of .*own.py needs 'weight', which is not a column"),
        ("state", "needs 'trainer_state', .*: TRL alone has a trainer; give the argument a default"),
        ("wrong_score", "needs 'gold', which is not a column; there are 'prompt', 'answer'$"),
        ("nothing", r"nothing\(\) in line \d+ of .* takes no arguments: give it the completion"),
        ("Object", "Object is a class: add a line `reward = Object"),
        ("how_man", r"has no function how_man, only .*did you mean how_many\?"),
        ("own,own", "names own twice"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(folder, name, words):
    with pytest.raises(UserError, match=words):
        dataset(folder, name)


def test_verl_scores_are_the_return_and_other_numbers_are_parts(folder):
    env = dataset(folder, "compute_score")
    answer = env.problem(0).answer["answer"]
    assert env.score(env.problem(0), answer) == {"correct_answer": 1.0, "acc": 1.0, "return": 1.0}
    file = folder / "verl.jsonl"
    row = {"prompt": "1?", "data_source": "s", "reward_model": {"ground_truth": "g"}, "extra_info": {"i": 3}}
    file.write_text("\n".join(json.dumps({**row, "prompt": f"{i}?"}) for i in range(40)))
    (folder / "own.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info, **more):\n"
        "    return data_source + solution_str + ground_truth == 'srg' and extra_info['i']\n"
    )
    env = make_env("dataset", path=str(file), reward=f"{folder / 'own.py'}:f")
    assert returns(env, "r", "x") == [3, 0]


def test_what_a_reward_logs_is_a_part_and_no_reward(folder):
    scores = dataset(folder, "logs").score_group(dataset(folder, "logs").problem(0), ["a", "bb"])
    assert scores[1] == {"correct_answer": 0.0, "size": 2.0, "mean": 2.0, "return": 0.0}


def test_rewards_are_added_by_weight_and_each_is_logged(folder):
    (folder / "other.py").write_text("def own(completion, **row): return {'short': 1.0, 'sweet': 2.0}")
    env = dataset(folder, f"how_many,shortest,{folder / 'other.py'}:own", "1,0.2,-1")
    first, second = env.score_group(env.problem(0), ["a", "bb"])
    assert first == {
        "correct_answer": 0.0,
        "how_many": 2,
        "shortest": 0.5,
        "own": 3,
        "short": 1,
        "sweet": 2,
        "return": pytest.approx(2 + 0.2 * 0.5 - 3),
    }
    assert second["shortest"] == 0
    assert np.isclose(second["return"], -1)
    named_alike = dataset(folder, f"own,{folder / 'other.py'}:own")
    assert {"own.own", "other.own"} <= named_alike.score(named_alike.problem(0), "a").keys()
    for weights in ("1", "1,x", "1,nan"):
        with pytest.raises(UserError, match="give a number for each of the 2 functions of --reward, how_many, own"):
            dataset(folder, "how_many,own", weights)
    with pytest.raises(UserError, match="--reward_weights has no effect without --reward"):
        EnvConfig(reward_weights="1")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("own.py:own,own.py", "name a function of own.py after a colon, as in own.py:FUNCTION"),
        ("nowhere.py:f", "write FILE.py:FUNCTION; there is no file nowhere.py"),
        ("trl.rewards.f", "write FILE.py:FUNCTION; there is no file trl.rewards.f"),
    ],
)
def test_how_a_reward_is_named_is_told(folder, monkeypatch, value, words):
    # Files are named relative to this folder.
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=words):
        read_names(value, "--reward", "function")


def test_groups_are_graded_whole_when_their_last_reply_has_come(folder):
    options = {"path": str(folder / "rows.jsonl"), "reward": f"{folder / 'own.py'}:how_many,shortest"}
    with Scorer("dataset", options, num_workers=2) as scorer:
        with ScoringStream(scorer, group_size=4) as stream:
            for row in (5, 0, 1, 6, 3, 7):
                stream.add({row: (row // 4, "x" * (row + 1))})
            time.sleep(0.3)
            assert not stream.outcomes
            stream.add({4: (1, "x" * 5), 2: (0, "xxx")})
            scored = stream.finish()
        assert [scored[row][0][1] for row in range(8)] == ["x" * (row + 1) for row in range(8)]
        assert [scored[row][1]["how_many"] for row in range(8)] == [4] * 8
        assert [scored[row][1]["shortest"] for row in range(8)] == [0.5, 0, 0, 0, 0.5, 0, 0, 0]
        scores, _ = scorer.score_replies([0, 0, 1], ["a", "bb", "c"])
        assert [score["how_many"] for score in scores] == [2, 2, 1]


def test_group_loses_replies_that_raise_or_all_that_hang(folder):
    (folder / "own.py").write_text(
        REWARDS
        + (
            "\nimport time\ndef hangs(completions):\n"
            "    if 'h' in completions: time.sleep(1000)\n    return raises_for_a(completions)\n"
        )
    )
    options = {"path": str(folder / "rows.jsonl"), "reward": f"{folder / 'own.py'}:hangs"}
    with Scorer("dataset", options, num_workers=1, timeout=0.5) as scorer:
        texts = ["b", "a", "b", "h", "b", "b"] + ["b"] * 10
        scores, counts = scorer.score_replies([0] * 3 + [1] * 2 + [2] * 11, texts)
    assert [score and score["return"] for score in scores] == [3, None, 3, None, None] + [12] * 11
    assert counts == {"reward_timeouts": 2, "reward_errors": 1}


def test_processes_share_whole_groups(monkeypatch):
    # One of three processes.
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    shares = []
    for index in range(3):
        # Each of the three in turn.
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        shares.append(Layout.process_share(None, 20, 4))
    assert [row for share in shares for row in share] == list(range(20))
    assert all(share.start % 4 == 0 for share in shares)
    assert all(shares)


@pytest.mark.parametrize("name", ["countdown", "poem"])
def test_a_reward_grades_any_environment_of_one_turn(folder, name):
    (folder / "own.py").write_text(
        "def shortest(completions, **columns):\n"
        "    sizes = [len(messages[0]['content']) for messages in completions]\n"
        "    return [0.5 * (size == min(sizes)) for size in sizes]\n"
    )
    env = make_env(name, reward=f"{folder / 'own.py'}:shortest", format_reward="tags", format_weight=1.0)
    scores = env.score_group(env.problem(0), ["a", "<think>b</think><answer>c</answer>"])
    assert [score["return"] for score in scores] == [0.5, 1.0], "with the reward for the form of each"
    assert env.takes_groups
    assert all(("correct_answer" in score) == (name != "poem") for score in scores)
    with pytest.raises(UserError, match="an episode of guess has its own rewards"):
        make_env("guess", reward=f"{folder / 'own.py'}:shortest")


def test_columns_of_an_environment_are_its_problem(folder):
    (folder / "own.py").write_text("def f(completion, nums, target, prompt): return sum(nums) + target")
    env = make_env("countdown", reward=f"{folder / 'own.py'}:f")
    numbers, target = env.problem(3).answer
    assert env.score(env.problem(3), "")["return"] == sum(numbers) + target


def test_a_benchmark_beside_own_rewards_keeps_its_grader(folder):
    config = EnvConfig("countdown", reward=f"{folder / 'own.py'}:shortest")
    assert "reward" not in config.options("poem-test")
    assert "reward" in config.options("countdown-test")


def test_a_file_imports_the_modules_beside_it(folder):
    """Those of packages too, and from functions."""
    (folder / "own_helpers.py").write_text("import more\nvalue = more.value + 1\n")
    (folder / "more.py").write_text("value = 1\n")
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").write_text("from .inner import three\n")
    (folder / "parts" / "inner.py").write_text("from own_helpers import value\nthree = value + 1\n")
    (folder / "four_late.py").write_text("four = 4\n")
    (folder / "own.py").write_text(
        "import json, own_helpers\nfrom own_helpers import value\n"
        "from parts import inner\nimport parts.inner as again\n"
        "def f(completion, **row):\n"
        "    from four_late import four\n"
        "    return [own_helpers.value, value, inner.three, again.three, four] == [2, 2, 3, 3, 4]\n"
    )
    assert returns(dataset(folder, "f"), "a") == [1.0]


@pytest.mark.parametrize("name", ["utils.py", "models/more.py", "calendar.py"])
def test_a_module_with_the_name_of_another_one_is_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    module = name.removesuffix(".py").replace("/", ".")
    (folder / "own.py").write_text(f"import {module}\ndef f(completion, **row): return 1.0")
    with pytest.raises(UserError, match=rf"own.py imports {folder}/{name.split('/')[0]}, .* has this name: rename it"):
        dataset(folder, "f")


def test_a_reward_may_spawn_processes_and_be_a_file_of_a_package(folder):
    (folder / "__init__.py").touch()
    (folder / "json.py").write_text("raise ValueError('the module json of a package is no json of others')\n")
    (folder / "helper.py").write_text("def double(x): return 2 * x\n")
    (folder / "own.py").write_text(
        "import json, multiprocessing\nfrom .helper import double\n"
        "def f(completion, **row):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return pool.map(double, [len(completion)])[0]\n"
    )
    options = {"path": str(folder / "rows.jsonl"), "reward": f"{folder / 'own.py'}:f"}
    with Scorer("dataset", options, num_workers=1, timeout=60) as scorer:
        assert scorer.score_replies([0], ["abc"])[0][0]["return"] == 6


@pytest.mark.parametrize(
    ("code", "words"), [("import sys; sys.exit(0)", "fails with SystemExit: 0"), ("x = (", "fails with SyntaxError")]
)
def test_a_file_that_cannot_be_imported_ends_the_start(folder, code, words):
    (folder / "own.py").write_text(code)
    with pytest.raises(UserError, match=words):
        dataset(folder, "f")


EPISODES = """
class Word:
    def reset(self, **row): return "go"
    def step(self, action): return "higher"
class Text(Word):
    def step(self, action): return "higher", "much", False, {}
class Ends(Word):
    def step(self, action): return "higher", 1.0, "no", {}
class Keys(Word):
    def step(self, action): return {"observation": "higher", "reward": 1.0}
class Opens(Word):
    def reset(self, **row): return 1, 2, 3
class Messages(Word):
    def reset(self, **row): return [{"text": "go"}]
class Pays:
    def reset(self, **row): return None
    def look(self) -> str:
        "Looks."
        return "x"
    def get_reward(self): return "1.0"
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Word", r"step\(\) in line 4 of .*own.py returned 'higher': return \(observation, reward, done, info\)"),
        ("Text", r"step\(\) in line 6 of .* returned \('higher', 'much', False, {}\): return"),
        ("Ends", r"step\(\) in line 8 of .* returned \('higher', 1.0, 'no', {}\): return"),
        ("Keys", r"step\(\) in line 10 of .* returned {'observation': .*: return"),
        ("Opens", r"reset\(\) in line 12 of .* returned \(1, 2, 3\): return an observation, or"),
        ("Messages", r"reset\(\) in line 14 of .* returned \[{'text': 'go'}\]: return"),
        ("Pays", r"get_reward\(\) in line 20 of .* returned '1.0': return a number"),
    ],
)
def test_what_an_episode_returns_is_named_with_method_and_line(folder, name, words):
    (folder / "own.py").write_text(EPISODES)
    options = {"path": str(folder / "rows.jsonl"), "episode": f"{folder / 'own.py'}:{name}"}
    with Scorer("dataset", options, num_workers=1) as scorer:
        (failure,) = scorer.request_outcomes([(0, Turns(0, (Reply("1"),)))])
        with pytest.raises(UserError, match="the environment failed for 1 of 1 replies"):
            scorer.check_failures([(0, [])], [failure])
    assert re.search(words, failure.reason)


@pytest.mark.parametrize(
    ("said", "form"),
    [
        ("higher", "'higher'"),
        (Step(["x"]), r"\(\['x'\]"),
        (Step([{"role": "user", "content": "x"}], "much"), "much"),
        (Step([]), r"returned \(\[\], 0.0, False"),
    ],
)
def test_what_an_environment_of_ones_own_returns_is_named_too(said, form):
    own = type("Own", (Episode,), {"step": lambda self, reply: said})
    with pytest.raises(TypeError, match=rf"in line \d+ of .*{form}.*return Step\(messages, reward, done\)"):
        answer(own(), Reply("x"))
