"""A calculator as a tool, in a class in the form of TRL's environment_factory, and in a program of the openai package.

    --env_name dataset --episode recipes/calculator/calculator.py:Calculator
    --env_name agent --agent recipes/calculator/calculator.py:play

Its result says what to do with it. Qwen2.5-Coder-0.5B gives a bare number to the calculator again, up to the limit.
"""

import json

from envs.grading.answers import final_answer, parse_arithmetic
from envs.grading.numerals import same_number

try:
    import openai
except ImportError:  # of the class
    openai = None

MAX_TURNS = 3
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes the exact value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "Whole numbers with + - * and brackets."},
            },
            "required": ["expression"],
        },
        "return": {"type": "string"},  # as transformers describes the class's method, so that both read the same prompt
    },
}


class Calculator:
    """Rows have a prompt with an expression, and its value as the answer."""

    def reset(self, **row: object) -> None:
        """Begins an episode."""

    def calculate(self, expression: str) -> str:
        """
        Computes the exact value of an arithmetic expression.

        Args:
            expression: Whole numbers with + - * and brackets.
        """
        value, _ = parse_arithmetic(str(expression))
        if value is None:
            raise ValueError("this is not an expression of whole numbers with + - * and brackets")
        return f"The result is {value}. Now write it in a sentence, without a call."


def play(prompt: str, answer: str, base_url: str, api_key: str) -> float:
    """Plays a row as a program, and returns 1 if the last number of a reply without a call is the answer."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": prompt}]
    for _ in range(MAX_TURNS):
        try:
            answered = client.chat.completions.create(model="policy", messages=messages, tools=[SCHEMA])
        except openai.BadRequestError:  # the context is full
            return 0.0
        message = answered.choices[0].message
        text, results = message.content or "", [*map(result_of, message.tool_calls or ())]
        if not results and "{" in text:  # a call that is not JSON is no answer either
            results = [{"role": "user", "content": 'Write a call as {"name": "calculate", "arguments": {...}}.'}]
        if not results:
            found = final_answer(text, "any")
            return float(found is not None and same_number(answer, found))
        messages += [message, *results]
    return 0.0


def result_of(call: "openai.types.chat.ChatCompletionMessageToolCall") -> dict[str, str]:
    """Returns the message with the result of a call, or with its error."""
    try:
        result = Calculator().calculate(**json.loads(call.function.arguments))
    except Exception as error:  # noqa: BLE001 (a call is hostile input)
        result = str({"error": str(error)})
    return {"role": "tool", "tool_call_id": call.id, "content": result}
