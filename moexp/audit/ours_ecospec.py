"""Our own EcoSpec tables by the same formulas, each within a stated tolerance. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from moexp.audit.files import Check, Record, Sheets, by_tag, row_line
from moexp.audit.lines import Input, Line
from moexp.audit.ours import CLOCK, EXACT, GEOMETRY, PADDING, by_key, geometry, growth_lines, repeats
from moexp.sim.traffic import TrafficModel

TABLES = {number: f"ecospec/table_{number}.csv" for number in range(1, 14)}
FIGURE_1, FIGURE_GAMMA = "ecospec/figure_1.csv", "ecospec/figure_gamma.csv"
PREDICTOR = "predictor.csv"

METHOD = ("platform", "method")
UNION = {1: "E"}
"""What a table calls E, unless it is `experts_per_layer`."""
WITH_UNIFORM = (1, 4, 5, 9, 10, 11, 12)
AVERAGE = "average"


def _union(number: int) -> str:
    return UNION.get(number, "experts_per_layer")


def unions(number: int, sheets: Sheets) -> list[Line]:
    """E of every row against uniform routing of as many tokens, which the row has beside it."""
    lines = list[Line]()
    for row in sheets[TABLES[number]]:
        cells = [name for name in (*METHOD, "workload", "temperature", "budget") if name in row.cells]
        lines += row_line(row, cells, "N (1 - (1 - k / N)^n)", lambda value: value, [row.input("uniform")],
                          row.input(_union(number), "E"), EXACT, relation="<=")  # fmt: skip
    return by_tag(f"ours.eco.uniform.{number}", f"E of all rows of table {number}, if uniform", lines)


def steps(sheets: Sheets) -> list[Line]:
    """Table 3: speedup = alpha T_AR / T_step, and a step at least the sum of its parts."""
    rows = sheets[TABLES[3]]
    ar = {row.text("platform"): row for row in rows if row.text("method") == "ar"}
    speedup, parts = list[Line](), list[Line]()
    for row in rows:
        step, base = row.input("step_s", "T_step"), ar.get(row.text("platform"))
        if base is not None:
            speedup += row_line(row, METHOD, "alpha T_AR / T_step", lambda a, t, s: a * t / s,
                                [row.input("alpha"), base.input("step_s", "T_AR"), step], row.input("speedup"), CLOCK,
                                unit="x")  # fmt: skip
        named = [row.input(name) for name in ("predictor_s", "draft_s", "verify_s")]
        known = [value for value in named if value is not None]
        if known:
            parts += row_line(row, METHOD, "sum of the parts", lambda *s: sum(s), known, step, EXACT, relation=">=",
                              unit="s")  # fmt: skip
    return by_tag("ours.eco.cycle", "Speedup from alpha and a step's time, table 3", speedup) + by_tag(
        "ours.eco.step", "A step's time against the sum of its parts, table 3", parts
    )


def repeated(number: int, sheets: Sheets) -> list[Line]:
    """Speedup, alpha and E of table 1's averages at T = 0 in another table."""
    first = {
        (row.text("platform"), row.text("method")): row
        for row in sheets[TABLES[1]]
        if row.text("workload") == AVERAGE and row.number("temperature") == 0
    }
    lines = list[Line]()
    for row in sheets[TABLES[number]]:
        other = first.get((row.text("platform"), row.text("method")))
        if other is not None:
            for before, column in (("speedup", "speedup"), ("alpha", "alpha"), (_union(1), _union(number))):
                lines += row_line(row, METHOD, "the same figure", lambda v: v, [other.input(before, column)],
                                  row.input(column), EXACT)  # fmt: skip
    return by_tag(f"ours.eco.same.1-{number}", f"Figures of table 1 that table {number} repeats", lines)


def traffic(sheets: Sheets) -> list[Line]:
    """Table 2: bytes of the model from E, its resident part from AR's row; bytes moved at least those of E experts."""
    shape = geometry(sheets)
    sizes = [size for row in sheets[FIGURE_1] if (size := row.input("expert_mb", "MB")) is not None]
    if shape is None or not sizes:
        return []
    rows = sheets[TABLES[2]]
    ar = {row.text("platform"): row for row in rows if row.text("method") == "ar"}
    model, moved = list[Line](), list[Line]()
    for row in rows:
        base, union = ar.get(row.text("platform")), row.input("experts_per_layer", "E")
        if base is None or base is row:
            continue
        k, gigabytes = base.input("experts_per_layer", "E_AR"), base.input("model_gb", "GB_AR")
        model += row_line(row, METHOD, "GB_AR + layers (E - E_AR) MB / 1000", _model_gb,
                          [shape[2], sizes[0], k, gigabytes, union], row.input("model_gb"), EXACT,
                          unit="GB")  # fmt: skip
        bytes_ = base.input("moved_gb", "moved_AR")
        if bytes_ is not None and bytes_.value > 0:
            moved += row_line(row, METHOD, "moved_AR E / E_AR", lambda b, e, one: b * e / one, [bytes_, union, k],
                              row.input("moved_gb"), PADDING, relation=">=", unit="GB")  # fmt: skip
    return by_tag("ours.eco.model", "Bytes of a step from E, table 2", model) + by_tag(
        "ours.eco.moved", "Bytes moved against those of E experts, table 2, cold stores", moved
    )


