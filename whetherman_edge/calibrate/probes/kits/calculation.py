"""Calculator, units, dates and regular expressions. They compute for real and change nothing."""

from __future__ import annotations

import ast
import calendar
import json
import math
import operator
import re
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any, ClassVar, Final

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit, ToolFault, choice, schema

from . import sandbox

_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "sqrt": math.sqrt, "abs": abs, "round": round, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil,
    "log": math.log, "log10": math.log10, "exp": math.exp, "gcd": math.gcd, "factorial": math.factorial,
}  # fmt: skip
_REGEX_PROGRAM: Final = """import json, re
pattern, text = json.loads({given!r})
try:
    found = [match.group(0) for match in re.finditer(pattern, text)]
    print(f"{{len(found)}} matches" + (f": {{', '.join(found[:12])}}" if found else ""))
except re.error as error:
    print(f"error: pattern: {{error}}")
"""
_EXPRESSION_CHARS_MAX: Final = 300
_BITS_MAX: Final = 4096
_FACTORIAL_MAX: Final = 200

_UNITS: Final[dict[str, tuple[str, float]]] = {
    "m": ("length", 1.0), "km": ("length", 1000.0), "cm": ("length", 0.01), "mm": ("length", 0.001),
    "mi": ("length", 1609.344), "yd": ("length", 0.9144), "ft": ("length", 0.3048), "in": ("length", 0.0254),
    "nmi": ("length", 1852.0), "kg": ("mass", 1.0), "g": ("mass", 0.001), "lb": ("mass", 0.45359237),
    "oz": ("mass", 0.028349523125), "t": ("mass", 1000.0), "l": ("volume", 1.0), "ml": ("volume", 0.001),
    "gal": ("volume", 3.785411784), "pt": ("volume", 0.473176473), "s": ("time", 1.0), "min": ("time", 60.0),
    "h": ("time", 3600.0), "d": ("time", 86400.0), "j": ("energy", 1.0), "kj": ("energy", 1000.0),
    "kcal": ("energy", 4184.0), "kwh": ("energy", 3.6e6), "ha": ("area", 10000.0), "acre": ("area", 4046.8564224),
    "m2": ("area", 1.0),
}  # fmt: skip


def evaluate(expression: str) -> Any:
    """Value of an arithmetic expression: numbers, + - * / // % ** (or ^), parentheses and a few functions.

    Raises ToolFault for anything else and for results too large to write down.
    """
    if len(expression) > _EXPRESSION_CHARS_MAX:
        raise ToolFault(f"expression: at most {_EXPRESSION_CHARS_MAX} characters")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").rstrip("=? ")
    if not re.search(r"[a-z]\w*\s*\(", text):  # there a comma stands between arguments: gcd(12,180)
        text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    try:
        value = _value(ast.parse(text, mode="eval").body)
        return _sound(value)
    except ZeroDivisionError:
        raise ToolFault("division by zero") from None
    except (SyntaxError, ValueError, OverflowError, TypeError, RecursionError, MemoryError):
        raise ToolFault(f"cannot evaluate {expression[:60]!r}") from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _sound(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Name(id="pi"):
            return math.pi
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg) for arg in args]
            if name == "factorial" and not 0 <= values[0] <= _FACTORIAL_MAX:
                raise ToolFault(f"factorial of 0 to {_FACTORIAL_MAX} only")
            return _FUNCTIONS[name](*values)
    raise ToolFault(f"only arithmetic is allowed, got {ast.unparse(node)[:40]!r}")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _BITS_MAX:
        raise ToolFault("the result is too large")
    return _sound(base**exponent)


