"""The calculator tool: arithmetic on numbers, with bounds that end a bomb before it is computed.

It evaluates a syntax tree of its own choosing and never calls `eval`: names, attributes, strings, comparisons and
everything else but numbers, operators and a few functions are refused.

    calculate("37*48")      # "1776"
"""

import ast
import math
import operator
from collections.abc import Callable

Number = int | float

MAX_CHARS = 300
# Whole numbers beyond this many bits are refused, before a product or power is computed.
MAX_BITS = 2048

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_ROUNDED_DIGITS = 15


class CalculatorError(ValueError):
    """What is wrong with an expression, in words for the model."""


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text; whole values without a point.

    Raises:
        CalculatorError: no arithmetic, too long or too large, or without a value (division by zero).
    """
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalculatorError(f"{expression!r} is not an arithmetic expression") from error
    try:
        return _text(_value(tree))
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error
    except OverflowError as error:
        raise CalculatorError("the value is too large") from error
    except TypeError as error:  # a function with the wrong number of arguments
        raise CalculatorError(str(error)) from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            return _combine(symbol, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _apply(name, [_value(argument) for argument in arguments])
    raise CalculatorError(f"{ast.unparse(node)!r:.60} is not arithmetic; use numbers, + - * / // % ** and parentheses")


def _combine(symbol: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int):
        if isinstance(symbol, ast.Mult):
            _check_bits(left.bit_length() + right.bit_length() - 1)
        if isinstance(symbol, ast.Pow) and right > 0:
            _check_bits((left.bit_length() - 1) * right)  # at least so many; the value itself is checked below
    return _bounded(_OPERATORS[type(symbol)](left, right))


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > _MAX_ROUNDED_DIGITS:
        raise CalculatorError(f"round takes at most {_MAX_ROUNDED_DIGITS} digits")
    return round(value, digits) if digits else round(value)


_FUNCTIONS: dict[str, Callable[..., Number]] = {"abs": abs, "min": min, "max": max, "round": _round, "sqrt": math.sqrt}


def _apply(name: str, arguments: list[Number]) -> Number:
    try:
        return _bounded(_FUNCTIONS[name](*arguments))
    except ValueError as error:
        raise CalculatorError(f"{name}: {error}") from error


def _bounded(value: object) -> Number:
    if isinstance(value, int):
        _check_bits(value.bit_length())
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise CalculatorError("the value is not a finite real number")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise CalculatorError("the value is too large")


def _text(value: Number) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else format(value, ".12g")
    return str(value)
