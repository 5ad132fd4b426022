"""Makes models/tiny: a 0.85M-parameter Qwen3 that can search for Countdown solutions, but gives up too early.

    python runs/make_tiny.py            # 40 minutes on two cores

1. Tokenizer: byte-level BPE of 512 ids with Qwen's split pattern, each number 0-99 one token, a ChatML template.
2. Pre-training: next-token prediction on synthetic replies. A reply tries combinations of three numbers one by one, in
   random order and never twice. It computes each, checks it against the target and stops at a hit. After a miss it
   gives up with the probability of its mood: most replies are impatient, some are not. A few documents are plain
   arithmetic.

What it leaves for RL to find: keep searching, and try the promising combinations first. The number sets of Countdown's
test split never occur.
"""

import random
import sys
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import utils.settings.packages  # noqa: F401 (says what to install)

from absl import app, flags
from transformers import PreTrainedTokenizerFast

from envs.countdown import PROMPTS, Countdown
from runs.pretraining import Document, make_adamw, make_tokenizer, pretrain

MODELS = Path(__file__).resolve().parents[1] / "models"
COUNTDOWN = dict(numbers=3, min_number=1, max_number=15, max_target=30, expression="tree", max_value=30, prompt="bare")
MOOD_SHARES = (0.85, 0.15)  # of the replies
GIVE_UP = (0.6, 0.04)  # probability to give up after a miss in each mood
MAX_TRIES = 13
SHARE_DRILLS = 0.15
STEPS = 6000
RESULT_WEIGHT = 3.0  # of the loss on computed numbers and on the verdict of a check

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)


def arithmetic(a: int, op: str, b: int) -> int | None:
    """Returns the result if this step stays within the positive integers that the model knows, larger operand first."""
    if op in "+*-" and a < b:
        return None
    if op == "/" and (b == 0 or a % b):
        return None
    quotient = a // b if b else 0
    result = {"+": a + b, "-": a - b, "*": a * b, "/": quotient}[op]
    return result if 0 < result <= COUNTDOWN["max_value"] else None


def combinations(numbers: tuple[int, int, int]) -> dict[str, tuple[str, int]]:
    """Returns every way to combine three numbers in two steps: {steps: (expression, result)}."""
    ways = {}
    for i, j, rest in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        for op in "+-*/":
            ways |= second_steps(numbers[i], op, numbers[j], numbers[rest])
    return ways


def second_steps(a: int, op: str, b: int, c: int) -> dict[str, tuple[str, int]]:
    """Returns every way to go on from a op b with c."""
    ways = {}
    inner = arithmetic(a, op, b)
    if not inner:
        return ways
    for op2 in "+-*/":
        orders = (inner, c, f"({a}{op}{b}){op2}{c}"), (c, inner, f"{c}{op2}({a}{op}{b})")
        for x, y, expression in orders:
            result = arithmetic(x, op2, y)
            if result is not None:
                steps = f"{a}{op}{b}={inner},{x}{op2}{y}={result}"
                ways[steps] = (expression, result)
    return ways


def reply(numbers: tuple[int, ...], target: int, rng: random.Random) -> str:
    """Writes one search as the base model shall imitate it."""
    give_up = rng.choices(GIVE_UP, MOOD_SHARES)[0]
    tries = list(combinations(numbers).items())
    rng.shuffle(tries)
    tries = tries[:MAX_TRIES]
    text = "<think>\n"
    for i, (steps, (expression, result)) in enumerate(tries, 1):
        is_hit = result == target
        text += f"{steps}?{target}{'✓' if is_hit else '✗'}\n"
        if is_hit or rng.random() < give_up or i == len(tries):
            return text + f"</think>\n<answer>{expression}</answer>"
    raise AssertionError(f"no combination of {numbers}")


def drill(rng: random.Random) -> str:
    """Writes a list of single steps, so that every sum, difference, product and quotient is seen often."""
    lines = []
    while len(lines) < 15:
        a = rng.randint(1, 30)
        b = rng.randint(1, 30)
        op = rng.choice("+-*/")
        if op in "*/":
            b = rng.randint(1, 15)
        if op == "*":
            a = rng.randint(b, max(b, 30 // b))
        if op == "/":
            a = b * rng.randint(1, 30 // b)
        result = arithmetic(a, op, b)
        if result is not None:
            lines.append(f"{a}{op}{b}={result}")
    return ",".join(lines)


def make_corpus() -> list[str]:
    """Returns the texts that the tokenizer is trained on: replies, arithmetic, the prompts and every number."""
    rng = random.Random(0)
    env = Countdown(**COUNTDOWN)
    numbers_to_99 = " ".join(map(str, range(100)))
    corpus = [numbers_to_99] * 1000
    corpus += [drill(rng) for _ in range(500)]
    for i in range(1000):
        numbers, target = env.instance(i)
        prompt = env.problem(i).messages[0]["content"]
        corpus += [prompt, reply(numbers, target, rng), PROMPTS["full"]]
    corpus += ["Write a poem about the sea. user assistant system\nuser\nassistant\nsystem"] * 1000
    return corpus


class Writer:
    """Writes documents: replies to Countdown problems, and drills."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self.env = Countdown(**COUNTDOWN)
        self.equals = tokenizer.encode("=")[-1]  # the token before each result
        self.verdicts = {tokenizer.encode("?24✓\n")[-1], tokenizer.encode("?24✗\n")[-1]}

    def write(self, numbers: range, rng: random.Random) -> list[Document]:
        """Returns documents with these numbers."""
        texts = [self.texts(i, rng) for i in numbers]
        prompts = self.tokenizer([prompt for prompt, _ in texts])["input_ids"]
        replies = self.tokenizer([text for _, text in texts])["input_ids"]
        return [self.document(*pair) for pair in zip(prompts, replies, strict=True)]

    def texts(self, i: int, rng: random.Random) -> tuple[str, str]:
        """Returns a prompt and its reply, or a drill without a prompt."""
        if rng.random() < SHARE_DRILLS:
            return "", drill(rng)
        problem = self.env.problem(i)
        prompt = self.tokenizer.apply_chat_template(problem.messages, tokenize=False, add_generation_prompt=True)
        return prompt, reply(*problem.answer, rng) + "<|im_end|>"

    def document(self, prompt: list[int], text: list[int]) -> Document:
        """Returns a document to train on; tokens that the model must compute weigh most."""
        ids = prompt + text
        is_result = [before == self.equals or token in self.verdicts for before, token in pairwise([-1, *ids])]
        weights = [RESULT_WEIGHT if is_key else 1.0 for is_key in is_result]
        return Document(ids, [0.0] * len(prompt) + weights[len(prompt) :])


def main(_):
    tokenizer = make_tokenizer(make_corpus(), ["<think>", "</think>"], CHAT_TEMPLATE)
    pretrain(Path(FLAGS.out), tokenizer, Writer(tokenizer).write, FLAGS.steps, FLAGS.seed, make_adamw(FLAGS.steps))


if __name__ == "__main__":
    FLAGS = flags.FLAGS
    flags.DEFINE_string("out", str(MODELS / "tiny"), "folder to write")
    flags.DEFINE_integer("steps", STEPS, "optimizer steps")
    flags.DEFINE_integer("seed", 0, "of the initial parameters")
    app.run(main)
