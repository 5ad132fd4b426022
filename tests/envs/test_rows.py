"""Rows that others wrote: formats of files, forms of rows, what a row says about itself, and references."""

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from envs import make_env
from envs.data.files import read_file
from envs.data.messages import Messages
from envs.own.dataset import Dataset
from envs.own.written import DataConfig, read_written
from envs.prompts import find_tasks
from envs.scoring.scorer import Scorer
from envs.scoring.trial import try_rewards
from models.conversations import encode_rows
from models.tokenizer import load_tokenizer
from utils.settings.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(6)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.jsonl", json.dumps(ROWS)),
        ("versioned.json", json.dumps({"version": "1", "data": ROWS})),
        ("marked.json", "\ufeff" + LINES),
        ("no_suffix", CSV),
        *((f"{i}.csv", CSV.replace(",", sign)) for i, sign in enumerate(";\t|")),
        ("packed.jsonl", gzip.compress(LINES.encode(), mtime=0)),
        ("unpacked.jsonl.gz", LINES),
    ],
)
def test_format_of_a_file_is_told_by_its_content(tmp_path, name, content):
    assert [row for _, row in read_file(write(tmp_path / name, content))] == ROWS


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}]},
        {"prompt": "a", "answer": "b", "tests": [{"in": 1}]},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_alone_is_a_row(tmp_path, row, indent):
    found = [row for _, row in read_file(write(tmp_path / "one.json", json.dumps(row, indent=indent)))]
    assert found == [row]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "a.jsonl.gz is not a whole .gz file"),
        ("a.json", '"text"', "neither JSON nor a line of names"),
        ("a.json", '[{"q": 1},\n{"q": 2', "a.json is not JSON .*copy it again"),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1\n", "begins with b'version https://git-lfs.*neither"),
        ("a.parquet", b"PAR1\0\0", "a.parquet is not a whole Parquet file .*copy it again"),
        ("a.csv", 'q,a\n1,2\n"3,4', "a.csv:3 begins a row that is not CSV .*correct it"),
    ],
)
def test_what_is_no_file_of_rows_is_named_with_what_to_do(tmp_path, name, content, words):
    with pytest.raises(UserError, match=words):
        list(read_file(write(tmp_path / name, content)))


def test_a_broken_line_is_named_wherever_it_stands(tmp_path):
    lines = LINES.splitlines()
    for place in (0, 3, 6):
        path = write(tmp_path / "rows.json", "\n".join([*lines[:place], '{"prompt": ', *lines[place:]]))
        faults = {where: str(row) for where, row in read_file(path) if isinstance(row, Exception)}
        assert list(faults) == [f"{path}:{place + 1}"]
        assert re.search("not JSON", *faults.values())


# What a row says about itself

ASK = {"role": "user", "content": "3 + 7?"}
SAY = {"role": "assistant", "content": "10"}
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 3, "b": 7}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "1", "content": "10"}
SHARED = [{"from": "human", "value": "3 + 7?"}, {"from": "gpt", "value": "10"}]
TURNS = [ASK, SAY, ASK, SAY]


def read_rl(tmp_path: Path, row: dict, **options) -> Dataset:
    return Dataset(path=str(write(tmp_path / "rl.jsonl", json.dumps(row))), **options)


def read_sft(tmp_path: Path, row: dict, **options) -> Messages:
    config = DataConfig(str(write(tmp_path / "sft.jsonl", json.dumps(row))), test_fraction=0.0, **options)
    return read_written(config)[0].env.conversations[0]


