"""Fit the constants of router/typed_questions.py and print them with held-out figures.

python -m convert.fit_typed_questions --data /path/to/data

``--data`` holds clinc150, hwu64 and banking77 (topic questions are made from their intents: half about the right one,
half about another of the same corpus). ``convert/data/system_one_typed.jsonl`` holds states of our own with noul and
score questions and one annotator's answers: split ``fit`` weighs as much as the corpora together, split ``test`` is
only reported.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from pathlib import Path

import numpy as np

from whetherman_edge.dialects.system_one import Noul, Score
from whetherman_edge.router import typed_questions as tq
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

OURS = Path(__file__).resolve().parent / "data" / "system_one_typed.jsonl"
TEMPLATES = ("Is the user asking about {}?", "Is this about {}?", "Does the message concern {}?", "{}")
PER_CORPUS = 1500


def corpora(data: Path) -> list[list[tuple[str, str]]]:
    """(query, intent in words) pairs of each corpus."""
    found = []
    for name in ("clinc150", "hwu64"):
        rows = [json.loads(line) for line in (data / name / "train.jsonl").read_text().splitlines()]
        found.append([(r["query"], r["intent"].replace("_", " ")) for r in rows if r["intent"] != "oos"])
    with (data / "banking77" / "train.csv").open(newline="") as file:
        found.append([(r["text"], r["category"].replace("_", " ")) for r in csv.DictReader(file)])
    return found


def topic_rows(judge: tq.TypedJudge, data: Path, rng: random.Random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nearness to the asked intent, to the right one minus a wrong one, and the answer."""
    near, contrast, gold = [], [], []
    for pairs in corpora(data):
        intents = sorted({intent for _, intent in pairs})
        for query, intent in rng.sample(pairs, PER_CORPUS):
            template = rng.choice(TEMPLATES)
            other = rng.choice([name for name in intents if name != intent])
            reading = judge._reading(query)
            if reading is None:
                continue
            right, wrong = (judge._nearness(reading, template.format(name)) for name in (intent, other))
            near += [right, wrong]
            contrast += [right - wrong, wrong - right]
            gold += [1.0, 0.0]
    return np.array(near), np.array(contrast), np.array(gold)


def own_rows(judge: tq.TypedJudge, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(nearness, answer) of questions without outcomes, (difference, answer) of those with both."""
    near, gold, contrast, contrast_gold = [], [], [], []
    for row in ours(split):
        reading = judge._reading(row["state"])
        assert reading is not None
        for q in row["nouls"]:
            if q.get("true") and q.get("false"):
                contrast.append(judge._nearness(reading, q["true"]) - judge._nearness(reading, q["false"]))
                contrast_gold.append(float(q["gold"]))
            else:
                near.append(judge._nearness(reading, q["instructions"]))
                gold.append(float(q["gold"]))
    return np.array(near), np.array(gold), np.array(contrast), np.array(contrast_gold)


def ours(split: str) -> list[dict]:
    rows = [json.loads(line) for line in OURS.read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


def logistic(x: np.ndarray, y: np.ndarray, weight: np.ndarray, *, bias: bool) -> tuple[float, float]:
    """Weighted one-feature logistic regression by Newton's method: slope and bias."""
    design = np.stack([x, np.full(len(x), float(bias))], axis=1)
    w = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-design @ w))
        gradient = design.T @ (weight * (p - y)) + 1e-6 * w
        hessian = (design * (weight * p * (1 - p))[:, None]).T @ design + 1e-6 * np.eye(2)
        w -= np.linalg.solve(hessian, gradient)
    return float(w[0]), float(w[1])


def ranked_loss(p: np.ndarray, gold: int) -> float:
    """Ranked probability score in [0, 1]."""
    reached = (np.arange(len(p)) >= gold).astype(float)
    return float(((np.cumsum(p) - reached) ** 2).sum() / (len(p) - 1))


