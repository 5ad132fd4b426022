"""Rewards for the form of a reply, from its text alone; those for its length in tokens are in core/terms/lengths.py.

Source of the form: the prompt of DeepSeek-R1-Zero, arXiv 2501.12948, table 1.
"""

import re

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(text: str) -> float:
    """Returns 1.0 for "<think> ... </think> <answer> ... </answer>", each tag once and nothing outside; if not, 0.0."""
    has_each_once = all(text.count(tag) == 1 for tag in TAGS)  # otherwise a search for the last end would take n^2
    blocks = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
    return float(has_each_once and re.fullmatch(blocks, text, re.DOTALL) is not None)


def quarter_per_tag(text: str) -> float:
    """Returns a quarter for each of the four tags that is in the text at least once.

    Source: github.com/zafstojano/policy-gradients.
    """
    return sum(tag in text for tag in TAGS) / 4


def graded_blocks(text: str) -> float:
    r"""Returns 0.1 for a think block + 0.5 for an answer block, 1.0 for "<think>...</think>\n<answer>...</answer>".

    Source: github.com/policy-gradient/GRPO-Zero, countdown_task.py.
    """
    is_begun = text.startswith("<think>")
    is_joined = "</think>\n<answer>" in text
    is_ended = text.removesuffix("\n").endswith("</answer>")
    if is_begun and is_joined and is_ended:
        return 1.0
    has_think, has_answer = (end in text.partition(start)[2] for start, end in (TAGS[:2], TAGS[2:]))
    return 0.1 * has_think + 0.5 * has_answer


FORMAT_REWARDS = {"think_answer": think_answer, "tags": quarter_per_tag, "blocks": graded_blocks}