FORMS = {
    "ShareGPT": {"conversations": SHARED},
    "ShareGPT as text": {"conversations": json.dumps(SHARED), "id": "x"},
    "Alpaca": {"instruction": "3 + 7?", "input": "", "output": "10"},
    "OpenAI": {"messages": [ASK, SAY], "parallel_tool_calls": False},
    "parts": {"messages": [{**ASK, "content": [{"type": "text", "text": x} for x in ("3 +", " 7?")]}, SAY]},
    "nulls": {"messages": [{**ASK, "name": None}, {**SAY, "tool_calls": None}], "tools": None, "images": []},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows_are_the_same_for_rl_and_sft(tmp_path, form):
    env = read_rl(tmp_path, FORMS[form])
    conversation = read_sft(tmp_path, FORMS[form])
    assert env.problem(0).messages == [ASK]
    assert conversation == [ASK, SAY]
    assert env.references(env.problem(0)) == ["10"]
    assert env.score(env.problem(0), "It is 10.")["return"] == 1.0


def test_prompt_and_completion_are_texts_or_messages(tmp_path):
    for prompt, completion in ((ASK["content"], SAY["content"]), ([ASK], [SAY])):
        assert read_sft(tmp_path, {"prompt": prompt, "completion": completion, "tools": None}) == [ASK, SAY]


def test_columns_of_alpaca_and_system_prompts_are_joined(tmp_path):
    row = {"instruction": "Add.", "input": "3, 7", "output": "10", "system": "Be short."}
    expected = [("system", "Be short."), ("user", "Add.\n3, 7")]
    found = read_rl(tmp_path, row).problem(0).messages
    assert [(message["role"], message["content"]) for message in found] == expected
    assert read_sft(tmp_path, row) == [*found, SAY]
    assert read_sft(tmp_path, {"messages": [ASK, SAY], "system": "Be short."}) == [found[0], ASK, SAY]
    with pytest.raises(UserError, match="its column history is not read"):
        read_rl(tmp_path, row | {"history": [["1, 1", "2"]]})


def test_parquet_of_verl_is_read_with_its_nested_answer(tmp_path):
    row = {"data_source": "mine", "prompt": [ASK], "extra_info": {"index": 0, "other": None}}
    row["reward_model"] = {"style": "rule", "ground_truth": "10"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "verl.parquet")
    for options in ({}, {"answer": "reward_model.ground_truth", "prompt": "prompt"}):
        env = Dataset(path=str(tmp_path / "verl.parquet"), **options)
        problem = env.problem(0)
        assert problem.messages == [ASK]
        assert env.references(problem) == ["10"]
        assert problem.answer["extra_info"] == {"index": 0, "other": None}
        assert problem.answer["data_source"] == "mine"


def test_columns_are_named_alike_for_rl_and_sft(tmp_path):
    row = {"meta": {"q": "3 + 7?", "a": 10, "talk": [ASK, SAY]}, "prompt": "not this", "answer": "nor this"}
    env = read_rl(tmp_path, row, prompt="meta.q", answer="meta.a")
    assert env.problem(0).messages == [ASK]
    assert env.references(env.problem(0)) == ["10"]
    assert read_rl(tmp_path, row | {"answer": None}, messages="meta.talk").problem(0).messages == [ASK]
    row["meta"]["a"] = "10"
    for columns in ("prompt=meta.q,completion=meta.a", "prompt=meta.q, answer=meta.a", "messages=meta.talk"):
        assert read_sft(tmp_path, row, columns=columns) == [ASK, SAY]
    with pytest.raises(UserError, match=r"sft.jsonl:1 .*only 'meta', 'prompt', 'answer': name them by --columns"):
        read_sft(tmp_path, row, columns="prompt=meta.q,completion=meta.b")
    with pytest.raises(UserError, match="--columns question=a: write prompt=COLUMN"):
        DataConfig("rows.jsonl", columns="question=a")


def test_calls_and_schemas_of_tools_reach_the_renderer(tmp_path):
    messages = [ASK, CALLED, RESULT, SAY]
    as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 3, "b": 7}'}}
    for tools, call in (([SCHEMA], CALL), (json.dumps([SCHEMA]), as_text), ([json.dumps(SCHEMA)], as_text)):
        said = [ASK, {**CALLED, "content": None, "tool_calls": [call]}, RESULT]
        conversation = read_sft(tmp_path, {"messages": [*said, SAY], "tools": tools})
        assert conversation == messages
        assert conversation.tools == (SCHEMA,)
        problem = read_rl(tmp_path, {"prompt": said, "tools": tools, "answer": "10"}).problem(0)
        assert problem.messages == messages[:-1]
        assert problem.tools == (SCHEMA,)
    turns = [SHARED[0], {"from": "function_call", "value": json.dumps(CALL["function"])}]
    turns += [{"from": "observation", "value": "10"}, SHARED[1]]
    assert read_sft(tmp_path, {"conversations": turns, "tools": json.dumps([SCHEMA["function"]])})[1:3] == [
        {**CALLED, "tool_calls": [{"type": "function", "function": CALL["function"]}]},
        {"role": "tool", "content": "10"},
    ]


