"""The calculator as a class and as a program reads the same prompt, and a call is no answer in either."""

from types import SimpleNamespace

import pytest

from models.messages import tool_schema
from recipes.calculator import calculator
from recipes.calculator.calculator import SCHEMA, Calculator, play, result_of


class Full(Exception):
    """The context is full."""


def called(arguments: str) -> SimpleNamespace:
    return SimpleNamespace(id="call_1", function=SimpleNamespace(name="calculate", arguments=arguments))


def answered(*calls: SimpleNamespace, content: str = "") -> SimpleNamespace:
    return SimpleNamespace(content=content, tool_calls=[*calls])


def test_the_program_announces_the_tool_as_the_class_does():
    assert tool_schema(Calculator().calculate) == SCHEMA


RIGHT, SPELLED = answered(called('{"expression": "2 * 3"}')), answered(content='{"name": calculate, 6}')


@pytest.mark.parametrize(
    "replies,reward",
    [
        ([RIGHT, answered(content="It is 6.")], 1.0),
        ([RIGHT, answered(content="It is 7.")], 0.0),
        ([SPELLED, SPELLED, SPELLED], 0.0),
        ([SPELLED, RIGHT, answered(content="6")], 1.0),
        ([RIGHT, RIGHT, RIGHT], 0.0),
        ([RIGHT, Full()], 0.0),
    ],
)
def test_the_last_number_of_a_reply_without_a_call_is_graded(replies, reward, monkeypatch):
    left = iter(replies)

    def create(**_) -> SimpleNamespace:
        if isinstance(reply := next(left), Full):
            raise reply
        return SimpleNamespace(choices=[SimpleNamespace(message=reply)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    package = SimpleNamespace(OpenAI=lambda **_: client, BadRequestError=Full)
    monkeypatch.setattr(calculator, "openai", package)  # it is not installed for tests, and replies come from a list
    assert play("What is 2 * 3?", "6", "http://127.0.0.1/v1", "key") == reward


@pytest.mark.parametrize("arguments", ["{", "[]", '{"text": "2"}', '{"expression": "__import__(1)"}'])
def test_a_call_that_fails_is_answered_with_its_error(arguments):
    assert "error" in result_of(called(arguments))["content"]