def _model_gb(layers: float, megabytes: float, least: float, gigabytes: float, experts: float) -> float:
    resident = gigabytes * 1e9 - layers * least * megabytes * 1e6
    return TrafficModel(int(layers), megabytes * 1e6, resident).step_bytes(experts) / 1e9


def batches(sheets: Sheets) -> list[Line]:
    """Tables 6 to 8: speedup from tokens/s at the same batch size, and the same figures in all three."""
    cells = (*METHOD, "batch_size")
    first = by_key(sheets[TABLES[6]], *cells)
    speedup, same = list[Line](), list[Line]()
    for key, row in first.items():
        base = first.get((key[0], "ar", key[2]))
        if base is not None:
            speedup += row_line(row, cells, "tokens_per_s / AR", lambda a, b: a / b,
                                [row.input("tokens_per_s"), base.input("tokens_per_s", "AR")], row.input("speedup"),
                                EXACT, unit="x")  # fmt: skip
    for number in (7, 8):
        for row in sheets[TABLES[number]]:
            other = first.get(tuple(row.text(cell) for cell in cells))
            if other is not None:
                for column in ("tokens_per_s", "speedup"):
                    same += row_line(row, cells, "the same figure", lambda v: v, [other.input(column)],
                                     row.input(column), EXACT)  # fmt: skip
    return by_tag("ours.eco.batch", "Speedup of batches from tokens/s, table 6", speedup) + by_tag(
        "ours.eco.same.6-8", "Figures of table 6 that tables 7 and 8 repeat", same
    )


def budgets(number: int, sheets: Sheets) -> list[Line]:
    """Tables 11 and 12: acceptance lengths at most gamma."""
    cells = (*METHOD, "budget", "workload")
    lines = [
        line
        for row in sheets[TABLES[number]]
        for line in row_line(row, cells, "gamma", lambda g: g, [row.input("budget", "gamma")], row.input("alpha"),
                             EXACT, relation="<=", unit="tokens")
    ]  # fmt: skip
    return by_tag(f"ours.eco.alpha.{number}", f"Acceptance lengths of table {number} against gamma", lines)


def figure_gamma(sheets: Sheets) -> list[Line]:
    """The figure of budgets repeats table 11."""
    key = (*METHOD, "budget", "workload")
    lines = repeats(sheets[FIGURE_GAMMA], sheets[TABLES[11]], key, ("alpha", "experts_per_layer"))
    return by_tag("ours.eco.same.11-figure", "Figures of table 11 that the figure of budgets repeats", lines)


def predictor(sheets: Sheets) -> list[Line]:
    """The predictor's overlap from its hits."""
    lines = [
        line
        for row in sheets[PREDICTOR]
        for line in row_line(row, ("predictor", "layer"), "hits / slots", lambda a, b: a / b,
                             [row.input("hits"), row.input("slots")], row.input("overlap"), EXACT)
    ]  # fmt: skip
    return by_tag("ours.eco.predictor", "The predictor's overlap from its hits", lines)


def growth(sheets: Sheets) -> list[Line]:
    """Figure 1(b): the union of a block against uniform routing."""
    shape, rows = geometry(sheets), [row for row in sheets[FIGURE_1] if row.text("panel") == "b"]
    return [] if shape is None else growth_lines("ours.eco.growth", "figure 1", rows, shape)


def shape_of(sheets: Sheets) -> list[Line]:
    """Table 13: blocks are MoE and dense layers; a token chooses at most all experts."""
    lines, most = list[Line](), list[Line]()
    for row in sheets[GEOMETRY]:
        lines += row_line(row, ("target",), "moe_layers + dense_layers", lambda a, b: a + b,
                          [row.input("moe_layers"), row.input("dense_layers")], row.input("blocks"), EXACT)  # fmt: skip
        most += _at_most_all(row)
    return by_tag("ours.eco.blocks", "Blocks from MoE and dense layers, table 13", lines) + by_tag(
        "ours.eco.top-k", "Chosen experts against all, table 13", most
    )


def _at_most_all(row: Record) -> Iterator[Line]:
    found = re.match(r"\d+", row.text("experts"))
    experts = Input("N", int(found[0]), row.source) if found else None
    return row_line(row, ("target",), "N", lambda n: n, [experts], row.input("top_k", "k"), EXACT, relation="<=")


def checks() -> Iterator[Check]:
    """Every check of our EcoSpec results."""
    for number in WITH_UNIFORM:
        yield Check(f"ours.eco.uniform.{number}", (TABLES[number],), partial(unions, number))
    yield Check("ours.eco steps", (TABLES[3],), steps)
    for number in (3, 4, 10):
        yield Check(f"ours.eco.same.1-{number}", (TABLES[1], TABLES[number]), partial(repeated, number))
    yield Check("ours.eco traffic", (TABLES[2], FIGURE_1, GEOMETRY), traffic)
    yield Check("ours.eco batches", (TABLES[6], TABLES[7], TABLES[8]), batches)
    for number in (11, 12):
        yield Check(f"ours.eco.alpha.{number}", (TABLES[number],), partial(budgets, number))
    yield Check("ours.eco figure", (TABLES[11], FIGURE_GAMMA), figure_gamma)
    yield Check("ours.eco.predictor", (PREDICTOR,), predictor)
    yield Check("ours.eco growth", (FIGURE_1, GEOMETRY), growth)
    yield Check("ours.eco shape", (GEOMETRY,), shape_of)
