"""EcoSpec's speeds from its acceptance lengths, step times and bytes, its averages, and what it prints twice. Pure.

Paper: EcoSpec Table 1; EcoSpec Table 2; EcoSpec Table 3; EcoSpec Table 8; EcoSpec Figure 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import correlation
from typing import Any

from moexp.audit.lines import Input, Line, cell, derive, farthest, only, printed, same
from moexp.papers import Paper

NAME = "ecospec"
TARGETS = {"Qwen3-235B-A22B": "qwen3", "GPT-OSS-120B": "gptoss", "DeepSeek-V3.1": "dsv3"}
BASELINES = {"Qwen3-235B-A22B": "EAGLE-3", "GPT-OSS-120B": "EAGLE-3", "DeepSeek-V3.1": "MTP"}
ECOSPEC, AR = "EcoSpec", "AR"
AVERAGE: dict[str, Any] = {"temperature": 0, "workload": "Average"}
PARTS = {"T_pred": "predictor_s", "T_draft": "draft_s", "T_verify": "verify_s"}
"""Of a step: their names in formulas, and their columns in Table 3."""


def methods() -> Iterator[tuple[str, str, str]]:
    """Target, method, and both in short."""
    for target, short in TARGETS.items():
        for method in (BASELINES[target], ECOSPEC):
            yield target, method, f"{short}.{'eco' if method == ECOSPEC else 'base'}"


def step_row(paper: Paper, target: str, method: str) -> Mapping[str, Any]:
    """A row of Table 3."""
    return only(paper.table(3).rows, target=target, method=method)


def step_cell(paper: Paper, target: str, method: str, column: str, name: str = "") -> Input:
    """A cell of Table 3."""
    return cell(paper, 3, column, name, target=target, method=method)


def greedy_rows(paper: Paper, target: str) -> list[dict[str, Any]]:
    """A target's rows of Table 1 at T = 0, but for the averages."""
    return [
        row for row in paper.table(1).rows
        if row["target"] == target and row["temperature"] == 0 and row["workload"] != "Average"
    ]  # fmt: skip


def cycles(paper: Paper) -> Iterator[Line]:
    """Speedup = alpha T_AR / T_step (Table 3 against Table 1's averages at T = 0)."""
    for target, method, ends in methods():
        yield derive(
            NAME, "alpha T_AR / T_step",
            [step_cell(paper, target, method, "alpha"), step_cell(paper, target, AR, "step_s", "T_AR"),
             step_cell(paper, target, method, "step_s", "T_step")],
            cell(paper, 1, "speedup", target=target, method=method, **AVERAGE), unit="x",
            id=f"eco.cycle.{ends}", what=f"Speedup of {method} on {target} from its step",
            note="each figure is an average over workloads, and a mean of quotients is not the quotient of means",
        )  # fmt: skip


def _parts(row: Mapping[str, Any], *names: str) -> tuple[list[Input], dict[str, str]]:
    """The named parts of a step that Table 3 has of it, and what they are in formulas: 0 where it has none."""
    columns = {name: PARTS[name] for name in names}
    return (
        [printed(row, column, "Table 3") for column in columns.values() if column in row],
        {name: column if column in row else "0" for name, column in columns.items()},
    )


def steps(paper: Paper) -> Iterator[Line]:
    """T_total = T_pred + T_draft + T_verify, and rho = T_AR / T_verify (Tables 3 and 8)."""
    sums, ratios = [], []
    for target, method, _ in methods():
        parts, names = _parts(step_row(paper, target, method), *PARTS)
        subject = f"{method} on {target}"
        total = step_cell(paper, target, method, "step_s")
        sums.append(derive(NAME, "T_pred + T_draft + T_verify", parts, total, given=names, unit="s", subject=subject))
        times = [step_cell(paper, target, AR, "step_s", "T_AR"),
                 step_cell(paper, target, method, "verify_s", "T_verify")]  # fmt: skip
        ratios += [
            derive(NAME, "T_AR / T_verify", times, printed(row, "rho", "Table 8"), subject=subject)
            for row in paper.table(8).rows
            if (row["target"], row["method"], row["batch_size"]) == (target, method, 1)
        ]
    yield farthest("eco.step", "A step's time as the sum of its parts", sums)
    yield farthest("eco.rho", "T_AR / T_verify of Table 3 beside Table 8 at batch size 1", ratios)