def score_figures(judge: tq.TypedJudge, split: str) -> tuple[float, float, float, int]:
    """Ranked loss, its value for even probabilities, accuracy, number of questions."""
    losses, even, hits = [], [], []
    for row in ours(split):
        for q in row["scores"]:
            levels = tuple(q["levels"])
            p = judge.score(row["state"], Score(q["instructions"], levels, levels))
            losses.append(ranked_loss(p, q["gold"]))
            even.append(ranked_loss(np.full(len(p), 1 / len(p)), q["gold"]))
            hits.append(int(np.argmax(p)) == q["gold"])
    return float(np.mean(losses)), float(np.mean(even)), float(np.mean(hits)), len(hits)


def fit_scores(judge: tq.TypedJudge) -> None:
    """Grid over the three constants of the score answer."""
    best = (9.0, 0.0, 0.0, 0.0)
    for level in (2.0, 3.0, 4.0, 5.0, 7.0):
        for direction in (0.0, 0.3, 0.6, 0.9, 1.2):
            for share in (0.01, 0.1, 0.2, 0.35):
                tq.LEVEL_SLOPE, tq.DIRECTION_SLOPE, tq.NEIGHBOUR_SHARE = level, direction, share  # type: ignore[misc]
                best = min(best, (score_figures(judge, "fit")[0], level, direction, share))
    tq.LEVEL_SLOPE, tq.DIRECTION_SLOPE, tq.NEIGHBOUR_SHARE = best[1:]  # type: ignore[misc]


def report(judge: tq.TypedJudge, split: str) -> None:
    probabilities, gold = [], []
    for row in ours(split):
        for q in row["nouls"]:
            probabilities.append(
                judge.noul(row["state"], Noul(q["instructions"], q.get("true", ""), q.get("false", "")))
            )
            gold.append(float(q["gold"]))
    p, y = np.array(probabilities), np.array(gold)
    print(
        f"{split}: noul n={len(y)} accuracy {np.mean((p > 0.5) == (y > 0.5)):.3f} "
        f"brier {np.mean((p - y) ** 2):.3f} (0.25 = chance)"
    )
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (p >= low) & (p < low + 0.2 + 1e-9)
        if inside.any():
            print(f"   said {p[inside].mean():.2f}  was {y[inside].mean():.2f}  n={inside.sum()}")
    loss, even, accuracy, n = score_figures(judge, split)
    print(f"{split}: score n={n} accuracy {accuracy:.3f} ranked loss {loss:.3f} (even probabilities: {even:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    judge = tq.TypedJudge(Scorer(RouterTable.open()))
    near, contrast, gold = topic_rows(judge, data, random.Random(0))
    own_near, own_gold, own_contrast, own_contrast_gold = own_rows(judge, "fit")
    weight = np.r_[np.full(len(near), 1 / len(near)), np.full(len(own_near), 1 / len(own_near))]
    slope, bias = logistic(np.r_[near, own_near], np.r_[gold, own_gold], weight, bias=True)
    weight = np.r_[np.full(len(contrast), 1 / len(contrast)), np.full(len(own_contrast), 1 / len(own_contrast))]
    contrast_slope, _ = logistic(np.r_[contrast, own_contrast], np.r_[gold, own_contrast_gold], weight, bias=False)
    tq.TOPIC_SLOPE, tq.TOPIC_BIAS, tq.CONTRAST_SLOPE = slope, bias, contrast_slope  # type: ignore[misc]
    fit_scores(judge)
    print(f"TOPIC_SLOPE {slope:.2f}  TOPIC_BIAS {bias:.2f}  CONTRAST_SLOPE {contrast_slope:.2f}")
    print(f"LEVEL_SLOPE {tq.LEVEL_SLOPE}  DIRECTION_SLOPE {tq.DIRECTION_SLOPE}  NEIGHBOUR_SHARE {tq.NEIGHBOUR_SHARE}")
    for split in ("fit", "test"):
        report(judge, split)


if __name__ == "__main__":
    main()
