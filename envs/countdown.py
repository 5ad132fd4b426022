"""Countdown: combine the given numbers with + - * / so that they make the target.

Sources: github.com/kvfrans/lmpo, whose prompts and ranges are the defaults; github.com/Jiayi-Pan/TinyZero (prompt
"tinyzero"); games/countdown.py of github.com/open-thought/reasoning-gym (expression "chain").
"""

import random
import re
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from envs.base import Env, Problem, check_choice, choose_split
from envs.grading.answers import extract_answer, parse_arithmetic
from utils.settings.errors import UserError

PROMPTS = {
    "full": (
        "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
        "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. Think for only "
        "ten sentences, then return the final answer in <answer> </answer> tags, for example "
        "<answer> (1 + 2) / 3 </answer>."
    ),
    "bare": "Use {bare_numbers} to make {target}.",
    "tinyzero": (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        "User: Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And "
        "return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.\nAssistant:"
    ),
}
SYSTEM = {
    "full": (
        "You are a helpful assistant. You first think about the reasoning process in the mind, and then provide the "
        "user with the answer."
    ),
    "tinyzero": "",
    "bare": "",
}
PREFIXES = {"full": "<think>", "tinyzero": " Let me solve this step by step.\n<think>", "bare": ""}
NUM_TASKS = {"train": 100_000, "test": 1024, "valid": 512}
OP = "[-+*/×÷−]"
STEP = re.compile(  # "a op b = c", neither the end of a longer sum (1+2+3=6) nor the start of a chain (2*3=6+1)
    rf"(?=\d)(?<![-+*/×÷−\d.)])(?<![\d)]{OP} )(?<![\d)] {OP} )"  # the digit first: twice as fast
    rf"(\d{{1,9}}) ?({OP}) ?(\d{{1,9}}) ?= ?(-?\d{{1,9}})(?!\d|\.\d|,\d\d\d(?!\d)| ?{OP} ?[\d(])"
)
MAX_STEPS_TEXT = 200_000  # characters that are searched for steps; more than any completion has


