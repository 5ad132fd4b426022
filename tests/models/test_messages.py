"""Messages to tokens: prompts, replies, bridges, results of tools; what the oracle of a run's start stops."""

import json
import re
from functools import cache, partial

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Fast
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from bench import templates
from core import sft
from core.chains import attach
from core.extensions import teacher
from core.rollout import encode_prompt
from core.sft import SFTConfig
from envs import make_env
from envs.base import ForcedAnswer
from envs.settings import RolloutSettings
from models import conversations, oracle, tokenizer
from models.conversations import check_rows, encode_conversation
from models.tokenizer import Tokenizer, load_tokenizer
from tests.helpers import ROOT, train_here
from utils.settings.config import parse
from utils.settings.errors import UserError, user_errors

TINY = ROOT / "models/tiny"
QWEN = ROOT.parent / "shared" / "data" / "qwen3-tokenizer"
needs_qwen = pytest.mark.skipif(not QWEN.exists(), reason="the tokenizer of Qwen3 is in shared/data")
CORPUS = ["Use 4 11 12 to make 5. The answer is 12-11+4 = 5.\n", "user assistant system tool\n\n", "hello, fine"] * 50
SIGNS = ["<unk>", "<s>", "</s>", "<|turn|>", "<|end|>"]
TEMPLATES = {
    "plain turns": "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "trimmed": "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n\n{% endif %}",
    "results as JSON": "{% for m in messages %}<|turn|>{{ m.role }} {% if m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}{{ '<|turn|>assistant ' if add_generation_prompt }}",
    "a system message of its own": "{% if messages[0].role != 'system' %}<|turn|>system\nBe kind.<|end|>\n{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "as Llama 2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} </s>{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
    "no line break before a role": "{% for m in messages %}[{{ m.role }}]: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]:{% endif %}",
    "the end of all": "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{{ '<|turn|>assistant\n' if add_generation_prompt else eos_token }}",
    "nothing behind the last reply": "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
}


@cache
def toy(kind: str) -> Fast:
    """Returns a tokenizer as GPT-2's (bytes) or as Llama 2's, which puts a blank before a text."""
    fast = Fast(BPE(byte_fallback=kind == "pieces", unk_token="<unk>" if kind == "pieces" else None))
    if kind == "pieces":
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        parts = decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        fast.decoder = decoders.Sequence([*parts])
    else:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [chr(i) for i in range(10, 126)]
    settings = {"special_tokens": [SIGNS[0]], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=500, **settings)
    fast.train_from_iterator([word for text in CORPUS for word in text.split(" ")], trainer)
    fast.add_special_tokens([AddedToken(sign, special=True, normalized=False) for sign in SIGNS[1:]])
    first = [("<s>", fast.token_to_id("<s>"))]
    fast.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", first)
    return fast


