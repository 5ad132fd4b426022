"""Rewards for the form of a reply, from its text alone; those for its length in tokens are in utils/rewards.py."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(text: str) -> float:
    """1.0 for "<think> ... </think> <answer> ... </answer>" and nothing else, else 0.0.

    Source: github.com/johnnycrab/easy-GRPO, format_reward_function.
    """
    places = [text.find(tag) for tag in TAGS]
    in_order = all(text.count(tag) == 1 for tag in TAGS) and places == sorted(places)
    if not in_order:
        return 0.0
    between = text[places[1] + len("</think>") : places[2]]
    outside = text[: places[0]] + between + text[places[3] + len("</answer>") :]
    return float(not outside.strip())


def quarter_per_tag(text: str) -> float:
    """A quarter for each of the four tags that stands in the text exactly once. Source: policy-gradients."""
    return sum(text.count(tag) == 1 for tag in TAGS) / 4


FORMAT_REWARDS = {"think_answer": think_answer, "tags": quarter_per_tag}