def batches(paper: Paper) -> Iterator[Line]:
    """alpha rho is the speedup of a step that is all verification; drafting only adds to it (Tables 1, 6, 7, 8)."""
    for target, table in (("Qwen3-235B-A22B", 6), ("GPT-OSS-120B", 7)):
        lines = []
        for row in paper.table(8).rows:
            method, size = row["method"], row["batch_size"]
            if row["target"] != target or size == 1:
                continue
            keys = {"method": method, "batch_size": size, "workload": "Average"}
            own = printed(row, "speedup", "Table 8") if "speedup" in row else cell(paper, table, "speedup", **keys)
            lines.append(
                derive(
                    NAME, "alpha rho",
                    [cell(paper, 1, "alpha", target=target, method=method, **AVERAGE), printed(row, "rho", "Table 8")],
                    own, relation="<=", unit="x", subject=f"{method} at batch size {size}",
                    note="alpha is that of batch size 1: no other is printed, and no drafting time by batch size",
                )
            )  # fmt: skip
        what = f"Highest speedup of batches by alpha and rho, {target}"
        yield farthest(f"eco.batch.{TARGETS[target]}", what, lines)


def linear(paper: Paper) -> Iterator[Line]:
    """Figure 1(a): verification time linear in E; EcoSpec's from the line through AR and the baseline (Table 3)."""
    for target, short in TARGETS.items():
        base, top_k = BASELINES[target], step_row(paper, target, AR)["experts_per_layer"]
        yield derive(
            NAME, "T_AR + (T_base - T_AR) (E_eco - E_AR) / (E_base - E_AR)",
            [step_cell(paper, target, AR, "step_s", "T_AR"), Input("E_AR", float(top_k), "Table 3"),
             step_cell(paper, target, base, "experts_per_layer", "E_base"),
             step_cell(paper, target, ECOSPEC, "experts_per_layer", "E_eco"),
             step_cell(paper, target, base, "verify_s", "T_base")],
            step_cell(paper, target, ECOSPEC, "verify_s"), unit="s",
            id=f"eco.linear.{short}", what=f"EcoSpec's verification time if linear in E, {target}",
            note="Figure 1(a) is linear and prints no coefficients; an AR step is taken as verifying one token",
        )  # fmt: skip
        rows = greedy_rows(paper, target)
        costs = [row["alpha"] / row["speedup"] for row in rows]
        value = correlation([row["experts_per_layer"] for row in rows], costs)
        yield Line(
            f"eco.correlation.{short}", NAME, f"Correlation of E with a step's cost alpha / speedup, {target}",
            "Pearson's r of E and alpha / speedup", (Input("rows", len(rows), "Table 1, T = 0, both methods"),), value,
        )  # fmt: skip


def bytes_and_time(paper: Paper) -> Iterator[Line]:
    """EcoSpec over its baseline if a step's time is in proportion to its bytes (Tables 1, 2, 3)."""
    for target, short in TARGETS.items():
        both = {"eco": ECOSPEC, "base": BASELINES[target]}
        sizes = [cell(paper, 2, "read_gb", f"GB_{n}", target=target, method=method) for n, method in both.items()]
        yield derive(
            NAME, "T_base GB_eco / GB_base", [step_cell(paper, target, both["base"], "verify_s", "T_base"), *sizes],
            step_cell(paper, target, ECOSPEC, "verify_s"), unit="s", id=f"eco.bytes.time.{short}",
            what=f"EcoSpec's verification time if in proportion to bytes, {target}",
        )  # fmt: skip
        speeds = {n: only(paper.table(1).rows, target=target, method=method, **AVERAGE)["speedup"]
                  for n, method in both.items()}  # fmt: skip
        gain = speeds["eco"] / speeds["base"]
        rounding = sum(0.01 / speed for speed in speeds.values())
        yield derive(
            NAME, "(alpha_eco / alpha_base) / (GB_eco / GB_base)",
            [*(step_cell(paper, target, method, "alpha", f"alpha_{n}") for n, method in both.items()), *sizes],
            Input("gain", gain, "Table 1 (ratio of the averages)", gain * rounding), unit="x",
            id=f"eco.bytes.gain.{short}", what=f"EcoSpec over {both['base']} from alpha and bytes, {target}",
        )  # fmt: skip


def least_steps(paper: Paper) -> Iterator[Line]:
    """alpha / speedup of a row is its step in AR steps; drafting, predicting and one AR step are the least it holds."""
    for target, short in TARGETS.items():
        lines = []
        for row in greedy_rows(paper, target):
            parts, names = _parts(step_row(paper, target, row["method"]), "T_pred", "T_draft")
            cost = row["alpha"] / row["speedup"]
            rounding = cost * (0.01 / row["alpha"] + 0.01 / row["speedup"])
            lines.append(
                derive(
                    NAME, "(T_pred + T_draft + T_AR) / T_AR",
                    [step_cell(paper, target, AR, "step_s", "T_AR"), *parts],
                    Input("alpha / speedup", cost, "Table 1 (alpha / speedup)", rounding), relation=">=", given=names,
                    unit="AR steps", subject=f"{row['method']} on {row['workload']}",
                    note="assumes that verifying several tokens takes at least an AR step",
                )
            )  # fmt: skip
        yield farthest(f"eco.least.{short}", f"Least cost of a step beside alpha / speedup, {target}", lines)


# --- figures that stand in several tables ---

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