def test_parquet_adds_no_arguments_to_calls(tmp_path):
    """Its columns have one type: each call gets the arguments of all others, as nulls."""
    other = {**CALL, "function": {"name": "sub", "arguments": {"c": 1}}}
    row = {"messages": [ASK, {**CALLED, "tool_calls": [CALL]}, ASK, {**CALLED, "tool_calls": [other]}, RESULT, SAY]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "calls.parquet")
    found = read_written(DataConfig(str(tmp_path / "calls.parquet"), test_fraction=0.0))[0].env.conversations
    assert found == [row["messages"]]


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable", "loss_mask"])
@pytest.mark.parametrize("kind", [int, float, bool])
def test_marks_of_a_reply_become_weights(tmp_path, key, kind):
    first = {**SAY, key: kind(0)}
    second = {**SAY, key: kind(1)}
    found = read_sft(tmp_path, {"messages": [ASK, first, ASK, second]})
    assert found == [ASK, {**SAY, "weight": 0}, ASK, SAY]
    assert read_sft(tmp_path, {"messages": [{**ASK, key: kind(0)}, SAY]}) == [ASK, SAY]
    masks = ([0, 0, 0, 1], [0, 1]) if key == "loss_mask" else ()
    for mask in masks:
        row = {"messages": TURNS, key: [*map(kind, mask)]}
        assert read_sft(tmp_path, row) == [ASK, {**SAY, "weight": 0}, ASK, SAY]
    assert read_sft(tmp_path, {"messages": TURNS, key: kind(1)}) == TURNS
    with pytest.raises(UserError, match="no usable row, but 1 marked as not to be trained"):
        read_sft(tmp_path, {"messages": TURNS, key: kind(0)})


@pytest.mark.parametrize("value", [0, False, "", ["x"]])
@pytest.mark.parametrize("key", ["images", "refusal", "anything"])
def test_unknown_key_of_a_message_is_refused_by_name(tmp_path, key, value):
    rows = {read_sft: {"messages": [ASK, {**SAY, key: value}]}, read_rl: {"prompt": [{**ASK, key: value}]}}
    for read, row in rows.items():
        with pytest.raises(UserError, match=rf"jsonl:1 is malformed: its message \d has {key}, which is not rendered"):
            read(tmp_path, {**row, "answer": "1"})


@pytest.mark.parametrize("value", [0, False, "", ["x.png"], {"enable_thinking": False}])
@pytest.mark.parametrize("key", ["images", "image", "videos", "audios", "chat_template_kwargs"])
def test_a_column_that_the_model_would_see_is_refused_by_name(tmp_path, key, value):
    for read in (read_sft, read_rl):
        with pytest.raises(UserError, match=f"jsonl:1 is malformed: its column {key} is not rendered"):
            read(tmp_path, {"messages": [ASK, SAY], key: value})


