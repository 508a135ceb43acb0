"""Our own DraftExpert tables by the same formulas, each within a stated tolerance. Pure.

Cells have six significant digits, so identities hold within `EXACT`. `CLOCK` is for identities between the time of
requests and the sum of their cycles, `PADDING` for bytes of experts that are padded to whole blocks of the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from moexp import metrics
from moexp.audit.files import Check, Record, Sheets, by_tag, row_line
from moexp.audit.lines import Input, Line

EXACT, CLOCK, PADDING = 1e-4, 0.01, 0.005

TABLE_2, TABLE_3, TABLE_4, TABLE_5 = (f"draftexpert/table_{number}.csv" for number in (2, 3, 4, 5))
FIGURE_5, FIGURE_SPEEDUP, FIGURE_ACCEPTANCE = (
    f"draftexpert/figure_{name}.csv" for name in ("5", "speedup", "acceptance")
)
DRAFT, GEOMETRY = "draft_experts.csv", "ecospec/table_13.csv"

PLACE = ("platform", "method", "workload")
POLICIES = {
    "ar": "ar",
    "fixed": "draft-expert fixed",
    "confidence-expansion": "draft-expert confidence-expansion",
    "confidence-expansion+prefetch": "draft-expert",
}
"""Methods of table 2 by policy of table 4."""


def geometry(sheets: Sheets) -> tuple[Input, Input, Input] | None:
    """N routed experts, k and MoE layers of our target (EcoSpec's table 13); None where it is not measured."""
    for record in sheets[GEOMETRY]:
        found = re.match(r"\d+", record.text("experts"))
        chosen, layers = record.input("top_k", "k"), record.input("moe_layers", "layers")
        if found and chosen and layers:
            return Input("N", int(found[0]), record.source), chosen, layers
    return None


def by_key(records: list[Record], *columns: str) -> dict[tuple[str, ...], Record]:
    """Rows by their cells in these columns."""
    return {tuple(record.text(column) for column in columns): record for record in records}


def repeats(rows: list[Record], first: list[Record], key: tuple[str, ...], columns: tuple[str, ...]) -> list[Line]:
    """Columns that rows repeat from the rows of the same key in another file."""
    known = by_key(first, *key)
    return [
        line
        for row in rows
        if (other := known.get(tuple(row.text(column) for column in key))) is not None
        for column in columns
        for line in row_line(row, key, "the same figure", lambda v: v, [other.input(column)], row.input(column), EXACT)
    ]


def throughput(sheets: Sheets) -> list[Line]:
    """Table 2: speedup from tokens/s, share of the bound, a token's time from its parts, means within their rows."""
    rows = sheets[TABLE_2]
    ar = {(r.text("platform"), r.text("workload")): r for r in rows if r.text("method") == "ar"}
    speedups, shares, times, lowest, highest, bytes_ = [list[Line]() for _ in range(6)]
    for row in rows:
        rate, speedup, bound = row.input("tokens_per_s"), row.input("speedup"), row.input("byte_bound", "bound")
        base = ar.get((row.text("platform"), row.text("workload")))
        if base is not None and base is not row:
            speedups += row_line(row, PLACE, "tokens_per_s / AR", lambda a, b: a / b,
                                 [rate, base.input("tokens_per_s", "AR")], speedup, EXACT)  # fmt: skip
            if _cold(rows, row.text("platform")):
                bytes_ += row_line(row, PLACE, "AR / bound", lambda a, b: a / b,
                                   [base.input("bytes_per_token", "AR"), bound], row.input("bytes_per_token"), PADDING,
                                   relation=">=", unit="bytes")  # fmt: skip
        shares += row_line(row, PLACE, "speedup / bound", lambda a, b: a / b, [speedup, bound],
                           row.input("byte_bound_share"), EXACT)  # fmt: skip
        parts = [row.input(f"{part}_ms") for part in metrics.TIME_PARTS]
        times += row_line(row, PLACE, "1000 / sum of the parts in ms", lambda *ms: 1000 / sum(ms), parts, rate, CLOCK,
                          unit="tokens/s")  # fmt: skip
        if row.text("workload") == "mean":
            mine = [r for r in rows if r is not row and r.text("method") == row.text("method")
                    and r.text("platform") == row.text("platform")]  # fmt: skip
            for column in ("tokens_per_s", "alpha") if mine else ():
                each = [r.input(column) for r in mine]
                pooled = row.input(column)
                lowest += row_line(row, PLACE, "min over workloads", lambda *v: min(v), each, pooled, EXACT,
                                   relation=">=")  # fmt: skip
                highest += row_line(row, PLACE, "max over workloads", lambda *v: max(v), each, pooled, EXACT,
                                    relation="<=")  # fmt: skip
    return (
        by_tag("ours.de.speedup", "Speedup from tokens/s, table 2", speedups)
        + by_tag("ours.de.share", "Share of the byte bound, table 2", shares)
        + by_tag("ours.de.time", "Tokens/s from where a token's time goes, table 2", times)
        + by_tag("ours.de.lowest", "Pooled figures against the lowest workload's, table 2", lowest)
        + by_tag("ours.de.highest", "Pooled figures against the highest workload's, table 2", highest)
        + by_tag("ours.de.bytes", "Bytes a token that the byte bound asks for, table 2, cold stores", bytes_)
    )


def _cold(rows: list[Record], platform: str) -> bool:
    """Whether AR loads the same bytes for every workload, so that nothing is kept from token to token."""
    found = [r.number("bytes_per_token") for r in rows if r.text("platform") == platform and r.text("method") == "ar"]
    known = [value for value in found if value is not None]
    return len(known) == len(found) > 0 and max(known) <= min(known) * (1 + EXACT)


def bounds(sheets: Sheets) -> list[Line]:
    """Table 2: E = alpha k / bound is at most uniform routing of K + 1 tokens where K is fixed, and at least k."""
    shape = geometry(sheets)
    if shape is None:
        return []
    experts, chosen, _ = shape
    uniform, least = list[Line](), list[Line]()
    for row in sheets[TABLE_2]:
        fixed = re.fullmatch(r"(?:[^:]*: )?K=(\d+)", row.text("settings"))
        alpha, bound = row.number("alpha"), row.number("byte_bound")
        if alpha is None or not bound:
            continue
        union = Input("E", alpha * chosen.value / bound, f"{row.source} (alpha k / bound)")
        least += row_line(row, PLACE, "k", lambda k: k, [chosen], union, EXACT, relation=">=")
        if fixed:
            tokens = Input("n", int(fixed[1]) + 1, "K + 1")
            uniform += row_line(row, PLACE, "N (1 - (1 - k / N)^n)", _uniform, [experts, chosen, tokens], union, EXACT,
                                relation="<=")  # fmt: skip
    return (
        by_tag("ours.de.uniform", "E behind the byte bound of fixed K, table 2, if uniform", uniform)
        + by_tag("ours.de.least", "E behind the byte bound, table 2, against k", least)
    )  # fmt: skip


def _uniform(experts: float, top_k: float, tokens: float) -> float:
    return metrics.uniform_union(int(experts), int(top_k), tokens)


def drafting(sheets: Sheets) -> list[Line]:
    """Table 3: what does not depend on the platform is the same on all, and top-1 costs 1."""
    rows = sheets[TABLE_3]
    first: dict[str, Record] = {}
    same, cost = list[Line](), list[Line]()
    for row in rows:
        other = first.setdefault(row.text("drafter"), row)
        for column in ("unique_draft", "acceptance", "acceptance_ctx"):
            same += row_line(row, ("platform", "drafter"), "the same figure", lambda v: v, [other.input(column)],
                             row.input(column), EXACT)  # fmt: skip
        if row.text("drafter") == "top-1":
            cost += row_line(row, ("platform", "drafter"), "1", lambda one: one, [Input("top-1", 1, "definition")],
                             row.input("cost"), EXACT)  # fmt: skip
    return by_tag("ours.de.platforms", "Counts of table 3 on all platforms", same) + by_tag(
        "ours.de.top-1", "Cost of top-1 over itself, table 3", cost
    )


def draft_unions(sheets: Sheets) -> list[Line]:
    """Table 3: layer-experts of K = 4 drafted tokens between layers r and layers N (1 - (1 - r / N)^4)."""
    shape = geometry(sheets)
    if shape is None:
        return []
    experts, _, layers = shape
    most, least = list[Line](), list[Line]()
    for row in sheets[TABLE_3]:
        drafter = row.text("drafter")
        r = Input("r", int(drafter[-1]) if re.fullmatch(r"top-\d", drafter) else 1, "drafter")
        found, cells = row.input("unique_draft"), ("platform", "drafter")
        most += row_line(row, cells, "layers N (1 - (1 - r / N)^4)", lambda m, n, k: m * _uniform(n, k, 4),
                         [layers, experts, r], found, EXACT, relation="<=")  # fmt: skip
        least += row_line(row, cells, "layers r", lambda m, k: m * k, [layers, r], found, EXACT, relation=">=")
    return by_tag("ours.de.unique", "Unique layer-experts of drafting, table 3, if uniform", most) + by_tag(
        "ours.de.one-token", "Unique layer-experts of drafting, table 3, against one token's", least
    )


def verification(sheets: Sheets) -> list[Line]:
    """Tables 4 and 2: hit + waste = 1, verification within its cycle, speedup = alpha / cycle_cost, the same alpha."""
    speeds = {key: row for key, row in by_key(sheets[TABLE_2], *PLACE).items() if key[2] == "mean"}
    waste, within, speedup, alpha = [list[Line]() for _ in range(4)]
    for row in sheets[TABLE_4]:
        cells = ("platform", "policy")
        cost = row.input("cycle_cost")
        waste += row_line(row, cells, "1 - prefetch_hit", lambda hit: 1 - hit, [row.input("prefetch_hit")],
                          row.input("prefetch_waste"), EXACT)  # fmt: skip
        within += row_line(row, cells, "cycle_cost", lambda c: c, [cost], row.input("verify_cost"), EXACT,
                           relation="<=", unit="AR steps")  # fmt: skip
        other = speeds.get((row.text("platform"), POLICIES.get(row.text("policy"), ""), "mean"))
        if other is not None:
            speedup += row_line(row, cells, "alpha / cycle_cost", lambda a, c: a / c, [row.input("alpha"), cost],
                                other.input("speedup"), CLOCK, unit="x")  # fmt: skip
            alpha += row_line(row, cells, "the same figure", lambda v: v, [row.input("alpha")], other.input("alpha"),
                              EXACT)  # fmt: skip
    return (
        by_tag("ours.de.waste", "Prefetch waste as what is left of hits, table 4", waste)
        + by_tag("ours.de.verify", "Cost of verification within its cycle's, table 4", within)
        + by_tag("ours.de.cycle", "Table 2's speedup from alpha and the cycle's cost, table 4", speedup)
        + by_tag("ours.de.alpha", "alpha of tables 4 and 2", alpha)
    )


def held_out(sheets: Sheets) -> list[Line]:
    """Held-out acceptance as the mean of its positions; beside what independent agreement implies."""
    means, implied = list[Line](), list[Line]()
    for row in sheets[DRAFT]:
        positions = [row.input(f"accepted_{n}", f"p{n}") for n in (1, 2, 3, 4)]
        means += row_line(row, ("drafter",), "mean of positions 1 to 4", lambda *v: sum(v) / len(v), positions,
                          row.input("acceptance_ctx"), EXACT)  # fmt: skip
        implied += row_line(row, ("drafter",), "(p + p^2 + p^3 + p^4) / 4", metrics.expected_acceptance,
                            [row.input("agreement", "p")], row.input("acceptance_ctx"), None,
                            note="for comparison: agreement is on given text, acceptance behind the target's own "
                            "states, and neither is independent from token to token")  # fmt: skip
    return by_tag("ours.de.positions", "Held-out acceptance from its positions", means) + [
        line for row in implied for line in by_tag(f"ours.de.p.{row.subject}",
                                                   f"Held-out acceptance of {row.subject} from agreement", [row])
    ]  # fmt: skip


def repeated(sheets: Sheets) -> list[Line]:
    """Held-out acceptance in table 3, the figure of positions and the drafters' own table."""
    drafters = by_key(sheets[DRAFT], "drafter")
    same = list[Line]()
    for row in sheets[TABLE_3]:
        other = drafters.get((row.text("drafter"),))
        if other is not None:
            same += row_line(row, ("platform", "drafter"), "the same figure", lambda v: v,
                             [other.input("acceptance_ctx")], row.input("acceptance_ctx"), EXACT)  # fmt: skip
    for row in sheets[FIGURE_ACCEPTANCE]:
        other = drafters.get((row.text("drafter"),))
        column = f"accepted_{row.text('position')}"
        if other is not None and column in other.cells:
            same += row_line(row, ("drafter", "position"), "the same figure", lambda v: v, [other.input(column)],
                             row.input("acceptance"), EXACT)  # fmt: skip
    return by_tag("ours.de.same", "Held-out acceptance in three files", same)


def figure_speedup(sheets: Sheets) -> list[Line]:
    """The figure of speedups repeats table 2's means."""
    same = repeats(sheets[FIGURE_SPEEDUP], sheets[TABLE_2], PLACE, ("speedup", "byte_bound"))
    return by_tag("ours.de.figure", "Speedups and bounds of table 2 and of the figure", same)


def growth(sheets: Sheets) -> list[Line]:
    """Figure 5: the union of a block against uniform routing, and one token's against k."""
    shape = geometry(sheets)
    return [] if shape is None else growth_lines("ours.de.growth", "figure 5", sheets[FIGURE_5], shape)


def growth_lines(id: str, where: str, rows: list[Record], shape: tuple[Input, Input, Input]) -> list[Line]:
    """Union growth: measured at most uniform, `uniform` by its formula."""
    cells, most, formula = ("block_length",), list[Line](), list[Line]()
    for row in rows:
        inputs = [shape[0], shape[1], row.input("block_length", "n")]
        found, text = row.input("unique_verify_per_layer", "E"), "N (1 - (1 - k / N)^n)"
        most += row_line(row, cells, text, _uniform, inputs, found, EXACT, relation="<=")
        formula += row_line(row, cells, text, _uniform, inputs, row.input("uniform"), EXACT)
    return by_tag(id, f"E of a block, {where}, if uniform", most) + by_tag(
        f"{id}.formula", f"Uniform routing by its formula, {where}", formula
    )


def checks() -> Iterator[Check]:
    """Every check of our DraftExpert results."""
    yield Check("ours.de throughput", (TABLE_2,), throughput)
    yield Check("ours.de bounds", (TABLE_2, GEOMETRY), bounds)
    yield Check("ours.de drafting", (TABLE_3,), drafting)
    yield Check("ours.de draft unions", (TABLE_3, GEOMETRY), draft_unions)
    yield Check("ours.de verification", (TABLE_4, TABLE_2), verification)
    yield Check("ours.de held-out", (DRAFT,), held_out)
    yield Check("ours.de repeated", (DRAFT, TABLE_3, FIGURE_ACCEPTANCE), repeated)
    yield Check("ours.de figure", (TABLE_2, FIGURE_SPEEDUP), figure_speedup)
    yield Check("ours.de growth", (FIGURE_5, GEOMETRY), growth)
