"""Calls of tools in the forms of published models: each is read to the same call, or refused."""

import json
import time
from dataclasses import replace

import pytest

from core.chains.turns import KNOWN_TOOL, own_form, read_calls
from envs.tools.calls import FORMS, CallError, calls_as_json, parse_call
from models.tokenizer import load_tokenizer
from tests.helpers import ROOT

CALL = "weigh", {"what": "an egg", "times": 3}
BODIES = {  # as the published templates write it
    "qwen": '\n{"name": "weigh", "arguments": {"what": "an egg", "times": 3}}\n',
    "json": '{"name": "weigh", "parameters": {"what": "an egg", "times": 3}}',
    "functions": "\n<function=weigh>\n<parameter=what>\nan egg\n</parameter>\n<parameter=times>\n3\n</parameter>\n"
    "</function>\n",
}
START = "{% for m in messages if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
END = (
    "{% for m in messages if m.tool_calls %}<|im_start|>assistant\nCALL<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "models/tiny")


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_template_is_found_by_a_known_call(tokenizer, name):
    form = FORMS[name]
    written = json.dumps(form.opening + BODIES[name] + form.closing)
    tokenizer.hf.chat_template = START + TOOLS + END.replace("CALL", f"{{{{ {written} }}}}")
    assert own_form(tokenizer, tokenizer.template) is form
    turn = tokenizer.encode("I weigh. " * bool(form.opening) + form.opening + BODIES[name] + form.closing)
    assert [*map(parse_call, read_calls(tokenizer, turn, form, [KNOWN_TOOL]))] == [CALL]


def test_a_form_that_no_reader_knows_is_none(tokenizer):
    tokenizer.hf.chat_template = START + TOOLS + END.replace("CALL", "to=weigh what: an egg, times: 3")
    assert own_form(tokenizer, tokenizer.template) is None
    tokenizer.hf.chat_template = START + END.replace("CALL", "")
    assert own_form(tokenizer, tokenizer.template) is FORMS["qwen"], "tools are announced in its form"
    assert own_form(replace(tokenizer), "") is FORMS["qwen"]


WHOLE, REPEATED = BODIES["functions"].strip(), "<function=weigh>" + "<parameter=what>" * 5000 + "</function>"


@pytest.mark.parametrize("body", [WHOLE[:12], WHOLE[:-9], WHOLE[:-2], REPEATED])
def test_a_call_that_is_not_complete_is_refused_at_once(body):
    start = time.process_time()
    assert calls_as_json(FORMS["functions"], [body], [KNOWN_TOOL]) == (body,)
    assert time.process_time() - start < 5
    with pytest.raises(CallError):
        parse_call(body)


def test_values_without_quotes_have_the_types_of_the_tool():
    body = BODIES["functions"].replace("an egg", "12")
    (call,) = calls_as_json(FORMS["functions"], [body], [KNOWN_TOOL])
    assert parse_call(call) == ("weigh", {"what": "12", "times": 3})
    (call,) = calls_as_json(FORMS["functions"], [body], [])
    assert parse_call(call) == ("weigh", {"what": 12, "times": 3})
