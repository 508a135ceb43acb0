"""EcoSpec's speeds from its acceptance lengths, step times and bytes (Tables 1, 2, 3, 8, Figure 1). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import correlation
from typing import Any

from moexp import metrics
from moexp.audit.lines import Input, Line, derive, farthest, only, printed
from moexp.papers import Paper

NAME = "ecospec"
TARGETS = {"Qwen3-235B-A22B": "qwen3", "GPT-OSS-120B": "gptoss", "DeepSeek-V3.1": "dsv3"}
BASELINES = {"Qwen3-235B-A22B": "EAGLE-3", "GPT-OSS-120B": "EAGLE-3", "DeepSeek-V3.1": "MTP"}
ECOSPEC, AR = "EcoSpec", "AR"
AVERAGE = {"temperature": 0, "workload": "Average"}


def methods() -> Iterator[tuple[str, str, str]]:
    """Target, method, and both in short."""
    for target, short in TARGETS.items():
        for method in (BASELINES[target], ECOSPEC):
            yield target, method, f"{short}.{'eco' if method == ECOSPEC else 'base'}"


def step_row(paper: Paper, target: str, method: str) -> Mapping[str, Any]:
    """A row of Table 3."""
    return only(paper.table(3).rows, target=target, method=method)


def cycles(paper: Paper) -> Iterator[Line]:
    """Speedup = alpha T_AR / T_step (Table 3 against Table 1's averages at T = 0)."""
    for target, method, place in methods():
        row, ar = step_row(paper, target, method), step_row(paper, target, AR)
        one = only(paper.table(1).rows, target=target, method=method, **AVERAGE)
        yield derive(
            f"eco.cycle.{place}", NAME, f"Speedup of {method} on {target} from its step",
            "alpha T_AR / T_step", lambda alpha, ar_s, step_s: metrics.cycle_speedup(alpha, 0, 0, step_s / ar_s),
            [printed(row, "alpha", "Table 3"), printed(ar, "step_s", "Table 3", "T_AR"),
             printed(row, "step_s", "Table 3", "T_step")],
            printed(one, "speedup", "Table 1"), unit="x",
            note="each figure is an average over workloads, and a mean of quotients is not the quotient of means",
        )  # fmt: skip


def steps(paper: Paper) -> Iterator[Line]:
    """T_total = T_pred + T_draft + T_verify, and rho = T_AR / T_verify (Tables 3 and 8)."""
    sums, ratios = [], []
    for target, method, _ in methods():
        row, ar = step_row(paper, target, method), step_row(paper, target, AR)
        parts = [name for name in ("predictor_s", "draft_s", "verify_s") if name in row]
        sums.append(
            derive(
                "", NAME, "", "T_pred + T_draft + T_verify", lambda *values: sum(values),
                [printed(row, name, "Table 3") for name in parts], printed(row, "step_s", "Table 3"), unit="s",
                subject=f"{method} on {target}",
            )
        )  # fmt: skip
        rows = [r for r in paper.table(8).rows if r["target"] == target and r["method"] == method]
        ratios += [
            derive(
                "", NAME, "", "T_AR / T_verify", lambda a, b: a / b,
                [printed(ar, "step_s", "Table 3", "T_AR"), printed(row, "verify_s", "Table 3", "T_verify")],
                printed(r, "rho", "Table 8"), subject=f"{method} on {target}",
            )
            for r in rows if r["batch_size"] == 1
        ]  # fmt: skip
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
            found = row if "speedup" in row else only(paper.table(table).rows, **keys)
            one = only(paper.table(1).rows, target=target, method=method, **AVERAGE)
            lines.append(
                derive(
                    "", NAME, "", "alpha rho", lambda alpha, rho: alpha * rho,
                    [printed(one, "alpha", "Table 1"), printed(row, "rho", "Table 8")],
                    printed(found, "speedup", f"Table {8 if found is row else table}"), relation="<=", unit="x",
                    subject=f"{method} at batch size {size}",
                    note="alpha is that of batch size 1: no other is printed, and no drafting time by batch size",
                )
            )  # fmt: skip
        what = f"Highest speedup of batches by alpha and rho, {target}"
        yield farthest(f"eco.batch.{TARGETS[target]}", what, lines)


def linear(paper: Paper) -> Iterator[Line]:
    """Figure 1(a): verification time linear in E; EcoSpec's from the line through AR and the baseline (Table 3)."""
    for target, short in TARGETS.items():
        base, ours, ar = (step_row(paper, target, method) for method in (BASELINES[target], ECOSPEC, AR))
        inputs = [printed(ar, "step_s", "Table 3", "T_AR"), printed(ar, "experts_per_layer", "Table 3", "E_AR")]
        for row, name in ((base, "base"), (ours, "eco")):
            inputs.append(printed(row, "experts_per_layer", "Table 3", f"E_{name}"))
        inputs[1] = Input(inputs[1].name, inputs[1].value, inputs[1].source)  # top-k: exact
        yield derive(
            f"eco.linear.{short}", NAME, f"EcoSpec's verification time if linear in E, {target}",
            "T_AR + (T_base - T_AR) (E_eco - E_AR) / (E_base - E_AR)",
            lambda t, e, e_base, e_eco, t_base: t + (t_base - t) * (e_eco - e) / (e_base - e),
            [*inputs, printed(base, "verify_s", "Table 3", "T_base")], printed(ours, "verify_s", "Table 3"), unit="s",
            note="Figure 1(a) is linear and prints no coefficients; an AR step is taken as verifying one token",
        )  # fmt: skip
        rows = [
            row for row in paper.table(1).rows
            if row["target"] == target and row["temperature"] == 0 and row["workload"] != "Average"
        ]  # fmt: skip
        costs = [row["alpha"] / row["speedup"] for row in rows]
        value = correlation([row["experts_per_layer"] for row in rows], costs)
        yield Line(
            f"eco.correlation.{short}", NAME, f"Correlation of E with a step's cost alpha / speedup, {target}",
            "Pearson's r of E and alpha / speedup", (Input("rows", len(rows), "Table 1, T = 0, both methods"),), value,
        )  # fmt: skip


def bytes_and_time(paper: Paper) -> Iterator[Line]:
    """EcoSpec over its baseline if a step's time is in proportion to its bytes (Tables 1, 2, 3)."""
    for target, short in TARGETS.items():
        base, ours = (only(paper.table(2).rows, target=target, method=m) for m in (BASELINES[target], ECOSPEC))
        sizes = [printed(ours, "read_gb", "Table 2", "GB_eco"), printed(base, "read_gb", "Table 2", "GB_base")]
        rows = [step_row(paper, target, method) for method in (BASELINES[target], ECOSPEC)]
        yield derive(
            f"eco.bytes.time.{short}", NAME, f"EcoSpec's verification time if in proportion to bytes, {target}",
            "T_base GB_eco / GB_base", lambda t, a, b: t * a / b,
            [printed(rows[0], "verify_s", "Table 3", "T_base"), *sizes], printed(rows[1], "verify_s", "Table 3"),
            unit="s",
        )  # fmt: skip
        speeds = [only(paper.table(1).rows, target=target, method=m, **AVERAGE) for m in (BASELINES[target], ECOSPEC)]
        low, high = (0.01 / (2 * row["speedup"]) for row in speeds)
        gain = speeds[1]["speedup"] / speeds[0]["speedup"]
        yield derive(
            f"eco.bytes.gain.{short}", NAME, f"EcoSpec over {BASELINES[target]} from alpha and bytes, {target}",
            "(alpha_eco / alpha_base) / (GB_eco / GB_base)", lambda a, b, c, d: a / b / (c / d),
            [printed(rows[1], "alpha", "Table 3", "alpha_eco"), printed(rows[0], "alpha", "Table 3", "alpha_base"),
             *sizes],
            Input("gain", gain, "Table 1 (ratio of the averages)", 2 * gain * (low + high)), unit="x",
        )  # fmt: skip


def least_steps(paper: Paper) -> Iterator[Line]:
    """alpha / speedup of a row is its step in AR steps; drafting, predicting and one AR step are the least it holds."""
    for target, short in TARGETS.items():
        ar = step_row(paper, target, AR)
        lines = []
        for row in paper.table(1).rows:
            if row["target"] != target or row["temperature"] != 0 or row["workload"] == "Average":
                continue
            step = step_row(paper, target, row["method"])
            parts = [printed(step, name, "Table 3") for name in ("predictor_s", "draft_s") if name in step]
            cost = row["alpha"] / row["speedup"]
            half = cost * (0.005 / row["alpha"] + 0.005 / row["speedup"])
            lines.append(
                derive(
                    "", NAME, "", "(T_pred + T_draft + T_AR) / T_AR", lambda t, *rest: (sum(rest) + t) / t,
                    [printed(ar, "step_s", "Table 3", "T_AR"), *parts],
                    Input("alpha / speedup", cost, "Table 1 (alpha / speedup)", 2 * half), relation=">=",
                    unit="AR steps", subject=f"{row['method']} on {row['workload']}",
                    note="assumes that verifying several tokens takes at least an AR step",
                )
            )  # fmt: skip
        yield farthest(f"eco.least.{short}", f"Least cost of a step beside alpha / speedup, {target}", lines)