WRONG = {
    "message 2 has the role 'developer': write system": [ASK, {"role": "developer", "content": "a"}],
    "message 1 has the role 'me': roles are system, user, assistant, tool": [{"role": "me", "content": "a"}],
    "part 2 of message 1 is 'image_url': only text": [
        {**ASK, "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]}
    ],
    "content of message 1 is null: write text": [{"role": "user"}],
    "content of message 1 is a int": [{"role": "user", "content": 5}],
    "message 2 has weight=0.5: a reply is trained": [ASK, {**SAY, "weight": 0.5}],
    "message 2 has one weight that trains it, and one that does not": [ASK, {**SAY, "train": True, "weight": 0}],
    "message 1 has weight=1: only messages of the assistant": [{**ASK, "weight": 1}, SAY],
    "message 2 has tool_calls that are not a list": [ASK, {**CALLED, "tool_calls": "add(3, 7)"}],
    "the arguments in message 2 is text, and not JSON": [
        ASK,
        {**CALLED, "tool_calls": [{"function": {"name": "add", "arguments": "3, 7"}}]},
    ],
    "a call of 'add' whose arguments are not an object": [
        ASK,
        {**CALLED, "tool_calls": [{"name": "add", "arguments": [3]}]},
    ],
    "list of messages is text, and not JSON": "[{'role': 'user', 'content': 'a'}]",
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_in_a_message_is_named(tmp_path, words):
    for read, name in ((read_sft, "messages"), (read_rl, "prompt")):
        with pytest.raises(UserError, match=f"jsonl:1 is malformed: .*{words}"):
            read(tmp_path, {name: WRONG[words], "answer": "1"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [ASK]}, "it has no turn of the assistant"),
        ({"messages": [ASK, SAY, SAY]}, "needs one of another role before it"),
        ({"messages": [ASK, {**SAY, "content": " "}]}, "a turn of the assistant is empty"),
        ({"messages": [ASK, {**SAY, "content": "\ud800"}]}, "half a surrogate|not UTF-8"),
        ({"loss_mask": [1, 0, 1]}, "column loss_mask has 3 values for 4 messages and 2 replies"),
        ({"weight": 0.5}, "has weight=0.5: a reply is trained"),
        ({"label": False}, "its column label says whether its reply is wanted"),
        ({"weights": [0, 1]}, "its column weights is not used"),
        ({"tools": [{"description": "Adds."}]}, "not a list of JSON schemas with a name"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, *TURNS]}, "are both system messages"),
    ],
)
def test_what_is_wrong_in_a_row_of_sft_is_named(tmp_path, row, words):
    with pytest.raises(UserError, match=f"sft.jsonl:1 is malformed: .*({words}).* Correct it, or remove it"):
        read_sft(tmp_path, {"messages": TURNS, **row})


def test_row_that_the_template_hides_is_named_by_its_line(tmp_path):
    tokenizer = load_tokenizer(ROOT / "models/tiny")
    rows = [{"messages": [ASK, SAY]}, {"messages": [ASK, CALLED, RESULT, SAY]}]
    path = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    data, _ = read_written(DataConfig(str(path), test_fraction=0.0))
    with pytest.raises(UserError, match=r"rows.jsonl:2: the model's chat template .* tool"):
        encode_rows(tokenizer, "rows", data.env.conversations, 512, "error")
    env = Dataset(path=str(path), test_path=str(path), split="test")
    with pytest.raises(UserError, match=r"rows.jsonl:2: the model's chat template .* tool"):
        find_tasks("dataset", env, lambda x: tokenizer.chat(x.messages, tools=x.tools), 512)


def test_columns_for_rewards_stay_free(tmp_path):
    (tmp_path / "r.py").write_text("def reward(completion, weight, **row): return weight\n")
    row = {"prompt": "3 + 7?", "answer": {"any": ["kind"]}, "weight": 0.5, "loss": "high", "label": False}
    env = read_rl(tmp_path, row, reward=f"{tmp_path / 'r.py'}:reward")
    assert env.score(env.problem(0), "x")["return"] == 0.5
    for name in ("weight", "loss_mask"):
        with pytest.raises(UserError, match=f"its column {name} is not used without a --reward"):
            read_rl(tmp_path, {"prompt": "3 + 7?", "answer": "10", name: 0})
        with pytest.raises(UserError, match="no usable row, but 1 marked as not to be trained"):
            read_rl(tmp_path, {"messages": TURNS, name: 0})
    assert read_rl(tmp_path, {"messages": TURNS, "loss_mask": [0, 1]}).problem(0).messages == TURNS[:-1]


