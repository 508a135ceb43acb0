"""Our own DraftExpert tables by the same formulas, each within a stated tolerance. Pure.

`CLOCK` is for identities between the time of requests and the sum of their cycles, `PADDING` for bytes of experts that
are padded to whole blocks of the disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from moexp import metrics
from moexp.audit.files import Record, Sheets
from moexp.audit.lines import Input
from moexp.audit.rules import Check, Part, Rule, Scope, repeats

CLOCK, PADDING = 0.01, 0.005
UNIFORM = "N (1 - (1 - k / N)^n)"

TABLE_2, TABLE_3, TABLE_4 = (f"draftexpert/table_{number}.csv" for number in (2, 3, 4))
FIGURE_5, FIGURE_SPEEDUP, FIGURE_ACCEPTANCE = (
    f"draftexpert/figure_{name}.csv" for name in ("5", "speedup", "acceptance")
)
DRAFT, GEOMETRY = "draft_experts.csv", "ecospec/table_13.csv"

PLACE = "platform method workload"
POLICIES = {
    "ar": "ar",
    "fixed": "draft-expert fixed",
    "confidence-expansion": "draft-expert confidence-expansion",
    "confidence-expansion+prefetch": "draft-expert",
}
"""Methods of table 2 by policy of table 4."""


def geometry(sheets: Sheets) -> dict[str, Input]:
    """N routed experts, k and MoE layers of our target (EcoSpec's table 13); empty where it is not measured."""
    for record in sheets[GEOMETRY]:
        experts, chosen, layers = experts_of(record), record.input("top_k", "k"), record.input("moe_layers", "layers")
        if experts and chosen and layers:
            return {"N": experts, "k": chosen, "layers": layers}
    return {}


def experts_of(record: Record) -> Input | None:
    """N of a row of EcoSpec's table 13."""
    number = re.match(r"\d+", record.text("experts"))
    return Input("N", int(number[0]), record.source) if number else None


def by_key(records: list[Record], columns: str, **cells: str) -> dict[tuple[str, ...], Record]:
    """Rows that have these cells, by their cells in these columns."""
    chosen = [record for record in records if all(record.text(name) == cell for name, cell in cells.items())]
    return {key_of(record, columns): record for record in chosen}


def key_of(record: Record, columns: str) -> tuple[str, ...]:
    """A row's cells in these columns."""
    return tuple(record.text(column) for column in columns.split())


def rows_of(file: str) -> Callable[[Sheets], Iterator[Scope]]:
    """The rows of a file by themselves."""
    return lambda sheets: ({"row": row} for row in sheets[file])


def beside(file: str, other: str, key: str) -> Callable[[Sheets], Iterator[Scope]]:
    """The rows of a file; `first` is the row of the same key in the other."""

    def scopes(sheets: Sheets) -> Iterator[Scope]:
        known = by_key(sheets[other], key)
        return ({"row": row, "first": known.get(key_of(row, key))} for row in sheets[file])

    return scopes


def _throughput(sheets: Sheets) -> Iterator[Scope]:
    """Rows of table 2; `ar`: of the same workload, `cold`: it too, where AR loads the same bytes for every workload, so
    that nothing is kept from token to token; `each`: of a mean, the rows that it is of.
    """
    rows = sheets[TABLE_2]
    ar = by_key(rows, "platform workload", method="ar")
    for row in rows:
        base = ar.get(key_of(row, "platform workload"))
        base = None if base is row else base
        each = [r for r in rows if r is not row and key_of(r, "platform method") == key_of(row, "platform method")]
        loads = [r.number("bytes_per_token") for (platform, _), r in ar.items() if platform == row.text("platform")]
        known = [load for load in loads if load is not None]
        cold = len(known) == len(loads) > 0 and max(known) <= min(known) * (1 + 1e-4)
        mean = row.text("workload") == "mean"
        yield {"row": row, "ar": base, "cold": base if cold else None, "each": each if mean else None}


def _bounds(sheets: Sheets) -> Iterator[Scope]:
    """Rows of table 2; `E` = alpha k / bound, `n`: K + 1 where K is fixed."""
    shape = geometry(sheets)
    for row in sheets[TABLE_2] if shape else ():
        fixed = re.fullmatch(r"(?:[^:]*: )?K=(\d+)", row.text("settings"))
        alpha, bound = row.number("alpha"), row.number("byte_bound")
        if alpha is not None and bound:
            union = Input("E", alpha * shape["k"].value / bound, f"{row.source} (alpha k / bound)")
            yield {"row": row, **shape, "E": union, "n": Input("n", int(fixed[1]) + 1, "K + 1") if fixed else None}


def _drafting(sheets: Sheets) -> Iterator[Scope]:
    """Rows of table 3; `first`: of the same drafter."""
    first: dict[str, Record] = {}
    for row in sheets[TABLE_3]:
        drafter = row.text("drafter")
        one = Input("top-1", 1, "definition") if drafter == "top-1" else None
        yield {"row": row, "first": first.setdefault(drafter, row), "one": one}


def _draft_unions(sheets: Sheets) -> Iterator[Scope]:
    shape = geometry(sheets)
    for row in sheets[TABLE_3] if shape else ():
        drafter = row.text("drafter")
        yield {**shape, "row": row,
               "r": Input("r", int(drafter[-1]) if re.fullmatch(r"top-\d", drafter) else 1, "drafter")}  # fmt: skip


def _verification(sheets: Sheets) -> Iterator[Scope]:
    """Rows of table 4; `mean`: the method's in table 2."""
    speeds = by_key(sheets[TABLE_2], "platform method", workload="mean")
    for row in sheets[TABLE_4]:
        yield {"row": row, "mean": speeds.get((row.text("platform"), POLICIES.get(row.text("policy"), "")))}


def _positions(sheets: Sheets) -> Iterator[Scope]:
    """Rows of the figure of positions; `first`: the drafter's, where it has the position."""
    drafters = by_key(sheets[DRAFT], "drafter")
    for row in sheets[FIGURE_ACCEPTANCE]:
        other = drafters.get(key_of(row, "drafter"))
        has = other is not None and f"accepted_{row.text('position')}" in other.cells
        yield {"row": row, "first": other if has else None}


def growth(id: str, where: str, file: str, **cells: str) -> Part:
    """Union growth in a file: measured at most uniform, `uniform` by its formula."""

    def scopes(sheets: Sheets) -> Iterator[Scope]:
        shape = geometry(sheets)
        for row in sheets[file] if shape else ():
            if all(row.text(name) == cell for name, cell in cells.items()):
                yield {**shape, "row": row}

    inputs = "N k n=block_length"
    return Part("block_length", scopes, (
        Rule(id, f"E of a block, {where}, if uniform", UNIFORM, inputs, "unique_verify_per_layer", relation="<="),
        Rule(f"{id}.formula", f"Uniform routing by its formula, {where}", UNIFORM, inputs, "uniform"),
    ))  # fmt: skip


HELD_OUT = (
    "for comparison: agreement is on given text, acceptance behind the target's own states, and neither is independent "
    "from token to token"
)

CHECKS = (
    Check("ours.de throughput", (TABLE_2,), (Part(PLACE, _throughput, (
        Rule("ours.de.speedup", "Speedup from tokens/s, table 2", "tokens_per_s / AR",
             "tokens_per_s AR=ar.tokens_per_s", "speedup"),
        Rule("ours.de.share", "Share of the byte bound, table 2", "speedup / bound", "speedup bound=byte_bound",
             "byte_bound_share"),
        Rule("ours.de.time", "Tokens/s from where a token's time goes, table 2", "1000 / sum of the parts in ms",
             " ".join(f"{part}_ms" for part in metrics.TIME_PARTS), "tokens_per_s", CLOCK, unit="tokens/s"),
        Rule("ours.de.lowest", "Pooled figures against the lowest workload's, table 2", "min over workloads",
             "each.{}", "tokens_per_s alpha", relation=">="),
        Rule("ours.de.highest", "Pooled figures against the highest workload's, table 2", "max over workloads",
             "each.{}", "tokens_per_s alpha", relation="<="),
        Rule("ours.de.bytes", "Bytes a token that the byte bound asks for, table 2, cold stores", "AR / bound",
             "AR=cold.bytes_per_token bound=byte_bound", "bytes_per_token", PADDING, ">=", "bytes"),
    )),)),
    Check("ours.de bounds", (TABLE_2, GEOMETRY), (Part(PLACE, _bounds, (
        Rule("ours.de.uniform", "E behind the byte bound of fixed K, table 2, if uniform", UNIFORM, "N k n", "E",
             relation="<="),
        Rule("ours.de.least", "E behind the byte bound, table 2, against k", "k", "k", "E", relation=">="),
    )),)),
    Check("ours.de drafting", (TABLE_3,), (Part("platform drafter", _drafting, (
        repeats("ours.de.platforms", "Counts of table 3 on all platforms", "unique_draft acceptance acceptance_ctx"),
        Rule("ours.de.top-1", "Cost of top-1 over itself, table 3", "1", "one", "cost"),
    )),)),
    Check("ours.de draft unions", (TABLE_3, GEOMETRY), (Part("platform drafter", _draft_unions, (
        Rule("ours.de.unique", "Unique layer-experts of drafting, table 3, if uniform",
             "layers N (1 - (1 - r / N)^4)", "layers N r", "unique_draft", relation="<="),
        Rule("ours.de.one-token", "Unique layer-experts of drafting, table 3, against one token's", "layers r",
             "layers r", "unique_draft", relation=">="),
    )),)),
    Check("ours.de verification", (TABLE_4, TABLE_2), (Part("platform policy", _verification, (
        Rule("ours.de.waste", "Prefetch waste as what is left of hits, table 4", "1 - prefetch_hit", "prefetch_hit",
             "prefetch_waste"),
        Rule("ours.de.verify", "Cost of verification within its cycle's, table 4", "cycle_cost", "cycle_cost",
             "verify_cost", relation="<=", unit="AR steps"),
        Rule("ours.de.cycle", "Table 2's speedup from alpha and the cycle's cost, table 4", "alpha / cycle_cost",
             "alpha cycle_cost", "mean.speedup", CLOCK, unit="x"),
        Rule("ours.de.alpha", "alpha of tables 4 and 2", "the same figure", "alpha", "mean.alpha"),
    )),)),
    Check("ours.de held-out", (DRAFT,), (Part("drafter", rows_of(DRAFT), (
        Rule("ours.de.positions", "Held-out acceptance from its positions", "mean of positions 1 to 4",
             "p1=accepted_1 p2=accepted_2 p3=accepted_3 p4=accepted_4", "acceptance_ctx"),
        Rule("ours.de.p.{drafter}", "Held-out acceptance of {drafter} from agreement", "(p + p^2 + p^3 + p^4) / 4",
             "p=agreement", "acceptance_ctx", None, note=HELD_OUT),
    )),)),
    Check("ours.de repeated", (DRAFT, TABLE_3, FIGURE_ACCEPTANCE), (
        Part("platform drafter", beside(TABLE_3, DRAFT, "drafter"), (
            repeats("ours.de.same", "Held-out acceptance in three files", "acceptance_ctx"),
        )),
        Part("drafter position", _positions, (
            Rule("ours.de.same", "Held-out acceptance in three files", "the same figure", "first.accepted_{position}",
                 "acceptance"),
        )),
    )),
    Check("ours.de figure", (TABLE_2, FIGURE_SPEEDUP), (Part(PLACE, beside(FIGURE_SPEEDUP, TABLE_2, PLACE), (
        repeats("ours.de.figure", "Speedups and bounds of table 2 and of the figure", "speedup byte_bound"),
    )),)),
    Check("ours.de growth", (FIGURE_5, GEOMETRY), (growth("ours.de.growth", "figure 5", FIGURE_5),)),
)  # fmt: skip
"""Every check of our DraftExpert results."""
