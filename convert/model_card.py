"""The figure tables and hashes of MODELS.md, from the manifests beside the weights.

python -m convert.model_card

What stands between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is written anew; everything else is the author's.
A test holds the page to the manifests, so no table can be older than the artifact it speaks of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from whetherman_edge.gate.verdict import PHASES

ROOT: Final = Path(__file__).resolve().parent.parent
ARTIFACTS: Final = ROOT / "whetherman_edge" / "artifacts"
PAGE: Final = ROOT / "MODELS.md"
BLOCK: Final = re.compile(r"(<!-- figures: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADER: Final = (
    "| dialogues | n | AUROC, ACT against the rest | macro-F1 | false skips | skipped |\n|---|---|---|---|---|---|\n"
)
AUTHOR_OF_ITS_OWN: Final = frozenset({"gate_dev", "gate_dev12"})
GROUPS: Final = {
    "held_out_domains": "held-out authors",
    "held_out_first_steps": "of these, first steps",
    "held_out_later_steps": "of these, later steps",
    "held_out_turns": "of the later steps, those at a user turn",
    "held_out_results": "of the later steps, those behind results",
    "all": "all of the below",
    "first": "of these, first steps",
    "few": "of the first steps, those beside one or two tools",
    "later": "of these, later steps",
    "turns": "of the later steps, those at a user turn",
    "results": "of the later steps, those behind results",
    "general": "a held-out author (`general`)",
    "steps": "a held-out author, multi-step (`steps`)",
}


def label_of(name: str) -> str:
    """What a set of the manifests is called on the page."""
    if name in GROUPS:
        return GROUPS[name]
    return f"`{name}`, " + (
        "an author of its own" if name in AUTHOR_OF_ITS_OWN else "other domains of a training author"
    )


def ordered(names: Sequence[str]) -> list[str]:
    """Groups first, then the dev sets by number."""
    groups = [name for name in GROUPS if name in names]
    sets = [name for name in names if name not in GROUPS and name.startswith("gate_dev")]
    return groups + sorted(sets, key=lambda name: int(name.removeprefix("gate_dev") or 1))


def interval(bounds: Sequence[float]) -> str:
    """A 95 % interval, two digits."""
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def rates(figures: Mapping[str, Any]) -> str:
    """The two columns about skips."""
    wrong, needed, low, high = figures["false_skips"]
    skipped, idle, *bounds = figures["skipped"]
    share = f"{skipped / idle:.2f} {interval(bounds)}" if idle else "none"
    return f"{wrong:,} of {needed:,} [{low:.3f}, {high:.3f}] | {share} |"


def static_table(manifest: Mapping[str, Any]) -> str:
    """Rows of the static stage."""
    figures, rows = manifest["figures"], ""
    for name in ordered(list(figures)):
        one = figures[name]
        rows += (
            f"| {label_of(name)} | {one['n']:,} | {one['auroc_act']:.3f} {interval(one['auroc_act_ci'])} "
            f"| {one['macro_f1']:.3f} {interval(one['macro_f1_ci'])} | {rates(one)}\n"
        )
    return HEADER + rows


def backbone_table(manifest: Mapping[str, Any]) -> str:
    """Rows of the backbone: static stage alone, backbone alone, both."""
    figures, rows = manifest["dev"], ""
    for name in ordered(list(figures)):
        one = figures[name]
        cells = []
        for key in ("auroc_act", "macro_f1"):
            alone = " / ".join(f"{one[stage][key]:.3f}" for stage in ("static", "backbone"))
            cells.append(f"{alone} / **{one['fused'][key]:.3f}** {interval(one['fused'][key + '_ci'])}")
        rows += f"| {label_of(name)} | {one['fused']['n']:,} | {' | '.join(cells)} | {rates(one['fused'])}\n"
    return HEADER + rows


def tau_line(tau: Sequence[Mapping[str, float | None]]) -> str:
    """The default operating point."""
    return "; ".join(
        f"{phase} " + ", ".join(f"{label} {value:.3f}" for label, value in one.items() if value is not None)
        for phase, one in zip(PHASES, tau, strict=True)
    )


def blocks() -> Mapping[str, str]:
    """Every block by its name."""
    static = json.loads((ARTIFACTS / "gate_static.json").read_text())
    backbone = json.loads((ARTIFACTS / "backbone.json").read_text())
    return {
        "static": static_table(static),
        "statichash": (
            f"sha256 `{static['sha256']}`;\ndefault thresholds on 1 - p(need): {tau_line(static['default_tau'])}\n"
        ),
        "backbone": backbone_table(backbone),
        "backbonehash": (
            f"adapter sha256 `{backbone['adapter']['sha256']}`;\nheads and fusion sha256 "
            f"`{backbone['heads']['sha256']}`;\ndefault thresholds on 1 - p(need): "
            f"{tau_line(backbone['default_tau'])}\n"
        ),
    }


def filled(page: str) -> str:
    """The page with every block as the manifests have it. Raises ValueError for a block that nobody knows."""
    known = blocks()
    for _, name, _ in BLOCK.findall(page):
        if name not in known:
            raise ValueError(f"MODELS.md: expected one of the figures {sorted(known)}, got {name!r}")
    return BLOCK.sub(lambda found: found[1] + known[found[2]] + found[3], page)


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
