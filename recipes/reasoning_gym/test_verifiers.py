"""Code in an answer to Reasoning Gym is never executed and never paid; right answers are paid as the library does."""

import ast
import copy
import inspect
import os
import time
from importlib import metadata

import pytest

from envs import make_env
from envs.base import Env, Problem
from recipes.reasoning_gym.reasoning import SplitQuestions
from recipes.reasoning_gym.verifiers import AUDITED, GRAMMARS, check_release, is_arithmetic, is_formula, is_literal_list
from tests.helpers import slow

reasoning_gym = pytest.importorskip("reasoning_gym")

from reasoning_gym.composite import DatasetSpec  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402

CANARY = "LMPO_CANARY"  # a variable that each of CODE would set
SET = f"__import__('os').environ.__setitem__('{CANARY}','1')"
# By how they are written: a call in each kind of node, evaluators' names, attributes, and texts for other parsers.
CODE = [
    SET, f"[{SET}]", f"[[{SET}]]", f"[{SET} for _ in '1']", f"[1, 2][{SET} or 0]", f"[*{SET}]", f"{{1: {SET}}}",
    f"f'{{{SET}}}'", f"(lambda: {SET})()", f"(y := {SET})", f"1 if {SET} else 2", f"x + {SET}", f"sin({SET})",
    f"x.__class__({SET})", f"exec({SET!r})", f"ｅval({SET!r})", f"sympify({SET!r})", f"parse_expr({SET!r})",
    f"Symbol({SET!r}).func", f"Lambda(x, {SET})(1)", f"lambdify(x, {SET!r})(1)", f"x**2 #\n{SET}", f"1\n{SET}",
    f"'{{0.__class__}}'.format({SET})", f"({SET})!", f"0.[{SET}]", f"{SET}, 1, 2", f'{{"a": "{SET}"}}',
    f"!!python/object/apply:os.system ['{SET}']", "[setattr(type(self),'score_answer',lambda *a,**k:1.0)]",
    "type(self).score_answer.__globals__", "entry['answer']", "[oracle_answer]", "target_poly", "valid_solutions[0]",
    "exit()", "breakpoint()", "print", "open('/etc/passwd')", r"\write18{env}",
]  # fmt: skip
ENDLESS = [
    "9**9**9**9", "2**10**10", "(x+1)**100000", "x**x**x**x", "exp(exp(exp(exp(9))))", "1e999999999",
    "factorial(10**9)", "9!!!!", "[1]*10**9", "R999999999", "A+999999999", "A" * 100_000, "9" * 5000, "(" * 5000,
    "-" * 5000 + "1", "(" * 100 + "1" + ")" * 100 + "**9" * 20, "1+" * 1500 + "1", "sqrt(" * 90 + "2" + ")" * 90,
    "NaN", "[" + ", ".join(["NaN"] * 5) + "]", "nan+nanj", "inf",
]  # fmt: skip
EVALUATED = {
    "binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24", "simple_integration",
    "intermediate_integration", "polynomial_multiplication",
}  # fmt: skip
# Modules that call an evaluator on text of the library's own: the question, or the reference.
OWN_TEXT = {"number_sorting", "bitwise_arithmetic", "basic_arithmetic", "codeio", "propositional_logic"}
SECONDS = 10  # of the processor, for one answer: far above what any takes, far below what a tower of powers would


def questions(name: str, number: int) -> list[Problem]:
    """The first questions of a data set."""
    parts = [DatasetSpec(part, 1, {}) for part in sorted(EVALUATED)]
    config = {"datasets": parts} if name == "composite" else {}
    dataset = reasoning_gym.create_dataset(name, seed=1, size=number, **config)
    asked = SplitQuestions(dataset, split="train")
    return [Problem([], asked.read(position)) for position in range(number)]


@pytest.fixture(scope="module")
def env() -> Env:
    return make_env("reasoning_gym", datasets="leg_counting")


@pytest.mark.parametrize("name", [*sorted(GRAMMARS), *slow(*sorted(DATASETS.keys() - GRAMMARS.keys()))])
def test_no_code_is_executed_or_paid(env, name):
    """Nor does any answer take for ever, or change the entry or the verifier."""
    (problem,) = questions(name, 1)
    entry = problem.answer
    verifier = type(entry.dataset).score_answer
    before = copy.deepcopy(entry)
    of_any_text = {"rush_hour": 0.01, "rubiks_cube": 1 / 3}  # what the library pays for it
    most = of_any_text.get(name, 0.05) if name in GRAMMARS else 0.99
    for answer in CODE + ENDLESS:
        clock = time.process_time()
        assert env.score(problem, f"<answer>{answer}</answer>")["return"] <= most, answer[:80]
        assert time.process_time() - clock < SECONDS, answer[:80]
        assert CANARY not in os.environ, answer
        assert type(entry.dataset).score_answer is verifier
        assert entry == before, answer


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DATASETS))
def test_references_are_paid_as_the_library_pays_them(env, name):
    for problem in questions(name, 20):
        entry = problem.answer
        assert entry["metadata"]["source_dataset"] in DATASETS
        if isinstance(entry["answer"], str):
            expected = entry.dataset.score_answer(entry["answer"].strip(), copy.deepcopy(entry))
            paid = env.score(problem, f"<answer>{entry['answer']}</answer>")["return"]
            assert paid == pytest.approx(expected), entry["answer"]