# References


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (["12", "twelve"], ["12"], ["13"]),
        (["7", 8, None], ["7", "8"], ["78"]),
        (142.0, ["142", "142.0"], ["14"]),
        ({"style": "rule", "ground_truth": ["5", "6"]}, ["5", "6"], ["7"]),
        ("Six cost $3*6=$<<3*6=18>>18, with tax $20.\n#### 20", ["20", "$20"], ["18", "3"]),
        ("First, $1+2=3$. " * 200 + r"Hence the sum is $\boxed{\frac{1}{2}}$.", [r"\frac12", "0.5"], ["3", "2"]),
        ("<think>4</think><answer>5</answer>", ["5"], ["4"]),
    ],
)
def test_references_of_all_kinds_accept_what_is_right(tmp_path, answer, right, wrong):
    env = read_rl(tmp_path, {"prompt": "What?", "answer": answer})
    returns = [env.score(env.problem(0), f"<answer>{reply}</answer>")["return"] for reply in (*right, *wrong)]
    assert returns == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (float("nan"), "its answer is nan, which is not a number"),
        (True, "its answer is a bool, not text, a number or a list"),
        ({"value": 5}, "its answer is a dict, .* as answer=COLUMN.value"),
        ([["5"]], "its answer is a list, not text"),
    ],
)
def test_what_no_reply_can_be_compared_with_is_refused(tmp_path, answer, words):
    with pytest.raises(UserError, match=f"rl.jsonl:1 is malformed: .*{words}"):
        read_rl(tmp_path, {"prompt": "What?", "answer": answer})
    for nothing in (None, " ", [None, ""]):
        with pytest.raises(UserError, match="no usable row, but 1 empty"):
            read_rl(tmp_path, {"prompt": "What?", "answer": nothing})


def test_decimals_of_parquet_are_references(tmp_path):
    table = pyarrow.Table.from_pylist([{"prompt": "What?", "answer": Decimal("2.50")}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    env = Dataset(path=str(tmp_path / "rows.parquet"))
    assert env.score(env.problem(0), "It is 2.5")["return"] == 1.0
    pyarrow.parquet.write_table(table.rename_columns(["prompt", "prompt"]), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match="twice.parquet has several columns 'prompt': give each a name"):
        Dataset(path=str(tmp_path / "twice.parquet"))


# References at the start


def tried(tmp_path: Path, answers: list, prompt: str = "What is {}?", **options) -> list[str]:
    """Returns the warnings at the start of a run on such references. Raises: UserError where it stops."""
    rows = [json.dumps({"prompt": prompt.format(i), "answer": answers[i % len(answers)]}) for i in range(40)]
    options |= {"path": str(write(tmp_path / "rows.jsonl", "\n".join(rows)))}
    with Scorer("dataset", options, num_workers=1) as scorer:
        return try_rewards(scorer, make_env("dataset", **options))


@pytest.mark.parametrize(
    "answers",
    [
        ["5", 6.5, "$10"],
        ["#### 7", ["x", "8"]],
        ["yes", "No"],
        ["Rome"],
        ["B", "(C)"],
        ["entailment", "all real numbers", "Mount Everest"],
        [["None"], ["nan"]],
    ],
)
@pytest.mark.parametrize("form", ["any", "tags", "boxed", "hash"])
def test_references_that_replies_can_meet_start_a_run(tmp_path, answers, form):
    assert tried(tmp_path, answers, form=form) == []


def test_formulas_are_tried_in_the_form_that_the_prompt_shows(tmp_path):
    formulas = [rf"\frac{{\sqrt{{{i}}}}}{{2}}" for i in (2, 3, 5)]
    assert tried(tmp_path, formulas, prompt=r"What is {}? Put it into \boxed{{}}.") == []


def test_references_that_no_reply_can_meet_stop_a_run_if_they_are_many(tmp_path):
    words = r"the reference of 34 of 34 .* form any \(.*rows.jsonl:1: .*one, two; 3.*; \.\.\.\): give .*--reward FILE"
    with pytest.raises(UserError, match=words):
        tried(tmp_path, ["one, two; 3 and four"])
    (warning,) = tried(tmp_path, [*map(str, range(19)), "one, two; 3 and four"])
    assert re.search(r"the reference of [12] of 34 .*\(.*rows.jsonl:[24]0: ", warning)


def test_references_of_a_reward_are_not_tried(tmp_path):
    (tmp_path / "r.py").write_text("def reward(completion, **row): return 1.0\n")
    assert tried(tmp_path, [{"any": "kind"}], reward=f"{tmp_path / 'r.py'}:reward") == []