def make(kind: str, template: str | None) -> Tokenizer:
    hf = PreTrainedTokenizerFast(tokenizer_object=toy(kind), bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    return Tokenizer(hf)


def says(role: str, content: str | None, **more) -> dict:
    return {"role": role, "content": content, **more}


REPLIES = says("assistant", "four"), says("assistant", " 12-11+4\n")
TURNS = [says("user", "Use 4.\n"), REPLIES[0], says("user", "\n fine \n"), REPLIES[1]]


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_rows_and_turns_have_the_ids_of_transformers(name, kind):
    tok = make(kind, TEMPLATES[name])
    render = partial(tok.hf.apply_chat_template, return_dict=False)
    for end in (1, 3):
        assert tok.chat(TURNS[:end]) == render(TURNS[:end], add_generation_prompt=True)
    row = encode_conversation(tok, TURNS)
    whole = render(TURNS)
    if name == "nothing behind the last reply":  # the next turn's sign ends a reply
        whole.append(tok.special_ids["<|turn|>"])
    assert row.tokens.tolist() == whole[: len(row)]
    assert tok.decode(whole[len(row) :]).strip() == "", "a row ends with the last reply"
    masked = [tok.hf.decode(row.tokens[i : i + 1]) for i in range(len(row)) if row.mask[i]]
    assert tok.hf.decode(row.tokens[row.mask]).replace(" ", "").count("12-11+4") == 1
    assert [sign for sign in masked if sign in SIGNS] == [tok.hf.decode([tok.stop_ids[-1]])] * 2
    prompt = tok.chat(TURNS[:1])
    bridge = tok.bridge(TURNS[:1], [TURNS[2]])
    whole = render(TURNS[:3], add_generation_prompt=True)
    behind = bridge.end + bridge.ids
    assert whole[-len(behind) :] == behind
    middle = tok.hf.decode(whole[: len(whole) - len(behind)]).removeprefix(tok.hf.decode(prompt)).strip()
    assert middle == "four"
    result = says("tool", 'it is "7"\n')
    found = tok.bridge(TURNS[:1], [result])
    behind = found.end + found.ids
    assert render([*TURNS[:2], result], add_generation_prompt=True)[-len(behind) :] == behind


def test_a_begun_reply_goes_on_and_so_do_the_turns_behind_it():
    tok = make("bytes", TEMPLATES["plain turns"])
    begun = [TURNS[0], says("assistant", "Let me see:")]
    ids = tok.chat(begun)
    assert ids == tok.hf.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    bridge = tok.bridge(begun, [TURNS[2]])
    whole = [TURNS[0], says("assistant", "Let me see: 5"), TURNS[2]]
    expected = tok.hf.apply_chat_template(whole, add_generation_prompt=True, return_dict=False)
    assert [*ids, *tok.encode(" 5"), *bridge.end, *bridge.ids] == expected
    assert tok.chat([TURNS[0]], prefix="Let me") == tok.encode(tok.write([TURNS[0]], False) + "Let me")


def test_a_message_that_spells_the_mark_of_a_reply_is_read_whole():
    tok = make("bytes", TEMPLATES["plain turns"])
    for said in (tokenizer.TURN, f"{tokenizer.TURN}0 and {tokenizer.TURN}1", "<|end|>"):
        bridge = tok.bridge(TURNS[:1], [says("user", said)])
        whole = [*TURNS[:2], says("user", said)]
        expected = tok.hf.apply_chat_template(whole, add_generation_prompt=True, return_dict=False)
        assert expected[-len(bridge.end + bridge.ids) :] == bridge.end + bridge.ids


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_base_model_begins_with_what_its_tokenizer_puts_first(kind):
    """Once, also behind a template that writes it."""
    tok = make(kind, None)
    assert tok.chat([TURNS[0]]) == tok.hf("Use 4.\n")["input_ids"]
    assert tok.first_ids == [tok.special_ids["<s>"]]
    row = encode_conversation(tok, TURNS[:2])
    assert row.tokens.tolist() == tok.hf("Use 4.\nfour</s>")["input_ids"]
    assert not row.mask[0]
    assert encode_conversation(tok, [says("user", ""), TURNS[1]]).mask.tolist()[:2] == [False, True]
    tok = make(kind, TEMPLATES["plain turns"])
    assert tok.chat([TURNS[0]]).count(tok.special_ids["<s>"]) == 1
    assert tok.chat([TURNS[0]], plain=True) == tok.hf("Use 4.\n")["input_ids"]


def test_what_ends_a_turn_by_the_template_ends_a_completion():
    tok = make("bytes", TEMPLATES["plain turns"])
    end = tok.special_ids["<|end|>"]
    assert tok.stop_ids == (tok.special_ids["</s>"], end)
    row = encode_conversation(tok, TURNS)
    assert row.tokens[-1] == end
    assert tok.special_ids["</s>"] not in row.tokens
    bridge = tok.bridge(TURNS[:1], TURNS[2:3])
    assert bridge.after(end) == bridge.ids
    assert bridge.after(0) == [end, *bridge.ids], "one that was cut off is ended"


def test_replies_of_weight_0_are_not_trained():
    tok = make("bytes", TEMPLATES["plain turns"])
    rows = {}
    for weights in ((None, None), (0, 1), (1, 0)):
        given = [message | {"weight": weight} for message, weight in zip(REPLIES, weights, strict=True)]
        row = encode_conversation(tok, [TURNS[0], given[0], TURNS[2], given[1]])
        rows[weights] = row.tokens.tolist(), tok.hf.decode(row.tokens[row.mask])
    assert [text for _, text in rows.values()] == ["four<|end|> 12-11+4\n<|end|>", " 12-11+4\n<|end|>", "four<|end|>"]
    assert len({tuple(ids) for ids, _ in rows.values()}) == 1


# Calls of tools, and other keys

CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 3}}}
RESULT = says("tool", "7", name="add", tool_call_id="1")
SCHEMA = templates.TOOLS[0]
CALLED = [TURNS[0], says("assistant", None, tool_calls=[CALL]), RESULT]


@needs_qwen
def test_calls_are_rendered_with_arguments_as_objects_or_as_text():
    tok = load_tokenizer(QWEN)
    expected = tok.hf.apply_chat_template(CALLED, tools=[SCHEMA], add_generation_prompt=True, return_dict=False)
    as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 3}'}}
    for call in (CALL, as_text):
        messages = [CALLED[0], says("assistant", None, tool_calls=[call]), RESULT]
        assert tok.chat(messages, None, tools=[SCHEMA]) == expected
        row = encode_conversation(tok, [*messages, says("assistant", "7")], [SCHEMA])
        assert tok.hf.decode(row.tokens[row.mask]) == (
            '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>7<|im_end|>'
        )
    empty = says("assistant", None, tool_calls=[{**CALL, "function": {"name": "add", "arguments": ""}}])
    assert '"arguments": {}}' in tok.hf.decode(tok.chat([TURNS[0], empty, RESULT], None, tools=[SCHEMA]))
    thought = [TURNS[0], says("assistant", "7", reasoning_content="Three and four.")]
    row = encode_conversation(tok, thought)
    assert row.tokens.tolist() == tok.hf.apply_chat_template(thought, return_dict=False)[:-1]
    assert tok.hf.decode(row.tokens[row.mask]).startswith("<think>\nThree and four.\n</think>\n\n7")


