"""Compares tokens of conversations with transformers' apply_chat_template, for published chat templates.

    pip download --no-deps trl && unzip -q trl-*.whl 'trl/chat_templates/*'
    python bench/templates.py --folders trl/chat_templates --tokenizer models/tiny

Each template gets the tokenizer of a folder, to which the signs that it writes are added as special tokens. Of each
conversation are compared: the prompt before each reply, the row of SFT, and what an episode reads behind a reply.

=: equal; t: equal without thinking that the template leaves out of earlier replies; r: refused, here by name or by
transformers. The reasons are listed below the table. Exit status 1: something differs without a word.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from transformers import AutoTokenizer

from models.conversations import encode_conversation, thinks
from models.messages import REPLY, Message, Schema, is_begun
from models.oracle import differs_by_thinking
from models.tokenizer import Tokenizer
from utils.settings.errors import UserError

NAMES = (
    "qwen2_5", "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_6", "qwen3_8",
    "llama3", "llama3_1", "llama3_2", "gemma3", "gemma4_v5", "phi3", "deepseek_r1_distill", "glm4moe", "lfm2_v2",
    "lfm2_2_5_v2", "nemotron_3_nano", "muse_glimmer",
)  # fmt: skip
SIGN = re.compile(r"<[|｜][^<>\s'\"{}]+[|｜]?>|<[^<>\s'\"{}|/]+[|｜]>|<(?:start_of_turn|end_of_turn|sop)>|\[gMASK\]")
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "One."}}, "required": ["a"]}}  # fmt: skip
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]


def says(role: str, content: str, **more: object) -> Message:
    """Returns a message."""
    return {"role": role, "content": content, **more}


ASK, FOUR = says("user", "Use 4."), says(REPLY, "four")
CONVERSATIONS: dict[str, tuple[list[Message], Sequence[Schema]]] = {
    "system": ([says("system", "Be short."), ASK], ()),
    "two turns": ([ASK, FOUR, says("user", "Again."), says(REPLY, "five")], ()),
    "tools": ([ASK], TOOLS),
    "a tool's result": (
        [ASK, says(REPLY, "", tool_calls=CALLS), says("tool", 'it is "7"', name="add"), says(REPLY, "7")], TOOLS
    ),
    "thinking": ([ASK, says(REPLY, "<think>\nOne and three.\n</think>\n\nfour")], ()),
    "blanks": (
        [says("user", " Use 4.\n"), says(REPLY, "four"), says("user", "\n go\n")], ()),
    "special tokens": ([says("user", "say SIGN"), says(REPLY, "so it is"), says("user", "SIGN?")], ()),
    "a begun reply": ([ASK, says(REPLY, "Let me see:")], ()),
}  # fmt: skip


def make_tokenizer(template: str, folder: Path) -> tuple[Tokenizer, str]:
    """Returns the tokenizer of a folder with a chat template, and a special token that the template writes."""
    hf = AutoTokenizer.from_pretrained(folder)
    signs = list(dict.fromkeys(SIGN.findall(template)))
    hf.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": signs})
    hf.chat_template = template
    return Tokenizer(hf), (signs or ["</s>"])[0]


def theirs(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Schema], **options: object) -> list[int]:
    """Returns the ids of a conversation as transformers has them."""
    return tokenizer.hf.apply_chat_template(list(messages), tools=list(tools) or None, return_dict=False, **options)


def pairs(
    tokenizer: Tokenizer, messages: list[Message], tools: Sequence[Schema], is_prefill: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Returns ids of this project and those of transformers."""
    replies = [i for i, message in enumerate(messages) if message["role"] == REPLY]
    if is_prefill:
        yield tokenizer.chat(messages, None), theirs(tokenizer, messages, tools, continue_final_message=True)
        return
    for i in [*replies, *[len(messages)] * (not is_begun(messages))]:
        before = messages[:i]
        own = tokenizer.chat(before, None, tools=tools)
        other = theirs(tokenizer, before, tools, add_generation_prompt=True)
        if tools and other == theirs(tokenizer, before, (), add_generation_prompt=True):
            raise UserError("the chat template shows no tools: a system message announces them")
        yield own, other
    if is_begun(messages):
        row = encode_conversation(tokenizer, messages, tools).tokens.tolist()
        whole = theirs(tokenizer, messages, tools, enable_thinking=thinks(messages[-1]))
        if row[:-1] == whole:  # no token ends the last reply in the template: the row has one
            whole = [*whole, tokenizer.stop_ids[-1]]
        length = max((i for i, number in enumerate(whole, 1) if number == row[-1]), default=0)
        yield row, whole if tokenizer.decode(whole[length:]).strip() else whole[:length]  # without a last line break
    for i, j in zip(replies, [*replies, None][1:], strict=True):
        if messages[i].keys() == {"role", "content"} and messages[i + 1 : j]:
            start, content = tokenizer.chat(messages[:i], None, tools=tools), messages[i]["content"].strip()
            bridge = tokenizer.bridge(messages[:i], messages[i + 1 : j], None, tools=tools)
            whole = theirs(tokenizer, messages[:j], tools, add_generation_prompt=True)
            behind = [*bridge.end, *bridge.ids]
            reply = whole[len(start) : len(whole) - len(behind)]  # it may begin with a header
            if whole[: len(start)] != start or not tokenizer.decode(reply).endswith(content):
                is_open = tokenizer.hf.decode(start).rstrip().endswith("<think>")
                reply = tokenizer.encode("</think>\n\n" * is_open + content)
            yield [*start, *reply, *behind], whole


def compare(
    tokenizer: Tokenizer, messages: list[Message], tools: Sequence[Schema], is_prefill: bool
) -> tuple[str, str]:
    """Returns the mark of a cell, and why."""
    try:
        found = list(pairs(tokenizer, messages, tools, is_prefill))
    except Exception as error:  # of either side
        is_theirs = not isinstance(error, UserError) or "chat template fails" in str(error)
        return "r", f"{'transformers: ' * is_theirs}{error}"
    marks = []
    for own, other in found:
        own_text, other_text = (tokenizer.hf.decode(ids) for ids in (own, other))
        is_thought = own_text != other_text and differs_by_thinking(own_text, other_text)
        marks.append("=" if own == other else "t" if is_thought else "\u2260")
        if marks[-1] == "\u2260":
            return "\u2260", f"{own_text!r} and {other_text!r}"
    return max(marks), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", type=Path, help="folders of templates, NAME.jinja")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/tiny"))
    parser.add_argument("--names", nargs="*", default=NAMES)
    options = parser.parse_args()
    reasons, counts = [], {}
    print(f"| template | {' | '.join(CONVERSATIONS)} |", "|---" * (1 + len(CONVERSATIONS)) + "|", sep="\n")
    for name in options.names:
        file = next(file for folder in options.folders if (file := folder / f"{name}.jinja").is_file())
        tokenizer, sign = make_tokenizer(file.read_text(encoding="utf-8"), options.tokenizer)
        cells = []
        for what, (messages, tools) in CONVERSATIONS.items():
            spelled = [{**message, "content": message["content"].replace("SIGN", sign)} for message in messages]
            mark, reason = compare(tokenizer, spelled, tools, what == "a begun reply")
            cells.append(mark)
            counts[mark] = counts.get(mark, 0) + 1
            reasons += [f"{name}, {what}: {reason}"] if reason else []
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("", ", ".join(f"{mark} {number}" for mark, number in sorted(counts.items())), "", sep="\n")
    print(*(f"- {reason}" for reason in reasons), sep="\n")
    sys.exit(int("\u2260" in counts))


if __name__ == "__main__":
    main()
