"""``bench when2call FILE``: the decision on When2Call's test files (CC-BY-4.0). A test set: never trained on.

FILE: ``when2call_test_mcq.jsonl`` or ``when2call_test_llm_judge.jsonl``: ``question``, ``tools`` (JSON texts or
objects), ``correct_answer`` of tool_call, request_for_info, cannot_answer, direct. The gate chooses among the same
four answers. Without tools there is nothing to gate: such a request counts as "cannot_answer", and the tool
hallucination rate is the share of them that are judged a call all the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from whetherman_edge.bench import judging, scoring
from whetherman_edge.errors import ConfigError

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

ANSWERS: Final = {"ACT": "tool_call", "ASK": "request_for_info", "DECLINE": "cannot_answer", "ANSWER": "direct"}
LABEL_OF: Final = {answer: label for label, answer in ANSWERS.items()}
CORRECT: Final = ("tool_call", "request_for_info", "cannot_answer")
"""The answers that are right somewhere in the published test files."""


def register(verbs: Verbs) -> None:
    """Add ``bench when2call``."""
    parser = verbs.add_parser("when2call", help="decisions on When2Call (test set)")
    parser.add_argument("file", type=Path, metavar="FILE")
    judging.add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Judge, print, write."""
    rows = list(items(parsed.file))[: parsed.limit]
    judged, records = judging.judge(rows, parsed.engine)
    answers = [
        "cannot_answer" if record["reason"] == "bypass:no_tools" else ANSWERS[one.verdict]
        for one, record in zip(judged, records, strict=True)
    ]
    figures = score([ANSWERS[row["gold"]] for row in rows], answers, [not row["request"].get("tools") for row in rows])
    lines = [
        f"n {figures['n']}   accuracy {judging.told(figures['accuracy'])}",
        f"macro-F1 over the answers that occur {figures['macro_f1']}",
        f"macro-F1 over the three correct ones {figures['macro_f1_three']}",
        f"tool hallucination {judging.told(figures['tool_hallucination'])}",
    ]
    note = f"{parsed.file.name}, test only; engine {parsed.engine or 'configured'}"
    return judging.finish(parsed, "When2Call", note, {parsed.file.stem: figures}, lines)


def score(gold: list[str], answers: list[str], toolless: list[bool]) -> dict[str, Any]:
    """Figures by When2Call's own answers.

    ``macro_f1``: over every answer that is right or given somewhere, as scikit-learn's macro average has it;
    ``macro_f1_three``: over the three answers that are right in the published files.
    """
    occurring = [answer for answer in (*CORRECT, "direct") if answer in {*gold, *answers}]
    calls = sum(answer == "tool_call" for answer, none in zip(answers, toolless, strict=True) if none)
    labels = [*CORRECT, "direct"]
    return {
        "n": len(gold),
        "labels": labels,
        "confusion": scoring.confusion(gold, answers, labels),
        "accuracy": scoring.share(sum(g == a for g, a in zip(gold, answers, strict=True)), len(gold)),
        "macro_f1": round(scoring.macro_f1(gold, answers, occurring), 4),
        "macro_f1_three": round(scoring.macro_f1(gold, answers, CORRECT), 4),
        "recall": {
            answer: scoring.share(
                sum(a == answer for g, a in zip(gold, answers, strict=True) if g == answer), gold.count(answer)
            )
            for answer in CORRECT
        },
        "tool_hallucination": scoring.share(calls, sum(toolless)),
    }


def items(path: Path) -> Iterator[dict[str, Any]]:
    """Lines as labelled chat bodies. Raises ConfigError naming the line."""
    for number, row in enumerate(judging.read_lines(path), 1):
        answer = row.get("correct_answer")
        if answer not in LABEL_OF or not isinstance(row.get("question"), str):
            raise ConfigError(
                f"{path}: line {number}: expected question and correct_answer ({', '.join(LABEL_OF)}), got {answer!r}"
            )
        try:
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in row.get("tools") or []]
        except ValueError as exc:
            raise ConfigError(f"{path}: line {number}: tools: expected JSON texts ({exc})") from exc
        request: dict[str, Any] = {"model": "when2call", "messages": [{"role": "user", "content": row["question"]}]}
        if tools:
            request["tools"] = [
                tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
            ]
        label = LABEL_OF[answer]
        yield {"id": row.get("uuid", str(number)), "request": request, "gold": label, "accept": [label]}
