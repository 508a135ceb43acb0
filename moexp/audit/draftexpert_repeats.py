"""DraftExpert's figures that stand in two places, and means of rows (abstract, Tables 1 to 5). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moexp.audit.draftexpert import NAME, TARGETS, places
from moexp.audit.lines import Input, Line, derive, farthest, only, printed, same
from moexp.papers import Paper


def repeated(paper: Paper) -> Iterator[Line]:
    """Figures that stand in two places, and means of rows (abstract, Tables 1 to 5)."""
    rows = paper.table(2).rows
    full = [only(rows, target=t, platform=p, method="draft-expert") for t, p, _ in places()]
    yield farthest("de.speedup", "Speedup of the full method from tokens/s", [
        derive(
            "", NAME, "", "DE / AR", lambda a, b: a / b,
            [printed(row, "tokens_per_s", "Table 2", "DE"),
             printed(only(rows, target=row["target"], platform=row["platform"], method="ar"), "tokens_per_s", "Table 2",
                     "AR")],
            printed(row, "speedup", "Table 2"), unit="x", subject=f"{row['target']} on {row['platform']}",
        )
        for row in full
    ])  # fmt: skip
    yield derive(
        "de.speedup.mean", NAME, "Mean speedup", "mean of the four", lambda *v: sum(v) / len(v),
        [printed(row, "speedup", f"Table 2, {row['target']} {row['platform']}") for row in full],
        Input("mean", paper.facts["mean_speedup"], "Table 2, Avg. and abstract", 0.01), unit="x",
    )  # fmt: skip
    policy = {"platform": "CG", "policy": "confidence-expansion+prefetch"}
    four = {t: only(paper.table(4).rows, target=t, **policy) for t in TARGETS}
    five = {t: only(paper.table(5).rows, target=t, loss="+ router") for t in TARGETS}
    three = {t: only(paper.table(3).rows, target=t, platform="CG", drafter="draft-expert") for t in TARGETS}
    yield farthest("de.waste", "Prefetch waste as what is left of hits", [
        derive("", NAME, "", "1 - hit", lambda hit: 1 - hit, [printed(row, "prefetch_hit", "Table 4", "hit")],
               printed(row, "prefetch_waste", "Table 4"), subject=target)
        for target, row in four.items()
    ])  # fmt: skip
    yield farthest("de.hit", "Prefetch hits of Tables 4 and 5", [
        same("", NAME, "", printed(four[t], "prefetch_hit", "Table 4"), printed(five[t], "prefetch_hit", "Table 5"),
             subject=t)
        for t in TARGETS
    ])  # fmt: skip
    yield from _range(paper, "acceptance", "Table 3", "acceptance", three)
    yield from _range(paper, "acceptance", "Table 5", "agreement", five)
    yield from _range(paper, "prefetch_hit", "Table 4", "prefetch_hit", four)
    first = only(paper.table(1).rows, platform="MN")["ar_tps_flash_staged"]
    ar = only(rows, target="DeepSeek-V2-Lite", platform="MN", method="ar")
    yield same("de.ar", NAME, "AR tokens/s of Tables 1 and 2, DeepSeek-V2-Lite on MN",
               Input("AR", first, "Table 1", 0.01), printed(ar, "tokens_per_s", "Table 2"))  # fmt: skip
    figure = {row["drafter"]: row for row in paper.figures[2]["rows"]}
    yield farthest("de.figure-2", "Acceptance at K = 4 beside Figure 2's average over draft lengths", [
        same("", NAME, "", printed(only(paper.table(3).rows, target="DeepSeek-V2-Lite", platform="CG", drafter=d),
                                   "acceptance", "Table 3"),
             Input("acceptance", row["acceptance"], "Figure 2", 0.01), subject=d,
             note="the lengths that Figure 2 averages over are not printed")
        for d, row in figure.items()
    ])  # fmt: skip


def _range(paper: Paper, fact: str, table: str, column: str, rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """The ends of a range in the abstract against the least and the most of a table."""
    low, high = paper.facts["abstract"][fact]
    by_value = sorted(rows.values(), key=lambda row: float(row[column]))
    ends = [("low", by_value[0], low), ("high", by_value[-1], high)]
    lines = [
        same("", NAME, "", printed(row, column, table), Input("end", value, "the abstract", 0.01),
             subject=f"its {name} end")
        for name, row, value in ends
    ]  # fmt: skip
    yield farthest(f"de.abstract.{table[-1]}", f"The abstract's range of {fact} beside {table}", lines)
