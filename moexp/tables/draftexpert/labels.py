"""Names that DraftExpert's records and tables use, and a method's settings in short."""

from __future__ import annotations

from moexp.tables.core.run import Measured

AR, FIXED, TRUNCATED, FULL = "ar", "draft-expert fixed", "draft-expert confidence-expansion", "draft-expert full"
TOP_R = {1: "top-1", 2: "top-2", 3: "top-3"}
TOP_1_FULL = "top-1 full"
METHODS = (AR, *TOP_R.values(), TOP_1_FULL, FIXED, TRUNCATED, FULL)
"""Labels in the records, in the order of the tables."""

DRAFT_EXPERT = "draft-expert"
DRAFTERS = {**{name: name for name in TOP_R.values()}, DRAFT_EXPERT: FIXED}
"""Drafter -> the method that drafts `DRAFT_TOKENS` with it in every block."""

POLICIES = {"ar": AR, "fixed": FIXED, "confidence-expansion": TRUNCATED, "confidence-expansion+prefetch": FULL}
"""Policy of table 4 -> the method that has it."""

DRAFT_TOKENS = 4  # K of table 3
RESIDENT, ABLATION, DRAFT_METRICS, TARGET = "resident", "ablation", "draft_metrics.json", "target.json"
LOSSES = ("top-1 (untrained)", "+ residual", "+ logit/token", "+ router")

SHORT = {
    "confidence-expansion": "conf+exp",
    "confidence-expansion+prefetch": "conf+exp+prefetch",
    FIXED: "- fixed K",
    TRUNCATED: "- no prefetch",
    FULL: DRAFT_EXPERT,
    TOP_1_FULL: "top-1 as ours",
}


def short(name: object) -> str:
    """A method or policy as views name it."""
    return SHORT.get(str(name), str(name))


def row_method(label: str) -> str:
    """A method's name in the tables' rows: the full method is `draft-expert`."""
    return DRAFT_EXPERT if label == FULL else label


def settings_text(platform: Measured, method: str) -> str | None:
    """A method's parameters, in short."""
    known = {settings["name"]: settings for settings in platform.settings.get("methods", [])}.get(method)
    if known is None or known["drafter"] == "ar":
        return None
    parts = [f"K={known['max_draft']}"]
    if known["policy"] != "fixed":
        parts.append(f"tau={known['tau']:g}")
        if known["policy"] == "confidence-expansion":
            parts.append(f"B={known['budget']}")
    if known["prefetch"]:
        top = known.get("prefetch_top")
        parts.append("prefetch" if top is None else f"prefetch={top}")
    return " ".join(parts)