@pytest.mark.parametrize(
    ("name", "rewrite", "expected"),
    [
        ("spiral_matrix", lambda right, _: str([int(cell) for cell in right.split()]), 0.1),
        ("string_insertion", lambda right, _: str(list(right)), 0.1),
        ("binary_matrix", lambda right, _: str([list(map(int, row.split())) for row in right.split("\n")]), 0.1),
        ("n_queens", lambda right, _: str([row.split() for row in right.split("\n")]), 0.5),
        ("n_queens", lambda _, meta: meta["valid_answers"][-1], 1),
        ("countdown", lambda right, _: f"(({right}))", 1),
        ("puzzle24", lambda right, _: f"+({right})", 1),
        ("simple_integration", lambda right, _: f"7 + C/2 + ({right})", 1),
        ("intermediate_integration", lambda right, _: f"sqrt(2)*pi - exp(3) + {right}", 1),
        ("polynomial_multiplication", lambda right, _: f"5 + {right} - 5", 1),
        ("coin_flip", lambda right, _: f" {float(right):.8f}", 1),
        ("complex_arithmetic", lambda right, _: f"({right})".replace("i", "I"), 1),
        ("number_sorting", lambda right, _: right.replace("'", ""), 1),
        ("game_of_life_halting", lambda right, _: str(right != "True"), 0),
        ("rush_hour", lambda right, _: right, 1),
    ],
)
def test_other_spellings_are_verified(env, name, rewrite, expected):
    for problem in questions(name, 3):
        entry = problem.answer
        if isinstance(entry["answer"], str):
            answer = rewrite(entry["answer"], entry["metadata"])
            found = env.score(problem, f"<answer>{answer}</answer>")["return"]
            assert found == pytest.approx(expected), answer


ARITHMETIC = ["1 + 2*(3 - 4)/5", "-.5**2", "2**50"]
FORMULAS = ["x", "-34*x**8/15 - 5*x/4 + C", "exp(2*x)*sin(3*x)", "log(Abs(x))", "(-2*x - 8)**(3/2)"]
NO_EXPRESSIONS = [
    "y", "sin", "x(3)", "sin(x, 2)", "sin(x)(2)", "sin.x", "x.real", "2**2**2**2**2", "2**1000", "sin(sin(sin(x)))",
    "1 2", "2x", "0x10", "1_0", "1e5", "1j", "١", "𝐱", "x; x", "x == x", "x if x else x", "[x]", "'x'", "x and x",
    "None", "", "x @ x", "1//2", "5!", "x^2", "sin(*x)",
]  # fmt: skip
NO_LISTS = [
    "1", "(1, 2)", "{1: 2}", "[[[1]]]", "[None]", "[b'a']", "[1j]", "[x]", "['\\x41']", "[f'a']", "[1]*9", "[True]",
    "[*[1]]",
]  # fmt: skip


def test_expressions_and_lists_are_told_from_code():
    entry = {"metadata": {"variable": "x"}}
    for text in (*ARITHMETIC, *FORMULAS, *NO_EXPRESSIONS):
        assert is_arithmetic(text, entry) == (text in ARITHMETIC), text
        assert is_formula(text, entry) == (text not in NO_EXPRESSIONS), text
    for text in ("[]", "[1, -2.5, 'a']", "[['Q', '_'], [1]]", *NO_LISTS):
        assert is_literal_list(text, {}) == (text not in NO_LISTS), text


def test_the_release_whose_verifiers_were_read():
    assert metadata.version("reasoning-gym") == AUDITED
    assert len(DATASETS) == 106
    with pytest.raises(ValueError, match=f"pip install reasoning-gym=={AUDITED}"):
        check_release("0.1.26")


def test_every_verifier_that_evaluates_text_has_a_grammar():
    """Calls of evaluators in the modules of the library's data sets: a new release may have more."""
    found = set()
    for name, (dataset, _) in DATASETS.items():
        calls = [
            node.func
            for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(dataset))))
            if isinstance(node, ast.Call)
        ]
        called = {getattr(func, "attr", getattr(func, "id", "")) for func in calls}
        found |= {name} if called & {"eval", "exec", "parse_expr", "sympify", "literal_eval"} else set()
    assert found == EVALUATED | OWN_TEXT
    assert set(GRAMMARS) >= EVALUATED


def test_a_composite_data_set_has_the_grammars_of_its_parts(env):
    for problem in questions("composite", 8):
        assert env.score(problem, f"<answer>{SET}</answer>")["return"] == 0
        assert CANARY not in os.environ
