"""The answers that Reasoning Gym's verifiers receive: a grammar for each verifier that is not safe with any text.

Nine of the library's verifiers give an answer to `eval` or to sympy's parser, which evaluates it; others compute
without limit, or accept what is no answer. The verifiers of release AUDITED were read for this, and GRAMMARS lists the
answers that these may see: lists of literals, or expressions of numbers, operators and named functions.
"""

import ast
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

AUDITED = "0.1.25"  # release of the library whose 106 verifiers were read
MAX_ANSWER = 4000  # characters beyond four times those of the reference answer
MAX_BITS = 160  # about the size of the largest number that an expression may denote; references have up to 98
MAX_NESTED_CALLS = 2  # functions within functions

Entry = Mapping[str, Any]  # a question of Reasoning Gym: "question", "answer", "metadata"
Grammar = Callable[[str, Entry], bool]  # True if the text can be an answer to the question


def check_release(release: str) -> None:
    """Raises ValueError for a release of Reasoning Gym whose verifiers nobody has read for code that they evaluate."""
    if release != AUDITED:
        raise ValueError(
            f"Reasoning Gym {release} is installed; its verifiers may evaluate what a model writes, "
            f"and only those of release {AUDITED} were checked: pip install reasoning-gym=={AUDITED}"
        )


def may_be_verified(answer: str, entry: Entry) -> bool:
    """True if the library's verifier may see an answer: it is the reference itself, or fits the data set's grammar."""
    reference = entry["answer"] if isinstance(entry["answer"], str) else ""
    accepted = [reference, *entry["metadata"].get("valid_answers", ())]
    if answer.strip() in [text.strip() for text in accepted]:
        return True
    if len(answer) > MAX_ANSWER + 4 * len(reference):
        return False
    grammar = GRAMMARS.get(entry["metadata"]["source_dataset"])
    return grammar is None or grammar(answer, entry)


def is_literal_list(answer: str, entry: Entry) -> bool:
    """True for a Python list of numbers and strings, or of such lists, without escape sequences."""
    if "\\" in answer:
        return False
    try:
        value = ast.literal_eval(answer)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    rows = value if isinstance(value, list) else [None]
    cells = [cell for row in rows for cell in (row if isinstance(row, list) else [row])]
    return all(type(cell) in (int, float, str) for cell in cells)


def regular_grammar(pattern: str) -> Grammar:
    """Returns the grammar of a regular expression, for the whole answer."""
    compiled = re.compile(pattern, re.ASCII | re.DOTALL)
    return lambda answer, entry: compiled.fullmatch(answer) is not None


# expressions

TOKEN = r"(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?![\w.])|[A-Za-z]+(?![\w.])|[-+*/(),\s]"
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd)
NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.Call, *OPERATORS)
FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs".split()
)


def is_arithmetic(answer: str, entry: Entry) -> bool:
    """True for numbers, + - * / ** and brackets."""
    return is_expression(answer, frozenset(), frozenset())


def is_formula(answer: str, entry: Entry) -> bool:
    """True for arithmetic with the question's variables, the constants pi, E and C, and FUNCTIONS."""
    variables = entry["metadata"].get("variables", [entry["metadata"].get("variable")])
    return is_expression(answer, frozenset(variables) | {"pi", "E", "C"}, FUNCTIONS)


def is_expression(answer: str, names: frozenset[str], functions: frozenset[str]) -> bool:
    """True for an expression of these names and functions that is small: nothing in it calls, reads or writes more.

    The text is cut into tokens first, since Python's grammar has more spellings of numbers and names than sympy's.
    """
    if not re.fullmatch(f"(?:{TOKEN})*", answer, re.ASCII):
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
        return has_only(tree, names, functions) and value_bits(tree.body) <= MAX_BITS
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False


def has_only(tree: ast.Expression, names: frozenset[str], functions: frozenset[str]) -> bool:
    """True if a tree holds only NODES, finite numbers, these names, and calls of these functions with one argument."""
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    called = {id(node.func) for node in calls}
    return (
        all(isinstance(node, NODES) for node in nodes)
        and all(type(node.value) in (int, float) for node in nodes if isinstance(node, ast.Constant))
        and all(isinstance(call.func, ast.Name) and call.func.id in functions for call in calls)
        and all(len(call.args) == 1 and not call.keywords for call in calls)
        and all(node.id in names for node in nodes if isinstance(node, ast.Name) and id(node) not in called)
    )


def value_bits(node: ast.expr, calls: int = 0) -> float:
    """Returns a bound on the bits of an expression's value if variables are 3: it counts degrees of polynomials too.

    `calls` counts the functions around the node. Infinite for towers of powers and for too many nested functions.
    """
    match node:
        case ast.Constant():
            return math.log2(1 + node.value)
        case ast.UnaryOp():
            return value_bits(node.operand, calls)
        case ast.Call():
            return 8 + value_bits(node.args[0], calls + 1) if calls < MAX_NESTED_CALLS else math.inf
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return 1 + max(value_bits(left, calls), value_bits(right, calls))
        case ast.BinOp(left, ast.Mult() | ast.Div(), right):
            return value_bits(left, calls) + value_bits(right, calls)
        case ast.BinOp(left, ast.Pow(), right):
            exponent = value_bits(right, calls)
            return (1 + value_bits(left, calls)) * 2**exponent if exponent < 10 else math.inf
    return 2.0


GRAMMARS: dict[str, Grammar] = {
    # Verifiers that call eval.
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_literal_list),
    # Verifiers that call sympy's parse_expr.
    **dict.fromkeys(("countdown", "puzzle24"), is_arithmetic),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), is_formula),
    # Verifiers that compute without limit: 10 to the exponent, the number of moves, the width of a shift.
    "coin_flip": regular_grammar(r"[-+.,/\d\s]*"),
    **dict.fromkeys(("rubiks_cube", "rush_hour"), regular_grammar(r"(?!.*\d\d).*")),
    # Verifiers that accept texts that are no answer: NaN, any text that is not empty, and text instead of a number.
    "complex_arithmetic": regular_grammar(r"[-+.*()\d\seijEIJ]*"),
    "number_sorting": regular_grammar(r"(?!.*[Nn][Aa][Nn]).*"),
    "game_of_life_halting": regular_grammar(r"(?!)"),
    "polynomial_equations": regular_grammar(r"[-+.,eE\d\s]*"),
    "quantum_lock": regular_grammar(r"[-A-Ca-c,>\u2192\s]*"),
}