def _sound(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ToolFault("the result is no real number")
    if isinstance(value, int) and value.bit_length() > _BITS_MAX:
        raise ToolFault("the result is too large")
    return value


def shown(value: float) -> str:
    """A number as a calculator shows it: no trailing zeros, at most ten decimals."""
    if isinstance(value, int) or float(value).is_integer():
        return str(int(value))
    return f"{value:.10f}".rstrip("0").rstrip(".") if abs(value) >= 1e-6 else f"{value:.10g}"


def a_day(text: str) -> date:
    """A day from its ISO form; raises ToolFault."""
    try:
        return date.fromisoformat(text.strip()[:10])
    except ValueError:
        raise ToolFault(f"expected a date as YYYY-MM-DD, got {text[:30]!r}") from None


class Calculation(Kit):
    """calculator, convert_units, date_add, days_between, regex_find."""

    name: ClassVar[str] = "calculation"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool(
            "calculator",
            "Evaluate an arithmetic expression exactly and return the number.",
            schema({"expression": "str: such as (18.5 + 3) * 42; also sqrt, round, min, max"}),
        ),
        Tool(
            "convert_units",
            "Convert a quantity from one unit of measure to another.",
            schema(
                {
                    "value": "num: ",
                    "from_unit": "str: symbol: m km mi ft in kg lb oz l gal h min kcal kj acre ha, C or F",
                    "to_unit": "str: symbol",
                }
            ),
        ),
        Tool(
            "date_add",
            "Return the calendar date that lies a number of days, weeks or months after (or, negative, before) a date.",
            schema({"date": "str: YYYY-MM-DD", "amount": "int: ", "unit": choice(("days", "weeks", "months"))}),
        ),
        Tool(
            "days_between",
            "Count the days from one calendar date to another.",
            schema({"start": "str: YYYY-MM-DD", "end": "str: YYYY-MM-DD"}),
        ),
        Tool(
            "regex_find",
            "Find all matches of a regular expression in a text; returns how many and the first ones.",
            schema({"pattern": "str: ", "text": "str: "}),
        ),
    )

    def calculator(self, expression: str) -> str:
        return shown(evaluate(expression))

    def convert_units(self, value: float, from_unit: str, to_unit: str) -> str:
        source, target = _unit(from_unit), _unit(to_unit)
        if {source, target} <= {"c", "f", "k"}:
            celsius = {"c": value, "f": (value - 32) / 1.8, "k": value - 273.15}[source]
            result = {"c": celsius, "f": celsius * 1.8 + 32, "k": celsius + 273.15}[target]
            return f"{result:.4f}".rstrip("0").rstrip(".") + f" {to_unit}"
        if source not in _UNITS or target not in _UNITS:
            raise ToolFault(f"unknown unit {(from_unit if source not in _UNITS else to_unit)[:20]!r}")
        if _UNITS[source][0] != _UNITS[target][0]:
            raise ToolFault(f"cannot convert {from_unit} to {to_unit}")
        return f"{shown(round(value * _UNITS[source][1] / _UNITS[target][1], 6))} {to_unit}"

    def date_add(self, date: str, amount: int, unit: str) -> str:
        start = a_day(date)
        try:
            if unit == "months":
                years, month = divmod(start.month - 1 + amount, 12)
                last = calendar.monthrange(start.year + years, month + 1)[1]
                end = start.replace(year=start.year + years, month=month + 1, day=min(start.day, last))
            else:
                end = start + timedelta(days=amount * (7 if unit == "weeks" else 1))
        except (OverflowError, ValueError):
            raise ToolFault("the date lies outside the calendar") from None
        return f"{end.isoformat()} ({end:%A})"

    def days_between(self, start: str, end: str) -> str:
        return f"{(a_day(end) - a_day(start)).days} days"

    def regex_find(self, pattern: str, text: str) -> str:
        if len(pattern) > 120 or re.search(r"[+*}]\s*\)\s*[+*{]", pattern):
            raise ToolFault("pattern: too long, or nested repetition")
        given = json.dumps([pattern, text[:4000]])
        told = sandbox.run_program(_REGEX_PROGRAM.format(given=given))  # a pattern may run for ever: in the sandbox
        if told.startswith("error: "):
            raise ToolFault(told.removeprefix("error: "))
        return told


def _unit(name: str) -> str:
    words = {
        "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "mile": "mi", "foot": "ft", "feet": "ft",
        "inch": "in", "inches": "in", "centimeter": "cm", "kilogram": "kg", "gram": "g", "pound": "lb", "lbs": "lb",
        "ounce": "oz", "liter": "l", "litre": "l", "gallon": "gal", "hour": "h", "hr": "h", "minute": "min",
        "second": "s", "day": "d", "celsius": "c", "°c": "c", "fahrenheit": "f", "°f": "f", "kelvin": "k", "yard": "yd",
        "hectare": "ha", "acres": "acre", "nautical mile": "nmi", "calorie": "kcal", "kilocalorie": "kcal",
        "kilojoule": "kj", "tonne": "t", "milliliter": "ml", "pint": "pt",
    }  # fmt: skip
    key = name.strip().lower()
    return words.get(key) or words.get(key.rstrip("s")) or key
