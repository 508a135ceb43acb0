"""EcoSpec's experts and bytes: unions against uniform routing and their limit, HBM reads (Tables 1, 2, 6 to 13). Pure.

Uniform: verifying n tokens that choose their k of N experts independently and uniformly touches N (1 - (1 - k/N)^n) of
them; n is gamma times the batch size. The limit is n k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moexp import metrics
from moexp.audit.ecospec import AR, BASELINES, ECOSPEC, NAME, TARGETS, methods, step_row
from moexp.audit.lines import Input, Line, derive, farthest, only, printed
from moexp.papers import Paper
from moexp.sim.traffic import TrafficModel

ROUTED = {"Qwen3-235B-A22B": 128, "GPT-OSS-120B": 128, "DeepSeek-V3.1": 256}
SHAPES = {
    "Qwen3-235B-A22B": (4096, 1536, 2.0, "BF16"),
    "GPT-OSS-120B": (2880, 2880, 0.5, "MXFP4, 4 bits without scales"),
    "DeepSeek-V3.1": (7168, 2048, 1.0, "FP8"),
}
"""Hidden and expert width of the published configs, and bytes a weight as Figure 1(c) has them."""

HBM_PEAK = Input("peak", 4800, "one H200 (peak)")


def _geometry(paper: Paper, target: str) -> tuple[Input, Input, Input]:
    """N, k and MoE layers (Table 13)."""
    row = only(paper.table(13).rows, target=target)
    return (
        Input("N", ROUTED[target], "Table 13"),
        Input("k", row["top_k"], "Table 13"),
        Input("layers", row["moe_layers"], "Table 13"),
    )


def _tokens(paper: Paper, row: Mapping[str, Any]) -> Input:
    """Tokens that a row's step verifies: gamma a request."""
    budget = row.get("budget", paper.facts["default_budget"])
    return Input("n", budget * row.get("batch_size", 1), "gamma x batch size")


def _union(paper: Paper, row: Mapping[str, Any], table: int, *, limit: bool = False) -> Line:
    experts, chosen, _ = _geometry(paper, row["target"])
    names = ("method", "strategy", "predictor", "workload", "temperature", "budget", "batch_size")
    inputs = [chosen, _tokens(paper, row)] if limit else [experts, chosen, _tokens(paper, row)]
    return derive(
        "", NAME, "", "n k" if limit else "N (1 - (1 - k / N)^n)",
        (lambda k, n: k * n) if limit else (lambda n, k, tokens: metrics.uniform_union(int(n), int(k), tokens)),
        inputs, printed(row, "experts_per_layer", f"Table {table}"), relation="<=",
        subject=", ".join([row["target"], *(f"{name} {row[name]}" for name in names if name in row)]),
    )  # fmt: skip


def uniform(paper: Paper) -> Iterator[Line]:
    """E of each average of Table 1, of all its rows, and of Tables 6, 7, 11 and 12 against uniform routing."""
    rows = paper.table(1).rows
    for temperature in (0, 1):
        for target, method, place in methods():
            row = only(rows, target=target, method=method, workload="Average", temperature=temperature)
            name = f"E of {method} on {target}, T = {temperature}, if routing were uniform"
            yield farthest(f"eco.uniform.{place}.t{temperature}", name, [_union(paper, row, 1)])
    groups = {f"eco.uniform.rows.{short}": (1, target) for target, short in TARGETS.items()}
    groups |= {f"eco.uniform.table-{table}": (table, "") for table in (6, 7, 11, 12)}
    for id, (table, target) in groups.items():
        lines = [_union(paper, row, table) for row in paper.table(table).rows if target in ("", row["target"])]
        yield farthest(id, f"E of all rows of Table {table}{' on ' * bool(target)}{target}, if uniform", lines)


def limits(paper: Paper) -> Iterator[Line]:
    """E of every row against n k, and acceptance lengths against gamma and the draft's depth."""
    for table in (1, 4, 6, 7, 9, 11, 12):
        lines = [_union(paper, row, table, limit=True) for row in paper.table(table).rows]
        yield farthest(f"eco.limit.table-{table}", f"E of all rows of Table {table} against n k", lines)
    depth = Input("depth", paper.facts["draft_steps"], "setup")
    yield farthest("eco.alpha", "Acceptance lengths against gamma and the draft's depth", [
        derive(
            "", NAME, "", "min(gamma, 1 + depth)", lambda gamma, steps: min(gamma, 1 + steps),
            [Input("gamma", row.get("budget", paper.facts["default_budget"]), f"Table {table}"), depth],
            printed(row, "alpha", f"Table {table}"), relation="<=", unit="tokens",
            subject=f"{row['target']}, {row.get('method', row.get('predictor'))}, {row['workload']}",
        )
        for table in (1, 5, 9, 11, 12)
        for row in paper.table(table).rows
    ])  # fmt: skip


def expert_sizes(paper: Paper) -> Iterator[Line]:
    """Megabytes an expert from its shape (Figure 1(c))."""
    for target, (hidden, width, size, why) in SHAPES.items():
        yield derive(
            f"eco.expert.{TARGETS[target]}", NAME, f"Bytes of an expert, {target}", "3 hidden width bytes / 1e6",
            lambda h, w, b: 3 * h * w * b / 1e6,
            [Input("hidden", hidden, "published config"), Input("width", width, "published config"),
             Input("bytes", size, why)],
            Input("expert_mb", paper.figures[1]["expert_mb"][target], "Figure 1", 0.01), unit="MB",
        )  # fmt: skip


