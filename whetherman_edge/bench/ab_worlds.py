"""Working tools for the environments of When2Tool, written from their schemas.

A custom hash or cipher has no definition outside its own tool; for the input that a task asks about, the tool returns
the task's expected answer, and something else, but always the same, for any other input.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from whetherman_edge.calibrate.probes.kits.calculation import evaluate
from whetherman_edge.calibrate.probes.kits.sandbox import run_program

RESULT_CHARS_MAX: Final = 4_000
N_MAX: Final = 100_000

Arguments = Mapping[str, Any]
Function = Callable[[Arguments], Any]


class Unusable(Exception):
    """A tool refuses its arguments; the text goes to the agent."""


class Toolbox:
    """The World of one task. ``functions``: tool name to what it does; ``required``: its required arguments."""

    def __init__(self, functions: Mapping[str, Function], required: Mapping[str, Sequence[str]]) -> None:
        self._functions = functions
        self._required = required

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The tool's result as text; an error text for what a real tool would refuse."""
        function = self._functions.get(name)
        if function is None:
            return f"error: there is no tool {str(name)[:60]!r}; there are {', '.join(self._functions)}"
        missing = [one for one in self._required.get(name, ()) if arguments.get(one) is None]
        if missing:
            return f"error: missing argument {', '.join(missing)}"
        try:
            result = function(arguments)
        except Unusable as fault:
            return f"error: {fault}"
        except Exception as fault:
            return f"error: {type(fault).__name__}: {str(fault)[:160]}"
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return text if len(text) <= RESULT_CHARS_MAX else text[:RESULT_CHARS_MAX] + " …"

    def close(self) -> None:
        """Nothing is held."""


def functions_of(name: str, parameters: Mapping[str, Any], instruction: str, answer: str) -> dict[str, Function] | None:
    """The tools of one environment, by name; None for an environment that is not known here."""
    make = _ENVIRONMENTS.get(name)
    return make(parameters, instruction, answer) if make is not None else None


def _data(value: Any) -> Any:
    """An argument that small models like to send as text ("[1, 2]"), as what it says."""
    if isinstance(value, str):
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return value


def _numbers(value: Any) -> list[float]:
    found = _data(value)
    if not isinstance(found, list) or not found or not all(isinstance(one, int | float) for one in found):
        raise Unusable("expected a list of numbers")
    return found


def _integer(value: Any, most: int = 10**18) -> int:
    found = _data(value)
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if not isinstance(found, int) or abs(found) > most:
        raise Unusable(f"expected an integer up to {most}")
    return found


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9]+", text.lower()) if len(word) > 1}


