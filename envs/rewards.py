"""Rewards for the form of a reply, from its text alone; those for its length in tokens are in utils/rewards/shaping.py.

Source of the form: the prompt of DeepSeek-R1-Zero, arXiv 2501.12948, table 1.
"""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(text: str) -> float:
    """1.0 for "<think> ... </think> <answer> ... </answer>", each tag once and nothing outside, else 0.0."""
    places = [text.find(tag) for tag in TAGS]
    in_order = all(text.count(tag) == 1 for tag in TAGS) and places == sorted(places)
    if not in_order:
        return 0.0
    between = text[places[1] + len("</think>") : places[2]]
    outside = text[: places[0]] + between + text[places[3] + len("</answer>") :]
    return float(not outside.strip())


def quarter_per_tag(text: str) -> float:
    """A quarter for each of the four tags that stands in the text at least once.

    Source: github.com/zafstojano/policy-gradients.
    """
    return sum(tag in text for tag in TAGS) / 4


def graded_blocks(text: str) -> float:
    r"""0.1 for a think block, 0.5 for an answer block, 1.0 where "<think>...</think>\n<answer>...</answer>" is all.

    Source: github.com/policy-gradient/GRPO-Zero, countdown_task.py.
    """
    seam = text.find("</think>\n<answer>")
    begins, ends = text.startswith("<think>"), text.removesuffix("\n").endswith("</answer>")
    if begins and seam >= 0 and ends:
        return 1.0
    return 0.1 * has_block(text, "<think>", "</think>") + 0.5 * has_block(text, "<answer>", "</answer>")


def has_block(text: str, start: str, end: str) -> bool:
    """True if the end tag stands somewhere behind a start tag."""
    first = text.find(start)
    return first >= 0 and text.find(end, first) >= 0


FORMAT_REWARDS = {"think_answer": think_answer, "tags": quarter_per_tag, "blocks": graded_blocks}
