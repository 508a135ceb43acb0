"""EcoSpec's figures that stand in several tables, averages against the mean of their rows, and best values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moexp.audit.ecospec import ECOSPEC, NAME, TARGETS
from moexp.audit.lines import Input, Line, derive, farthest, only, printed, same
from moexp.papers import Paper

AVERAGED = {1: "temperature", 6: "batch_size", 7: "batch_size", 11: "budget", 12: "budget"}
"""Tables with averages, and what their rows vary besides target and method."""

COLUMNS = {"speedup": "speedup", "alpha": "alpha", "experts_per_layer": "E"}
"""Columns of the main results, and their names in ids."""


def averages(paper: Paper) -> Iterator[Line]:
    """Printed averages against the mean of the seven rows (Tables 1, 6, 7, 11, 12)."""
    for table, varied in AVERAGED.items():
        rows = paper.table(table).rows
        for column, name in COLUMNS.items():
            means = [row for row in rows if row["workload"] == "Average" and column in row]
            if not means:
                continue
            lines = [_average(rows, mean, column, table, varied) for mean in means]
            yield farthest(f"eco.mean.{table}.{name}", f"Averages of {name} in Table {table}", lines)


def _average(rows: list[dict[str, Any]], mean: Mapping[str, Any], column: str, table: int, varied: str) -> Line:
    keys = {key: mean[key] for key in ("target", "method", varied)}
    averaged = [r for r in rows if r["workload"] != "Average" and all(r[key] == value for key, value in keys.items())]
    return derive(
        NAME, "mean over workloads", [printed(row, column, f"Table {table}", row["workload"]) for row in averaged],
        printed(mean, column, f"Table {table}, Average"),
        subject=f"{mean['method']} on {mean['target']}, {varied} {mean[varied]}",
    )  # fmt: skip


def repeats(paper: Paper) -> Iterator[Line]:
    """The same setting in two tables: Table 1 (T = 0) in 3, 4, 6, 7, 9, 11 and 12; Table 3 in 10."""
    pairs = {
        3: [(row, row, "Average") for row in paper.table(3).rows if row["method"] != "AR"],
        4: [(row, row | {"method": ECOSPEC}, "GSM8K") for row in paper.table(4).rows if row["strategy"] == "ecospec"],
        6: [(row, row, row["workload"]) for row in paper.table(6).rows if row["batch_size"] == 1],
        7: [(row, row, row["workload"]) for row in paper.table(7).rows if row["batch_size"] == 1],
        9: [
            (row, row | {"method": ECOSPEC}, row["workload"])
            for row in paper.table(9).rows if row["predictor"] == "converged"
        ],
        11: [(row, row, row["workload"]) for row in paper.table(11).rows if row["budget"] == 4],
        12: [(row, row, row["workload"]) for row in paper.table(12).rows if row["budget"] == 4],
    }  # fmt: skip
    for table, rows in pairs.items():
        lines = []
        for row, keys, workload in rows:
            where = {"target": keys["target"], "method": keys["method"], "workload": workload, "temperature": 0}
            lines += _cells(only(paper.table(1).rows, **where), "Table 1", row, f"Table {table}", workload)
        yield farthest(f"eco.same.1-{table}", f"Figures of Table 1 that Table {table} repeats", lines)
    lines = []
    for row in paper.table(10).rows:
        if row["predictor"] == "predictor":
            third = only(paper.table(3).rows, target=row["target"], method=ECOSPEC)
            lines += _cells(
                third, "Table 3", row, "Table 10", "all workloads", ("verify_s", "alpha", "experts_per_layer")
            )
    yield farthest("eco.same.3-10", "Figures of Table 3 that Table 10 repeats", lines)


def _cells(
    first: Mapping[str, Any],
    source: str,
    second: Mapping[str, Any],
    other: str,
    workload: str,
    columns: Iterable[str] = COLUMNS,
) -> list[Line]:
    return [
        same(NAME, printed(first, name, source), printed(second, name, other),
             subject=f"{name} of {first['target']}, {first['method']}, {workload}")
        for name in columns
        if name in first and name in second
    ]  # fmt: skip


def best(paper: Paper) -> Iterator[Line]:
    """The highest speedups that the introduction names, and the budget that is fastest (Tables 1, 11, 12)."""
    lines = []
    for target in TARGETS:
        rows = [row for row in paper.table(1).rows if row["target"] == target and row["method"] == ECOSPEC]
        top = max(rows, key=lambda row: float(row["speedup"]))
        named = Input("speedup", paper.facts["best_speedup"][target], "the introduction", 0.01)
        lines.append(same(NAME, printed(top, "speedup", "Table 1"), named, unit="x", subject=target))
    yield farthest("eco.best", "Highest speedup by target", lines)
    default = Input("gamma", paper.facts["default_budget"], "setup")
    for table, of_averages in ((11, True), (12, True), (11, False), (12, False)):
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in paper.table(table).rows:
            if (row["workload"] == "Average") == of_averages:
                groups.setdefault((row["method"], row["workload"]), []).append(row)
        lines = [
            Line(
                "", NAME, "", "gamma of the highest speedup",
                tuple(printed(row, "speedup", f"Table {table}", f"gamma_{row['budget']}") for row in rows),
                *3 * (float(max(rows, key=lambda row: float(row["speedup"]))["budget"]),), default,
                subject=f"{method} on {workload}",
            )
            for (method, workload), rows in groups.items()
        ]  # fmt: skip
        scope = "averages" if of_averages else "workloads"
        yield farthest(f"eco.gamma.{table}.{scope}", f"Fastest budget by the {scope} of Table {table}", lines)
