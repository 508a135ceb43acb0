"""DraftExpert's figures that stand in two places, and means of rows (abstract, Tables 1 to 5). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moexp.audit.draftexpert import FULL, NAME, TARGETS, mobile_rates, pairs
from moexp.audit.lines import Input, Line, cell, derive, farthest, same
from moexp.papers import Paper


def repeated(paper: Paper) -> Iterator[Line]:
    """Figures that stand in two places, and means of rows (abstract, Tables 1 to 5)."""
    full = [({"target": t, "platform": p}, cell(paper, 2, "speedup", target=t, platform=p, method="draft-expert"))
            for t, p, _ in pairs()]  # fmt: skip
    yield farthest("de.speedup", "Speedup of the full method from tokens/s", [
        derive(
            NAME, "DE / AR",
            [cell(paper, 2, "tokens_per_s", name, method=method, **keys)
             for name, method in (("DE", "draft-expert"), ("AR", "ar"))],
            speedup, unit="x", subject=f"{keys['target']} on {keys['platform']}",
        )
        for keys, speedup in full
    ])  # fmt: skip
    yield derive(
        NAME, "mean of the four",
        [replace(speedup, source=f"Table 2, {keys['target']} {keys['platform']}") for keys, speedup in full],
        Input("mean", paper.facts["mean_speedup"], "Table 2, Avg. and abstract", 0.01), unit="x",
        id="de.speedup.mean", what="Mean speedup",
    )  # fmt: skip
    policy = {"platform": "CG", "policy": FULL}
    hits = {t: cell(paper, 4, "prefetch_hit", target=t, **policy) for t in TARGETS}
    agreements = [cell(paper, 5, "agreement", target=t, loss="+ router") for t in TARGETS]
    accepted = [cell(paper, 3, "acceptance", target=t, platform="CG", drafter="draft-expert") for t in TARGETS]
    yield farthest("de.waste", "Prefetch waste as what is left of hits", [
        derive(NAME, "1 - hit", [replace(hit, name="hit")], cell(paper, 4, "prefetch_waste", target=t, **policy),
               subject=t)
        for t, hit in hits.items()
    ])  # fmt: skip
    yield farthest("de.hit", "Prefetch hits of Tables 4 and 5", [
        same(NAME, hit, cell(paper, 5, "prefetch_hit", target=t, loss="+ router"), subject=t) for t, hit in hits.items()
    ])  # fmt: skip
    yield _range(paper, "acceptance", accepted)
    yield _range(paper, "acceptance", agreements)
    yield _range(paper, "prefetch_hit", list(hits.values()))
    yield same(
        NAME, replace(mobile_rates(paper)[1], name="AR"),
        cell(paper, 2, "tokens_per_s", target="DeepSeek-V2-Lite", platform="MN", method="ar"), id="de.ar",
        what="AR tokens/s of Tables 1 and 2, DeepSeek-V2-Lite on MN",
    )  # fmt: skip
    yield farthest("de.figure-2", "Acceptance at K = 4 beside Figure 2's average over draft lengths", [
        same(
            NAME, cell(paper, 3, "acceptance", target="DeepSeek-V2-Lite", platform="CG", drafter=row["drafter"]),
            Input("acceptance", row["acceptance"], "Figure 2", 0.01), subject=row["drafter"],
            note="the lengths that Figure 2 averages over are not printed",
        )
        for row in paper.figures[2]["rows"]
    ])  # fmt: skip


def _range(paper: Paper, fact: str, cells: Sequence[Input]) -> Line:
    """The ends of a range in the abstract against the least and the most of a table's cells."""
    ranked = sorted(cells, key=lambda one: one.value)
    ends = zip(("low", "high"), (ranked[0], ranked[-1]), paper.facts["abstract"][fact], strict=True)
    table = cells[0].source
    return farthest(f"de.abstract.{table[-1]}", f"The abstract's range of {fact} beside {table}", [
        same(NAME, figure, Input("end", value, "the abstract", 0.01), subject=f"its {name} end")
        for name, figure, value in ends
    ])  # fmt: skip
