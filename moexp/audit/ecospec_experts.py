"""EcoSpec's experts and bytes: unions against uniform routing and their limit, HBM reads (Tables 1, 2, 6 to 13). Pure.

Uniform: verifying n tokens that choose their k of N experts independently and uniformly touches N (1 - (1 - k/N)^n) of
them; n is gamma times the batch size. The limit is n k.

Paper: EcoSpec Table 1; EcoSpec Table 2; EcoSpec Table 13; EcoSpec Figure 1; EcoSpec Figure 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moexp.audit.ecospec import AR, BASELINES, ECOSPEC, NAME, TARGETS, methods, step_cell
from moexp.audit.lines import Input, Line, cell, derive, farthest, only, printed
from moexp.papers import Paper

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
    values = {"N": ROUTED[target], "k": row["top_k"], "layers": row["moe_layers"]}
    experts, chosen, layers = (Input(name, value, "Table 13") for name, value in values.items())
    return experts, chosen, layers


def _union(paper: Paper, row: Mapping[str, Any], table: int, formula: str = "N (1 - (1 - k / N)^n)") -> Line:
    """E of a row, whose step verifies gamma tokens a request."""
    tokens = row.get("budget", paper.facts["default_budget"]) * row.get("batch_size", 1)
    inputs = [*_geometry(paper, row["target"])[:2], Input("n", tokens, "gamma x batch size")]
    names = ("method", "strategy", "predictor", "workload", "temperature", "budget", "batch_size")
    return derive(
        NAME, formula, inputs if "N" in formula else inputs[1:], printed(row, "experts_per_layer", f"Table {table}"),
        relation="<=", subject=", ".join([row["target"], *(f"{name} {row[name]}" for name in names if name in row)]),
    )  # fmt: skip


def uniform(paper: Paper) -> Iterator[Line]:
    """E of each average of Table 1, of all its rows, and of Tables 6, 7, 11 and 12 against uniform routing."""
    rows = paper.table(1).rows
    for temperature in (0, 1):
        for target, method, ends in methods():
            row = only(rows, target=target, method=method, workload="Average", temperature=temperature)
            name = f"E of {method} on {target}, T = {temperature}, if routing were uniform"
            yield farthest(f"eco.uniform.{ends}.t{temperature}", name, [_union(paper, row, 1)])
    groups = {f"eco.uniform.rows.{short}": (1, target) for target, short in TARGETS.items()}
    groups |= {f"eco.uniform.table-{table}": (table, "") for table in (6, 7, 11, 12)}
    for id, (table, target) in groups.items():
        lines = [_union(paper, row, table) for row in paper.table(table).rows if target in ("", row["target"])]
        yield farthest(id, f"E of all rows of Table {table}{' on ' * bool(target)}{target}, if uniform", lines)


def limits(paper: Paper) -> Iterator[Line]:
    """E of every row against n k, and acceptance lengths against gamma and the draft's depth."""
    for table in (1, 4, 6, 7, 9, 11, 12):
        lines = [_union(paper, row, table, "n k") for row in paper.table(table).rows]
        yield farthest(f"eco.limit.table-{table}", f"E of all rows of Table {table} against n k", lines)
    depth = Input("depth", paper.facts["draft_steps"], "setup")
    yield farthest("eco.alpha", "Acceptance lengths against gamma and the draft's depth", [
        derive(
            NAME, "min(gamma, 1 + depth)",
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
            NAME, "3 hidden width bytes / 1e6",
            [Input("hidden", hidden, "published config"), Input("width", width, "published config"),
             Input("bytes", size, why)],
            Input("expert_mb", paper.figures[1]["expert_mb"][target], "Figure 1", 0.01), unit="MB",
            id=f"eco.expert.{TARGETS[target]}", what=f"Bytes of an expert, {target}",
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
                    NAME, "P / cost", [probability, Input("cost", cost, "Figure 3")],
                    Input("score", score, "Figure 3", 0.001 if score < 0.1 else 0.01),
                    subject=f"{name} with a buffer of {len(step['buffer'])}",
                    note="epsilon is taken as 0: the paper prints none",
                )
            )  # fmt: skip
    yield farthest("eco.scores", "Scores of the worked example of Figure 3", lines)


def traffic(paper: Paper) -> Iterator[Line]:
    """HBM reads: layers E expert_mb + resident, the resident part from the baseline's row (Tables 2 and 3)."""
    resident = "GB_base - layers E_base MB / 1000"
    for target, short in TARGETS.items():
        base, (_, chosen, layers) = BASELINES[target], _geometry(paper, target)
        megabytes = Input("MB", paper.figures[1]["expert_mb"][target], "Figure 1", 0.01)
        both = {"base": base, "eco": ECOSPEC}
        e_base, e_eco = (step_cell(paper, target, m, "experts_per_layer", f"E_{n}") for n, m in both.items())
        gb_base, gb_eco = (cell(paper, 2, "read_gb", f"GB_{n}", target=target, method=m) for n, m in both.items())
        known = [layers, megabytes, e_base, gb_base]
        yield derive(
            NAME, f"resident + layers E_eco MB / 1000, resident = {resident}", [*known, e_eco], gb_eco, unit="GB",
            id=f"eco.hbm.read.{short}", what=f"HBM reads of an EcoSpec step from E, {target}",
        )  # fmt: skip
        cut = paper.facts["hbm_reduction"][target]
        yield derive(
            NAME, "layers (E_base - E_eco) MB / 1000", [layers, megabytes, e_base, e_eco],
            Input("GB", cut["gb"], "Table 2, Reduction", 0.1), unit="GB",
            id=f"eco.hbm.cut.{short}", what=f"Reduction of HBM reads from E, {target}",
        )  # fmt: skip
        yield derive(
            NAME, "100 (GB_base - GB_eco) / GB_base", [gb_base, gb_eco],
            Input("percent", cut["percent"], "Table 2, Reduction", 0.1), unit="%",
            id=f"eco.hbm.percent.{short}", what=f"Reduction of HBM reads in percent, {target}",
        )  # fmt: skip
        active = float(str(only(paper.table(13).rows, target=target)["total_active"]).split("/")[1].strip(" B"))
        hidden, width, size, why = SHAPES[target]
        yield derive(
            NAME, resident, known,
            Input("GB", (active - layers.value * chosen.value * 3 * hidden * width / 1e9) * size,
                  f"active parameters less routed ones at {size:g} bytes (Table 13)",
                  (0.1 if active < 10 else 1.0) * size),
            unit="GB", id=f"eco.hbm.resident.{short}", what=f"Resident weights behind Table 2, {target}",
            note=f"bytes a weight as the experts have them ({why})",
        )  # fmt: skip
        spread = "eight GPUs are used; how layers are spread over them is not printed"
        yield derive(
            NAME, "(resident + layers k MB / 1000) / T_AR",
            [*known, chosen, step_cell(paper, target, AR, "step_s", "T_AR")], HBM_PEAK, given={"resident": resident},
            relation=">=", id=f"eco.hbm.rate.ar.{short}", what=f"HBM rate of an AR step, {target}", unit="GB/s",
            note=spread,
        )  # fmt: skip
        yield derive(
            NAME, "GB_base / T_verify", [gb_base, step_cell(paper, target, base, "verify_s", "T_verify")], HBM_PEAK,
            relation=">=", id=f"eco.hbm.rate.{short}", what=f"HBM rate of verification, {base} on {target}",
            unit="GB/s", note=spread,
        )  # fmt: skip