REFUSED = [
    (CALLED, "leaves out the tool_calls of a message of the role assistant"),
    ([TURNS[0], says("assistant", "7", reasoning_content="x")], "leaves out the reasoning_content of a message"),
    ([says("user", "7", name="Ann")], "leaves out the name of a message of the role user"),
    ([says("user", "7", images=[])], "the key 'images', which is not read"),
    ([says("user", ["7"])], "the content of a message is"),
    ([says("user", None)], "neither content nor tool_calls"),
    ([says("user", "7", weight=0.5)], "the weight 0.5: write 0 or 1"),
    ([TURNS[0], says("assistant", "", tool_calls=[{"name": "add"}])], 'write {"type": "function"'),
    ([TURNS[0], says("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])], 'write {"type'),
]


@pytest.mark.parametrize(("messages", "words"), REFUSED)
def test_a_key_that_is_not_shown_is_named(messages, words):
    tok = load_tokenizer(TINY)
    with pytest.raises(UserError) as error:
        tok.chat(messages)
    assert words in str(error.value)
    if "tool_calls" in words or "reasoning" in words:
        with pytest.raises(UserError) as error:
            encode_conversation(tok, [*messages, *TURNS[:2]])
        assert words in str(error.value)


# The oracle

GAME = {"env_name": "guess", "env_options": "prompt=bare"}


def other_bridge(*arguments, make_bridge=tokenizer.make_bridge) -> tokenizer.Bridge:
    bridge = make_bridge(*arguments)
    return bridge._replace(ids=bridge.ids[1:])


BREAKS = {  # who uses the one place: what is broken, and a run
    "bridge": (tokenizer, "make_bridge", other_bridge, GAME),
    "teacher": (teacher.Prefix, "prompt", lambda *_: [0], {"env_name": "countdown"}),
}


@pytest.mark.parametrize("user", BREAKS)
def test_a_run_stops_where_a_user_of_the_one_place_is_broken(user, tmp_path, capsys, monkeypatch):
    owner, name, broken, flags = BREAKS[user]
    flags = flags | {"model_dir": TINY, "num_score_workers": 1, "num_generation_tokens": 64, "max_steps": 1}
    if user == "teacher":
        flags |= {"teacher": "self", "teacher_prefix": "Be brief.", "distill": "sampled"}
    # A fault in one of the places that write messages.
    monkeypatch.setattr(owner, name, broken)
    assert train_here(tmp_path / "run", **flags) == 2
    error = capsys.readouterr().err
    assert "differs from what transformers makes of the same messages, from token" in error
    assert "\nhere: " in error
    assert "\napply_chat_template: " in error


def test_a_run_on_written_replies_stops_where_they_are_broken(tmp_path, capsys, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": [says("user", f"{i}?"), TURNS[1]]}) + "\n" for i in range(20)))
    write = conversations.write_reply
    # A fault in the writing of replies.
    monkeypatch.setattr(conversations, "write_reply", lambda *given: write(*given).replace("four", "for"))
    argv = ["--model_dir", str(TINY), "--data", str(file), "--save_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit), user_errors():
        sft.main(parse(SFTConfig, argv))
    error = capsys.readouterr().err
    assert "row 1 differs" in error
    assert re.search("here: .*for<.*\napply_chat_template: .*four<", error)


def samples(tok: Tokenizer, env, **changes) -> tuple[str, ...]:
    settings = RolloutSettings("here", {}, env, 64, 0, ForcedAnswer())
    return attach.compare_samples(settings, tok, partial(encode_prompt, tok))


def test_allowed_differences_are_named():
    tok = load_tokenizer(TINY)
    assert samples(tok, make_env("guess")) == (f"here: {oracle.DROPPED}",), "it closes thinking before a reply"
    assert f"here: {oracle.ANNOUNCED}" in samples(tok, make_env("calculator"))
    assert samples(tok, make_env("countdown")) == ()
    rows = [[*TURNS[:2]], TURNS]
    assert check_rows(tok, "rows", rows) == [oracle.DROPPED]
    other = make("bytes", TEMPLATES["nothing behind the last reply"])
    (note,) = check_rows(other, "rows", rows)
    assert "<|turn|> ends those of rows" in note
    assert check_rows(make("pieces", TEMPLATES["trimmed"]), "rows", rows) == []


def test_thinking_is_looked_for_in_all_rows():
    """The template drops it from earlier replies, of which only the last row has one."""
    content = "(m.content if loop.last else m.content.split('</think>')[-1])"
    template = TEMPLATES["plain turns"].replace("m.content", content)
    rows = [[says("user", "1?"), says("assistant", "one"), says("user", "2?"), says("assistant", "two")]] * 20
    thought = [rows[0][0], says("assistant", "<think>hm</think>one"), *rows[0][2:]]
    tok = make("pieces", template)
    assert check_rows(tok, "rows", rows) == []
    assert check_rows(tok, "rows", [*rows, thought]) == [oracle.DROPPED]