def scores(paper: Paper) -> Iterator[Line]:
    """Figure 3's scores: cumulative probability over the experts of the path that the buffer does not hold."""
    figure = paper.figures[3]
    lines = []
    for step in figure["steps"]:
        for name, score in step["scores"].items():
            node = figure["nodes"][name]
            cost = len(set(node.get("path_experts", node.get("experts"))) - set(step["buffer"]))
            probability = Input("P", node["p"], "Figure 3", 0.01 if 0 < node["p"] < 1 else 0.0)
            lines.append(
                derive(
                    "", NAME, "", "P / cost", lambda p, c: p / c, [probability, Input("cost", cost, "Figure 3")],
                    Input("score", score, "Figure 3", 0.001 if score < 0.1 else 0.01),
                    subject=f"{name} with a buffer of {len(step['buffer'])}",
                    note="epsilon is taken as 0: the paper prints none",
                )
            )  # fmt: skip
    yield farthest("eco.scores", "Scores of the worked example of Figure 3", lines)


def traffic(paper: Paper) -> Iterator[Line]:
    """HBM reads: layers E expert_mb + resident, the resident part from the baseline's row (Tables 2 and 3)."""
    for target, short in TARGETS.items():
        _, chosen, layers = _geometry(paper, target)
        megabytes = Input("MB", paper.figures[1]["expert_mb"][target], "Figure 1", 0.01)
        steps = {m: step_row(paper, target, m) for m in (BASELINES[target], ECOSPEC)}
        reads = {m: only(paper.table(2).rows, target=target, method=m) for m in steps}
        base, ours = BASELINES[target], ECOSPEC
        e_base = printed(steps[base], "experts_per_layer", "Table 3", "E_base")
        e_eco = printed(steps[ours], "experts_per_layer", "Table 3", "E_eco")
        gb_base = printed(reads[base], "read_gb", "Table 2", "GB_base")
        gb_eco = printed(reads[ours], "read_gb", "Table 2", "GB_eco")
        known = [layers, megabytes, e_base, gb_base]
        yield derive(
            f"eco.hbm.read.{short}", NAME, f"HBM reads of an EcoSpec step from E, {target}",
            "resident + layers E_eco MB / 1000, resident = GB_base - layers E_base MB / 1000",
            lambda n, mb, e, gb, other: TrafficModel(int(n), mb * 1e6, _resident(n, mb, e, gb)).step_bytes(other) / 1e9,
            [*known, e_eco], gb_eco, unit="GB",
        )  # fmt: skip
        cut = paper.facts["hbm_reduction"][target]
        yield derive(
            f"eco.hbm.cut.{short}", NAME, f"Reduction of HBM reads from E, {target}",
            "layers (E_base - E_eco) MB / 1000", lambda n, mb, a, b: n * (a - b) * mb / 1e3,
            [layers, megabytes, e_base, e_eco], Input("GB", cut["gb"], "Table 2, Reduction", 0.1), unit="GB",
        )  # fmt: skip
        yield derive(
            f"eco.hbm.percent.{short}", NAME, f"Reduction of HBM reads in percent, {target}",
            "100 (GB_base - GB_eco) / GB_base", lambda a, b: 100 * (a - b) / a, [gb_base, gb_eco],
            Input("percent", cut["percent"], "Table 2, Reduction", 0.1), unit="%",
        )  # fmt: skip
        row = only(paper.table(13).rows, target=target)
        active = float(str(row["total_active"]).split("/")[1].strip(" B"))
        hidden, width, size, why = SHAPES[target]
        yield derive(
            f"eco.hbm.resident.{short}", NAME, f"Resident weights behind Table 2, {target}",
            "GB_base - layers E_base MB / 1000", lambda n, mb, e, gb: _resident(n, mb, e, gb) / 1e9, known,
            Input("GB", (active - layers.value * chosen.value * 3 * hidden * width / 1e9) * size,
                  f"active parameters less routed ones at {size:g} bytes (Table 13)",
                  (0.1 if active < 10 else 1.0) * size),
            unit="GB", note=f"bytes a weight as the experts have them ({why})",
        )  # fmt: skip
        ar = step_row(paper, target, AR)
        yield derive(
            f"eco.hbm.rate.ar.{short}", NAME, f"HBM rate of an AR step, {target}",
            "(resident + layers k MB / 1000) / T_AR", lambda n, mb, e, gb, k, t:
            TrafficModel(int(n), mb * 1e6, _resident(n, mb, e, gb)).step_bytes(k) / 1e9 / t,
            [*known, chosen, printed(ar, "step_s", "Table 3", "T_AR")], HBM_PEAK, relation=">=", unit="GB/s",
            note="eight GPUs are used; how layers are spread over them is not printed",
        )  # fmt: skip
        yield derive(
            f"eco.hbm.rate.{short}", NAME, f"HBM rate of verification, {base} on {target}", "GB_base / T_verify",
            lambda gb, t: gb / t, [gb_base, printed(steps[base], "verify_s", "Table 3", "T_verify")], HBM_PEAK,
            relation=">=", unit="GB/s", note="eight GPUs are used; how layers are spread over them is not printed",
        )  # fmt: skip


def _resident(layers: float, megabytes: float, experts: float, gigabytes: float) -> float:
    return gigabytes * 1e9 - layers * experts * megabytes * 1e6