@dataclass(eq=False)
class Countdown(Env):
    """Reward 1.0 for an expression that uses each number once and makes the target, `partial` for one that misses it.

    A fifth of all sets of numbers is kept for the test split, so no training problem shares its numbers with a test
    problem. The valid split has those of that fifth that no test problem has: none, for few small numbers.
    """

    splits = ("train", "valid", "test")
    is_generated = True
    tokens_per_action = 1024
    force_answer_at = 50

    split: str = "train"
    numbers: int = 4
    mixture: str = ""  # instead of `numbers`: how many numbers the problems have in turn, as 2+3+6
    min_number: int = 0
    max_number: int = 99
    max_target: int = 1000
    expression: str = "chain"  # source of a problem: chain as in kvfrans/lmpo, or tree, with positive results only
    max_value: int = 1000  # largest intermediate result of a tree
    prompt: str = "full"
    partial: float = 0.1  # return of an answer that uses the numbers and misses the target
    truncation_penalty: float = 0.05  # subtracted from a positive return of a truncated reply
    num_tasks: int = 0  # 0: 100,000 to train on, 1024 to test on, 512 to validate on (fewer if fewer exist)

    def __post_init__(self):
        check_choice("prompt", self.prompt, PROMPTS)
        check_choice("expression", self.expression, ("chain", "tree"))
        if not re.fullmatch(r"(\d+(\+\d+)*)?", self.mixture):
            raise UserError(f"mixture={self.mixture}: give how many numbers problems have, as 2+3+6")
        self.sizes = [int(size) for size in self.mixture.split("+")] if self.mixture else [self.numbers]
        if min(self.sizes) < 1 or not 0 <= self.min_number <= self.max_number or self.max_target < 1:
            raise UserError(
                "Countdown needs numbers >= 1, 0 <= min_number <= max_number and max_target >= 1: correct --env_options"
            )
        self.num_tasks = self.num_tasks if self.num_tasks > 0 else NUM_TASKS[self.split]
        self.test_sets = set()  # numbers, sorted, of the problems of the test split that has the same options
        if self.split == "valid":
            test = copy(self)  # of any subclass, whatever its constructor takes
            test.split = "test"
            instances = test.distinct_instances(max(self.num_tasks, NUM_TASKS["test"]))
            self.test_sets = {tuple(sorted(numbers)) for numbers, _ in instances}
        self.instance(0)  # options that leave no problem at all fail here, not in the middle of a run
        if self.split != "train":
            self.instances = self.distinct_instances(self.num_tasks)
            self.num_tasks = len(self.instances)

    def instance(self, index: int) -> tuple[tuple[int, ...], int]:
        """Returns the numbers and the target of this index: numbers of this split, and a target they can make."""
        size = self.sizes[index % len(self.sizes)]
        rng = random.Random(f"countdown {self.split} {index}")  # seeded by the text's digest: the same in every process
        for _ in range(100_000):
            numbers = tuple(rng.randint(self.min_number, self.max_number) for _ in range(size))
            if self.expression == "chain":
                numbers, target = chain_randomly(numbers, rng)
            is_held_out = set_split(numbers) == "test"
            if is_held_out == (self.split == "train") or tuple(sorted(numbers)) in self.test_sets:
                continue
            if self.expression == "tree":
                target = self.combine_randomly(list(numbers), rng)
            if target is not None and 1 <= target <= self.max_target:
                return numbers, target
        taken = ", since the test split takes all numbers that are held out" if self.split == "valid" else ""
        raise UserError(f"Countdown found no solvable problem{taken}: widen the range of numbers, or raise max_target")

    def combine_randomly(self, values: list[int], rng: random.Random) -> int | None:
        """Returns the result of a random expression over all values; None when a step leaves the positive integers."""
        while len(values) > 1:
            a, b = (values.pop(rng.randrange(len(values))) for _ in range(2))
            op = rng.choice("+-*/")
            if op == "/" and (b == 0 or a % b):
                return None
            values.append(a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a // b)
            if not 0 < values[-1] <= self.max_value:
                return None
        return values[0]

    def distinct_instances(self, num_instances: int) -> list[tuple[tuple[int, ...], int]]:
        """Returns the first instances that differ in more than the order of numbers; fewer if fewer are found."""
        instances = {}
        for numbers, target in map(self.instance, range(10 * num_instances)):
            key = (tuple(sorted(numbers)), target)
            instances.setdefault(key, (numbers, target))
            if len(instances) == num_instances:
                break
        return list(instances.values())

    def problem(self, index: int) -> Problem:
        return self.make_problem(*(self.instance(index) if self.split == "train" else self.instances[index]))

    def bins(self) -> list[str]:
        """Returns how many numbers each problem has."""
        if self.split == "train":
            return [str(self.sizes[index % len(self.sizes)]) for index in range(self.num_tasks)]
        return [str(len(numbers)) for numbers, _ in self.instances]

    def make_problem(self, numbers: tuple[int, ...], target: int) -> Problem:
        text = PROMPTS[self.prompt].format(
            numbers=list(numbers), bare_numbers=" ".join(map(str, numbers)), target=target
        )
        messages, prefix = [{"role": "user", "content": text}], PREFIXES[self.prompt]
        if SYSTEM[self.prompt]:
            messages = [{"role": "system", "content": SYSTEM[self.prompt]}, *messages]
        return Problem(messages, (numbers, target), thinking=True, prefix=prefix, plain=self.prompt == "tinyzero")

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        """Returns the rewards, whether the answer is "valid", and how many "steps" a op b = c are right."""
        numbers, target = problem.answer
        answer = extract_answer(text) or ""
        left, _, right = answer.partition("=")
        value, used = parse_arithmetic(left if right.strip() == str(target) else answer)
        valid = value is not None and sorted(used) == sorted(numbers)
        correct = valid and value == target
        right_steps, steps = share_right_arithmetic(text)
        return {
            "return": 1.0 if correct else self.partial * valid,
            "correct_answer": float(correct),
            "valid": float(valid),
            "arithmetic": right_steps / max(steps, 1),
            "steps": float(steps),
        }

    def reward_row(self, problem: Problem) -> dict[str, object]:
        numbers, target = problem.answer
        return {"prompt": problem.messages, "nums": list(numbers), "target": target}

    def examples(self, problem: Problem) -> dict[str, str]:
        numbers, target = problem.answer
        wrong = "+".join(map(str, numbers)) if sum(numbers) != target else "*".join(map(str, numbers)) + "+0"
        replies = {"right": solve(numbers, target), "wrong": wrong, "cheating": str(target)}
        return {name: f"<think>Hm.</think>\n<answer>{x}</answer>" for name, x in replies.items() if x is not None}


def chain_randomly(numbers: tuple[int, ...], rng: random.Random) -> tuple[tuple[int, ...], int]:
    """Returns the numbers, in random order, and the result of an expression that goes over them from left to right.

    For a division, one of the remaining numbers that divides the value exactly replaces the next one; if there is none,
    the step subtracts.
    """
    numbers = list(numbers)
    value = numbers[0]
    for i in range(1, len(numbers)):
        op = rng.choice("+-*/")
        divisors = [number for number in numbers[i:] if number and value % number == 0]
        if op == "/" and divisors:
            numbers[i] = rng.choice(divisors)
            value //= numbers[i]
        elif op == "+":
            value += numbers[i]
        elif op == "*":
            value *= numbers[i]
        else:
            value -= numbers[i]
    rng.shuffle(numbers)
    return tuple(numbers), value


def solve(numbers: tuple[int, ...], target: int) -> str | None:
    """Returns an expression over all numbers that makes the target, by exhaustive search; None if there is none."""
    return _search([(Fraction(number), str(number)) for number in numbers], target, set())


def _search(terms: list[tuple[Fraction, str]], target: int, seen: set[tuple[Fraction, ...]]) -> str | None:
    if len(terms) == 1:
        return terms[0][1].removeprefix("(").removesuffix(")") if terms[0][0] == target else None
    if (key := tuple(sorted(value for value, _ in terms))) in seen:
        return None
    seen.add(key)
    for i, j in combinations(range(len(terms)), 2):
        (a, x), (b, y) = terms[i], terms[j]
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        results = [(a + b, f"({x}+{y})"), (a * b, f"({x}*{y})"), (a - b, f"({x}-{y})"), (b - a, f"({y}-{x})")]
        results += [(a / b, f"({x}/{y})")] if b else []
        results += [(b / a, f"({y}/{x})")] if a else []
        for result in results:
            if expression := _search([*rest, result], target, seen):
                return expression
    return None


def set_split(numbers: tuple[int, ...]) -> str:
    """Returns the split of this set of numbers, in any order: a fifth is for test, a tenth for valid."""
    return choose_split(repr(sorted(numbers)))


def share_right_arithmetic(text: str) -> tuple[int, int]:
    """Returns how many steps "a op b = c" over integers in a text are right, and how many there are."""
    steps = STEP.findall(text[:MAX_STEPS_TEXT])
    num_right = 0
    for a, op, b, c in ((int(a), op, int(b), int(c)) for a, op, b, c in steps):
        results = {"+": a + b, "-": a - b, "−": a - b, "*": a * b, "×": a * b}
        num_right += results[op] == c if op in results else b != 0 and a == b * c
    return num_right, len(steps)
