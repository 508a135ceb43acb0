"""Our own EcoSpec tables by the same formulas, each within a stated tolerance. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from moexp.audit.files import Sheets
from moexp.audit.ours import (
    CLOCK,
    GEOMETRY,
    PADDING,
    UNIFORM,
    beside,
    by_key,
    experts_of,
    geometry,
    growth,
    key_of,
    rows_of,
)
from moexp.audit.rules import Check, Part, Rule, Scope, repeats

TABLES = {number: f"ecospec/table_{number}.csv" for number in range(1, 14)}
FIGURE_1, FIGURE_GAMMA = "ecospec/figure_1.csv", "ecospec/figure_gamma.csv"
PREDICTOR = "predictor.csv"

METHOD = "platform method"
BUDGET = f"{METHOD} budget workload"
SIZE = f"{METHOD} batch_size"
WITH_UNIFORM = (1, 4, 5, 9, 10, 11, 12)
"""Tables that have uniform routing beside E."""


def _beside_ar(file: str, columns: str) -> Callable[[Sheets], Iterator[Scope]]:
    """The rows of a file; `ar`: AR's with the same cells in these columns."""

    def scopes(sheets: Sheets) -> Iterator[Scope]:
        ar = by_key(sheets[file], columns, method="ar")
        return ({"row": row, "ar": ar.get(key_of(row, columns))} for row in sheets[file])

    return scopes


def _beside_averages(file: str) -> Callable[[Sheets], Iterator[Scope]]:
    """The rows of a file; `first`: the method's average at T = 0 in table 1, which calls its union `E`."""

    def scopes(sheets: Sheets) -> Iterator[Scope]:
        averages = [
            replace(row, cells=row.cells | {"experts_per_layer": row.text("E")})
            for row in sheets[TABLES[1]]
            if row.text("workload") == "average" and row.number("temperature") == 0
        ]
        first = by_key(averages, METHOD)
        return ({"row": row, "first": first.get(key_of(row, METHOD))} for row in sheets[file])

    return scopes


def _traffic(sheets: Sheets) -> Iterator[Scope]:
    """Rows of table 2 but AR's; `ar`: AR's, `moving`: it too, where its step moves bytes; `MB`: of an expert."""
    shape, rows = geometry(sheets), sheets[TABLES[2]]
    sizes = [size for row in sheets[FIGURE_1] if (size := row.input("expert_mb", "MB")) is not None]
    ar = by_key(rows, "platform", method="ar")
    for row in rows if shape and sizes else ():
        base = ar.get(key_of(row, "platform"))
        if base is not None and base is not row:
            moving = base if (base.number("moved_gb") or 0) > 0 else None
            yield {**shape, "row": row, "ar": base, "moving": moving, "MB": sizes[0]}


def _shapes(sheets: Sheets) -> Iterator[Scope]:
    return ({"row": row, "N": experts_of(row)} for row in sheets[GEOMETRY])


def _uniform(number: int) -> Check:
    """E of every row against uniform routing of as many tokens, which the row has beside it."""
    id = f"ours.eco.uniform.{number}"
    rule = Rule(id, f"E of all rows of table {number}, if uniform", UNIFORM, "uniform",
                "E" if number == 1 else "experts_per_layer", relation="<=", given={UNIFORM: "uniform"})  # fmt: skip
    columns = f"{METHOD} workload? temperature? budget?"
    return Check(id, (TABLES[number],), (Part(columns, rows_of(TABLES[number]), (rule,)),))


def _repeated(number: int) -> Check:
    """Speedup, alpha and E of table 1's averages at T = 0 in another table."""
    id = f"ours.eco.same.1-{number}"
    rule = repeats(id, f"Figures of table 1 that table {number} repeats", "speedup alpha experts_per_layer")
    files = (TABLES[1], TABLES[number])
    return Check(id, files, (Part(METHOD, _beside_averages(TABLES[number]), (rule,)),))


def _budgets(number: int) -> Check:
    """Acceptance lengths at most gamma."""
    id = f"ours.eco.alpha.{number}"
    rule = Rule(id, f"Acceptance lengths of table {number} against gamma", "gamma", "gamma=budget", "alpha",
                relation="<=", unit="tokens")  # fmt: skip
    return Check(id, (TABLES[number],), (Part(BUDGET, rows_of(TABLES[number]), (rule,)),))


SAME_BATCHES = repeats("ours.eco.same.6-8", "Figures of table 6 that tables 7 and 8 repeat", "tokens_per_s speedup")

CHECKS = (
    *map(_uniform, WITH_UNIFORM),
    Check("ours.eco steps", (TABLES[3],), (Part(METHOD, _beside_ar(TABLES[3], "platform"), (
        Rule("ours.eco.cycle", "Speedup from alpha and a step's time, table 3", "alpha T_AR / T_step",
             "alpha T_AR=ar.step_s T_step=step_s", "speedup", CLOCK, unit="x"),
        Rule("ours.eco.step", "A step's time against the sum of its parts, table 3", "sum of the parts",
             "predictor_s? draft_s? verify_s?", "step_s", relation=">=", unit="s"),
    )),)),
    *map(_repeated, (3, 4, 10)),
    Check("ours.eco traffic", (TABLES[2], FIGURE_1, GEOMETRY), (Part(METHOD, _traffic, (
        Rule("ours.eco.model", "Bytes of a step from E, table 2", "GB_AR + layers (E - E_AR) MB / 1000",
             "layers MB E_AR=ar.experts_per_layer GB_AR=ar.model_gb E=experts_per_layer", "model_gb", unit="GB"),
        Rule("ours.eco.moved", "Bytes moved against those of E experts, table 2, cold stores", "moved_AR E / E_AR",
             "moved_AR=moving.moved_gb E=experts_per_layer E_AR=ar.experts_per_layer", "moved_gb", PADDING, ">=", "GB"),
    )),)),
    Check("ours.eco batches", (TABLES[6], TABLES[7], TABLES[8]), (
        Part(SIZE, _beside_ar(TABLES[6], "platform batch_size"), (
            Rule("ours.eco.batch", "Speedup of batches from tokens/s, table 6", "tokens_per_s / AR",
                 "tokens_per_s AR=ar.tokens_per_s", "speedup", unit="x"),
        )),
        *(Part(SIZE, beside(TABLES[number], TABLES[6], SIZE), (SAME_BATCHES,)) for number in (7, 8)),
    )),
    *map(_budgets, (11, 12)),
    Check("ours.eco figure", (TABLES[11], FIGURE_GAMMA), (Part(BUDGET, beside(FIGURE_GAMMA, TABLES[11], BUDGET), (
        repeats("ours.eco.same.11-figure", "Figures of table 11 that the figure of budgets repeats",
                "alpha experts_per_layer"),
    )),)),
    Check("ours.eco.predictor", (PREDICTOR,), (Part("predictor layer", rows_of(PREDICTOR), (
        Rule("ours.eco.predictor", "The predictor's overlap from its hits", "hits / slots", "hits slots", "overlap"),
    )),)),
    Check("ours.eco growth", (FIGURE_1, GEOMETRY), (growth("ours.eco.growth", "figure 1", FIGURE_1, panel="b"),)),
    Check("ours.eco shape", (GEOMETRY,), (Part("target", _shapes, (
        Rule("ours.eco.blocks", "Blocks from MoE and dense layers, table 13", "moe_layers + dense_layers",
             "moe_layers dense_layers", "blocks"),
        Rule("ours.eco.top-k", "Chosen experts against all, table 13", "N", "N", "top_k", relation="<="),
    )),)),
)  # fmt: skip
"""Every check of our EcoSpec results."""
