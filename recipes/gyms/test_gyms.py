"""Environments of other libraries, as their objects look."""

import json
import re

import pytest

from envs import make_env
from envs.base import Env, Reply, Step
from envs.scoring.worker import EpisodeCache, Turns
from recipes.gyms import libraries
from utils.settings.errors import UserError


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Task {n}. ", "target": n, "targets": [n, n], "answer": str(n)} for n in range(3, 43)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def dataset(rows, name: str) -> Env:
    return make_env("dataset", path=str(rows), episode=f"{libraries.__file__}:{name}")


def contents(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


NO_NUMBER = "{'error': 'an action is a number from 1 to 3'}"
ECHOED = '{"text": "%s", "length": %d}'
LIBRARIES = [  # name in libraries.py, end of the prompt, replies with what is said (None: the end) and paid
    ("arena", r"Seed \d+, 2 left\.", [("a", "1 left.\n7", 0), ("b", None, 0.75)]),
    ("lake", r"\(Down\)\n\[41m0\]", [("go 1", "(Down)\n[41m1]", 0.5), ("0", NO_NUMBER, 0), ("x", NO_NUMBER, 0)]),
    ("lake", r".*\n\[41m0\]", [("9" * 5000, NO_NUMBER, 0), ("1 or 3", "(Down)\n[41m3]", 0.5), ("3", None, 0.5)]),
    ("table", "0", [("2", "7, [1, 2], 2", 0.5), ("2", None, 0.5)]),
    ("echoes", "Ready", [("{", ECHOED % ("{", 1), 1), ("end", None, 1)]),
    ("echo_client", r"\['answer', 'prompt', 'seed', .*\]", [("hi\n", ECHOED % ("hi\\n", 3), 1), ("end", None, 1)]),
    ("sync_client", r"\['answer', 'prompt', 'seed', .*\]", [("hi", ECHOED % ("hi", 2), 1), ("end", None, 1)]),
    ("dict_client", r"\['answer.*\]", [('{"message": "hi"}', ECHOED % ("hi", 2), 1), ('{"message": "end"}', None, 1)]),
    ("moves", "Ready", [(" 3\n", "3 False", 0.25), ('{"x": 4, "fast": true}', "4 True", 0.25), ("6", None, 0.25)]),
    ("sky", r"Begin\.", [("5", "No.", 0), ("it is 3", None, 1)]),
]


@pytest.mark.parametrize(("name", "first", "turns"), LIBRARIES)
def test_environments_of_other_libraries_are_played(rows, name, first, turns):
    env = dataset(rows, name)
    replies = [Reply(text) for text, _, _ in turns]
    opening, *again = [
        EpisodeCache().play(env, env.problem, 0, Turns(7, tuple(replies[:n]))) for n in range(len(turns) + 1)
    ]
    assert re.fullmatch(rf"Task 3\. \n{first}", contents(opening)[-1])
    episode = env.episode(env.problem(0), 7)
    steps = [episode.act(reply) for reply in replies]
    for step, (_, said, reward) in zip(steps, turns, strict=True):
        assert (step.done, contents(step)) == ((True, []) if said is None else (False, [said]))
        assert step.reward == reward
    assert steps == again, "by an episode of its own, as after the loss of a process"


NO_ACTIONS = ["", "x", "[1]", '{"x": 1, "y": 2}', "[" * 99999, '{"x": NaN}', "9" * 9999]


@pytest.mark.parametrize("reply", NO_ACTIONS)
def test_game_goes_on_if_a_reply_is_no_action(rows, reply):
    env = dataset(rows, "moves")
    episode = env.episode(env.problem(0), 0)
    step = episode.step(reply)
    assert not step.done
    assert step.reward == 0
    assert contents(step)[0].startswith("{'error': ")
    assert len(contents(step)[0]) < 300
    assert contents(episode.step("3")) == ["3 False"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("boxed", "its actions are .*, and a reply is a text or a number"),
        ("tool_client", "its actions are calls of tools: write a class with a method for each"),
    ],
)
def test_environment_without_texts_or_numbers_as_actions_is_refused(rows, name, message):
    with pytest.raises(UserError, match=message):
        dataset(rows, name)