def _calculator(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    last: list[Any] = []

    def compute(arguments: Arguments) -> str:
        last[:] = [evaluate(str(arguments["expression"]))]
        return str(last[0])

    def clear(_arguments: Arguments) -> str:
        last.clear()
        return "cleared"

    return {
        "evaluate_expression": compute,
        "get_last_result": lambda _: str(last[0]) if last else "none",
        "clear_last_result": clear,
    }


def _percentile(ordered: Sequence[float], share: float) -> float:
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _statistics(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    def compute(arguments: Arguments) -> Any:
        data, kind = _numbers(arguments["data"]), str(arguments["stat_type"]).strip().lower()
        if kind == "correlation":
            return statistics.correlation(data, _numbers(arguments.get("data2")))
        if kind == "percentile":
            return _percentile(sorted(data), float(arguments.get("percentile_value", "")))
        known: dict[str, Callable[[Any], Any]] = {
            "mean": lambda values: float(Fraction(sum(map(Fraction, values)), len(values))),
            "median": statistics.median,
            "std": statistics.pstdev,
            "variance": statistics.pvariance,
            "min": min,
            "max": max,
            "sum": sum,
        }
        if kind not in known:
            raise Unusable(f"stat_type: expected one of {', '.join(known)}, percentile, correlation")
        return known[kind](data)

    def describe(arguments: Arguments) -> dict[str, float]:
        data = sorted(_numbers(arguments["data"]))
        shares = {f"{share}%": _percentile(data, share) for share in (25, 50, 75)}
        spread = {"mean": statistics.fmean(data), "std": statistics.pstdev(data)}
        return {"count": len(data), **spread, "min": data[0], **shares, "max": data[-1]}

    return {"compute_stat": compute, "describe": describe}


def _counting(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    def pair(arguments: Arguments) -> tuple[int, int]:
        return _integer(arguments["n"], N_MAX), _integer(arguments["k"], N_MAX)

    return {
        "combination": lambda arguments: math.comb(*pair(arguments)),
        "permutation": lambda arguments: math.perm(*pair(arguments)),
        "factorial": lambda arguments: math.factorial(_integer(arguments["n"], 1_000)),
    }


def _matrix(value: Any) -> list[list[Any]]:
    rows = _data(value)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise Unusable("expected a list of rows")
    if len({len(row) for row in rows}) != 1 or not all(isinstance(one, int | float) for row in rows for one in row):
        raise Unusable("expected rows of numbers, all of one length")
    return rows


def _determinant(value: Any) -> float | int:
    rows = [[Fraction(one) for one in row] for row in _square(value)]
    result = Fraction(1)
    for at in range(len(rows)):
        pivot = next((i for i in range(at, len(rows)) if rows[i][at]), None)
        if pivot is None:
            return 0
        if pivot != at:
            rows[at], rows[pivot] = rows[pivot], rows[at]
            result = -result
        result *= rows[at][at]
        for below in range(at + 1, len(rows)):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [a - factor * b for a, b in zip(rows[below], rows[at], strict=True)]
    return int(result) if result.denominator == 1 else float(result)


def _square(value: Any) -> list[list[Any]]:
    rows = _matrix(value)
    if len(rows) != len(rows[0]):
        raise Unusable("expected a square matrix")
    return rows


def _product(arguments: Arguments) -> list[list[Any]]:
    left, right = _matrix(arguments["matrix_a"]), _matrix(arguments["matrix_b"])
    if len(left[0]) != len(right):
        raise Unusable("expected as many columns in matrix_a as rows in matrix_b")
    columns = list(zip(*right, strict=True))
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]


def _matrices(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    return {
        "matrix_determinant": lambda arguments: _determinant(arguments["matrix"]),
        "matrix_multiply": _product,
        "matrix_trace": lambda arguments: sum(row[i] for i, row in enumerate(_square(arguments["matrix"]))),
    }


def _factors(n: int) -> list[tuple[int, int]]:
    found, at = [], 2
    while at * at <= n:
        power = 0
        while n % at == 0:
            n, power = n // at, power + 1
        if power:
            found.append((at, power))
        at += 1
    return found + ([(n, 1)] if n > 1 else [])


def _primes(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    def nth(arguments: Arguments) -> int:
        wanted = _integer(arguments["n"], 20_000)
        if wanted < 1:
            raise Unusable("expected n of at least 1")
        primes = (n for n in itertools.count(2) if all(n % d for d in range(2, math.isqrt(n) + 1)))
        return next(itertools.islice(primes, wanted - 1, None))

    def prime(arguments: Arguments) -> bool:
        n = _integer(arguments["n"], 10**12)
        return n > 1 and _factors(n) == [(n, 1)]

    return {
        "is_prime": prime,
        "nth_prime": nth,
        "factorize": lambda arguments: _factors(_integer(arguments["n"], 10**12)),
    }


def _retriever(parameters: Arguments, _i: str, _a: str) -> dict[str, Function]:
    documents = parameters["corpus"]

    def search(arguments: Arguments) -> list[dict[str, Any]]:
        wanted = _words(str(arguments["query"]))
        hits = [
            (len(wanted & _words(f"{one['title']} {one['text']}")) + len(wanted & _words(one["title"])), one)
            for one in documents
        ]
        ranked = sorted((hit for hit in hits if hit[0]), key=lambda hit: -hit[0])
        most = _integer(arguments.get("top_k") or 3, 50)
        return [{"id": one["id"], "title": one["title"], "score": score} for score, one in ranked[:most]]

    def read(arguments: Arguments) -> str:
        for one in documents:
            if one["id"] == str(arguments["doc_id"]):
                return f"{one['title']}\n{one['text']}"
        raise Unusable(f"no document {str(arguments['doc_id'])[:40]!r}; use an id that search_corpus returned")

    return {"search_corpus": search, "read_doc": read}


def _lookup(tool: str, argument: str) -> Callable[[Arguments, str, str], dict[str, Function]]:
    """An environment with one tool that finds the entry nearest in words."""

    def make(parameters: Arguments, _i: str, _a: str) -> dict[str, Function]:
        entries = parameters["corpus"]

        def find(arguments: Arguments) -> str:
            wanted = _words(str(arguments[argument]))

            def likeness(entry: str) -> float:
                words = _words(entry)
                return len(wanted & words) / max(len(wanted | words), 1)

            best = max(entries, key=likeness)
            if len(wanted & _words(best)) < min(2, len(wanted)) or not wanted:
                return "nothing found; describe it in other words"
            text: str = entries[best]
            return text

        return {tool: find}

    return make


def _hashes(_p: Arguments, instruction: str, answer: str) -> dict[str, Function]:
    asked = re.search(r"(\w+) hash of '(.*?)'", instruction)

    def compute(arguments: Arguments) -> str:
        text, algorithm = str(arguments["input_string"]), str(arguments["algorithm"]).strip().lower()
        if asked and (asked[2], asked[1].lower()) == (text, algorithm):
            return answer
        if algorithm in ("md5", "sha1", "sha256"):
            return hashlib.new(algorithm, text.encode(), usedforsecurity=False).hexdigest()
        if re.fullmatch(r"(fnv1a|djb2|sdbm|murmur|jenkins)_custom", algorithm):
            return hashlib.sha256(f"{algorithm}\0{text}".encode()).hexdigest()[:16]
        raise Unusable("algorithm: expected md5, sha256, sha1, or fnv1a, djb2, sdbm, murmur, jenkins with _custom")

    return {"compute_hash": compute}


_MORSE: Final = dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
        (
            ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- "
            "--.. ----- .---- ..--- ...-- ....- ..... -.... --... ---.. ----."
        ).split(),
        strict=True,
    )
)


def _shifted(text: str, by: int) -> str:
    def one(letter: str) -> str:
        if not (letter.isascii() and letter.isalpha()):
            return letter
        start = ord("A") if letter.isupper() else ord("a")
        return chr((ord(letter) - start + by) % 26 + start)

    return "".join(map(one, text))


def _ciphers(_p: Arguments, instruction: str, answer: str) -> dict[str, Function]:
    asked = re.search(r"code '([^']*)'|'([^']*)' using the custom", instruction)
    secret = (asked[1] or asked[2]) if asked else ""
    pairs = dict(zip(secret, answer, strict=False)) if len(secret) == len(answer) else {}

    def custom(text: str, table: Mapping[str, str]) -> str:
        return "".join(table.get(letter, letter) for letter in text)

    def run(text: str, arguments: Arguments, *, back: bool) -> str:
        kind = str(arguments["encoding_type"]).strip().lower()
        if kind == "morse":
            if back:
                letters = {code: letter for letter, code in _MORSE.items()}
                parts = (code for word in text.split("/") for code in [*word.split(), " "])
                return "".join(letters.get(code, code if code == " " else "?") for code in parts).strip()
            return " ".join("/" if letter == " " else _MORSE.get(letter, "?") for letter in text.upper())
        if kind == "caesar":
            return _shifted(text, -_integer(arguments.get("key")) if back else _integer(arguments.get("key")))
        if kind == "custom" and arguments.get("key"):
            return custom(text, pairs if back else {plain: code for code, plain in pairs.items()})
        raise Unusable("expected encoding_type morse, caesar (with key), or custom (with key)")

    return {
        "encode": lambda arguments: run(str(arguments["message"]), arguments, back=False),
        "decode": lambda arguments: run(str(arguments["encoded_message"]), arguments, back=True),
    }


def _lists(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    def changed(change: Callable[[list[Any], Any, Any, int | None], list[Any]]) -> Function:
        def apply(arguments: Arguments) -> list[Any]:
            values = _data(arguments["values"])
            if not isinstance(values, list):
                raise Unusable("values: expected a list")
            axis = None if arguments.get("axis") is None else _integer(arguments["axis"], 1)
            copied = [list(row) if isinstance(row, list) else row for row in values]
            return change(copied, _data(arguments.get("value")), _data(arguments.get("index")), axis)

        return apply

    def put(values: list[Any], value: Any, index: Any, axis: int | None) -> list[Any]:
        if axis == 1:
            added = value if isinstance(value, list) else [value] * len(values)
            for row, one in zip(values, added, strict=True):
                row.insert(len(row) if index is None else _integer(index), one)
            return values
        values.insert(len(values) if index is None else _integer(index), value)
        return values

    def take(values: list[Any], value: Any, index: Any, axis: int | None) -> list[Any]:
        if index is None:
            if value not in values:
                raise Unusable(f"value {value} is not in the list")
            values.remove(value)
        elif axis == 1:
            for row in values:
                del row[_integer(index)]
        else:
            del values[_integer(index)]
        return values

    def order(values: list[Any], _v: Any, _n: Any, axis: int | None) -> list[Any]:
        if axis == 0 and values and isinstance(values[0], list):
            columns = [sorted(column) for column in zip(*values, strict=True)]
            return [list(row) for row in zip(*columns, strict=True)]
        if values and isinstance(values[0], list):
            return [sorted(row) for row in values]
        return sorted(values)

    def turn(values: list[Any], _v: Any, _n: Any, axis: int | None) -> list[Any]:
        return [row[::-1] for row in values] if axis == 1 else values[::-1]

    return {
        "append": changed(lambda values, value, _n, axis: put(values, value, None, axis)),
        "insert": changed(put),
        "remove": changed(take),
        "reverse": changed(turn),
        "sort": changed(order),
    }


def _dates(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    def day(value: Any) -> datetime.date:
        try:
            return datetime.date.fromisoformat(str(value).strip())
        except ValueError:
            raise Unusable(f"expected a date as YYYY-MM-DD, got {str(value)[:40]!r}") from None

    def add(arguments: Arguments) -> str:
        return str(day(arguments["date"]) + datetime.timedelta(days=_integer(arguments["days"], 10**6)))

    return {
        "date_diff": lambda arguments: abs((day(arguments["date2"]) - day(arguments["date1"])).days),
        "date_add": add,
        "day_of_week": lambda arguments: day(arguments["date"]).strftime("%A"),
    }


def _minutes(value: Any) -> int:
    found = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*", str(value))
    if not found:
        raise Unusable(f"expected a time as HH:MM, got {str(value)[:20]!r}")
    return int(found[1]) * 60 + int(found[2])


def _intervals(value: Any) -> list[tuple[int, int]]:
    found = _data(value)
    if not isinstance(found, list) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in found):
        raise Unusable("expected a list of [start, end] pairs")
    return sorted((_minutes(start), _minutes(end)) for start, end in found)


def _schedules(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    def clock(minutes: int) -> str:
        return f"{minutes // 60:02d}:{minutes % 60:02d}"

    def free(arguments: Arguments) -> list[list[str]]:
        at, end = _minutes(arguments["day_start"]), _minutes(arguments["day_end"])
        least, slots = _integer(arguments["min_duration"], 1440), []
        for start, stop in [*_intervals(arguments["busy"]), (end, end)]:
            if min(start, end) - at >= least:
                slots.append([clock(at), clock(min(start, end))])
            at = max(at, stop)
        return slots

    def conflict(arguments: Arguments) -> dict[str, Any]:
        pairs = itertools.combinations(_intervals(arguments["intervals"]), 2)
        found = [[[clock(m) for m in one], [clock(m) for m in two]] for one, two in pairs if two[0] < one[1]]
        return {"conflict": bool(found), "pairs": found}

    return {"find_free_slots": free, "check_conflict": conflict}


_REGEX_PROGRAM: Final = """import json, re
pattern, text, operation = json.loads({arguments!r})
if operation == "findall":
    print(re.findall(pattern, text))
else:
    found = getattr(re, operation)(pattern, text)
    print({{"match": found.group(0), "groups": found.groups()}} if found else None)
"""


def _regexes(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    def match(arguments: Arguments) -> str:
        operation = str(arguments.get("operation") or "findall").strip().lower()
        if operation not in ("findall", "search", "match", "fullmatch"):
            raise Unusable("operation: expected findall, search or match")
        given = json.dumps([str(arguments["pattern"]), str(arguments["text"]), operation])
        return run_program(_REGEX_PROGRAM.format(arguments=given))  # a pattern may run for ever: in the sandbox

    return {"regex_match": match}


def _code(_p: Arguments, _i: str, _a: str) -> dict[str, Function]:
    return {"run_code": lambda arguments: run_program(str(arguments["code"]))}


_ENVIRONMENTS: Final[dict[str, Callable[[Arguments, str, str], dict[str, Function]]]] = {
    "CalculatorEnv": _calculator,
    "StatisticsEnv": _statistics,
    "CountingEnv": _counting,
    "MatrixEnv": _matrices,
    "PrimeEnv": _primes,
    "RetrieverEnv": _retriever,
    "HistoricalYearEnv": _lookup("lookup_year", "event"),
    "GameRuleEnv": _lookup("lookup_rule", "query"),
    "HashEnv": _hashes,
    "DecodingEnv": _ciphers,
    "ListManipulationEnv": _lists,
    "DateTimeEnv": _dates,
    "ScheduleEnv": _schedules,
    "RegexMatchEnv": _regexes,
    "CodeExecutorEnv": _code,
}
