"""Calculator: evaluates one arithmetic expression exactly.

Run as `python -I -S calculator.py`. A call is one JSON line on standard input, `{"expression": "2 * (3 + 4)"}`; its answer
is one JSON line, `{"result": "14"}` or `{"error": "..."}`, on the file descriptor in AGENTRT_REPLY_FD (standard output
without it). Nothing is kept from one call to the next. Numbers are integers and fractions (`7/2`), never floats; `2.5` is
read as 5/2. Operators: + - * / // % ** and parentheses. Size is bounded everywhere, so no expression takes long: 1,000
characters, 100 levels, 4,096 bits.
"""

import json
import os
import re
import sys
from fractions import Fraction

MAX_CHARACTERS = 1000
MAX_DEPTH = 100
MAX_BITS = 4096

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?)|(\*\*|//|[-+*/%()]))")


class CalculatorError(ValueError):
    """The expression cannot be evaluated; the message says why."""


def evaluate(expression: str) -> str:
    """The exact value as text: `14`, `-3`, `7/2`. Raises `CalculatorError`."""
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"the expression is longer than {MAX_CHARACTERS} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum()
    if parser.next:
        raise CalculatorError(f"unexpected {parser.next!r}")
    return str(value)


def _tokens(expression: str) -> list[str]:
    tokens, at = [], 0
    while expression[at:].strip():
        match = _TOKEN.match(expression, at)
        if match is None:
            raise CalculatorError(f"unexpected {expression[at:].strip()[0]!r}")
        tokens.append(match[1] or match[2])
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent; each method reads one level of precedence, loosest first, and gives its value."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]
        self._depth = 0

    @property
    def next(self) -> str:
        return self._tokens[-1] if self._tokens else ""

    def sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise CalculatorError(f"more than {MAX_DEPTH} levels of parentheses")
        value = self._product()
        while self.next in ("+", "-"):
            operator, right = self._tokens.pop(), self._product()
            value = _bounded(value + right if operator == "+" else value - right)
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while self.next in ("*", "/", "//", "%"):
            operator, right = self._tokens.pop(), self._signed()
            value = _bounded(value * right if operator == "*" else _divide(value, operator, right))
        return value

    def _signed(self) -> Fraction:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self._tokens.pop() == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Fraction:
        bases = [self._operand()]
        while self.next == "**":
            self._tokens.pop()
            negative = self.next == "-"
            if negative:
                self._tokens.pop()
            operand = self._operand()
            bases.append(-operand if negative else operand)
        value = bases.pop()
        while bases:
            value = _raise(bases.pop(), value)
        return value

    def _operand(self) -> Fraction:
        token = self.next
        if not token:
            raise CalculatorError("the expression ends too early")
        self._tokens.pop()
        if token == "(":
            value = self.sum()
            if self.next != ")":
                raise CalculatorError("a closing parenthesis is missing")
            self._tokens.pop()
            return value
        if not token[0].isdigit():
            raise CalculatorError(f"unexpected {token!r}")
        return _bounded(Fraction(token))


def _divide(left: Fraction, operator: str, right: Fraction) -> Fraction:
    if not right:
        raise CalculatorError("division by zero")
    if operator == "/":
        return left / right
    return Fraction(left // right) if operator == "//" else left % right


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent, its size estimated before it is computed."""
    if exponent.denominator != 1:
        raise CalculatorError("the exponent is not an integer")
    if not base and exponent < 0:
        raise CalculatorError("division by zero")
    if max(_bits(base) - 1, 1) * abs(exponent) > MAX_BITS and abs(base) not in (0, 1):
        raise CalculatorError("the result is too large")
    # An exponent above MAX_BITS is left for bases -1, 0 and 1, where only its parity and its being zero matter.
    power = exponent.numerator if abs(exponent) <= MAX_BITS else 2 + exponent.numerator % 2
    return _bounded(base**power)


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise CalculatorError("the result is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def main() -> None:
    """Read calls, write a reply for each."""
    with open(int(os.environ.get("AGENTRT_REPLY_FD", "1")), "w", encoding="utf-8") as output:
        for line in sys.stdin:
            output.write(json.dumps(answer(line)) + "\n")
            output.flush()


def answer(line: str) -> dict[str, str]:
    """The reply to one call."""
    try:
        return {"result": evaluate(json.loads(line)["expression"])}
    except CalculatorError as error:
        return {"error": str(error)}
    except (ValueError, KeyError, TypeError):
        return {"error": 'expected one JSON line like {"expression": "2 + 3"}'}


if __name__ == "__main__":
    main()
