"""EcoSpec's tables from the raw records of a run folder, beside the paper's own figures. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moexp import metrics
from moexp.papers import Paper, load_paper
from moexp.sim.traffic import TrafficModel
from moexp.tables.core.rows import with_ends
from moexp.tables.core.table import Row, Table, View
from moexp.tables.core.tags import PAPER
from moexp.tables.ecospec.data import (
    AR,
    CHEAPEST,
    ECOSPEC,
    EPSILON,
    GLOBAL,
    GTO,
    ORACLE,
    EcoRun,
    batch_cycles,
    batch_rate,
    bytes_moved,
    load_eco_runs,
    parts_of,
    predict_time,
)
from moexp.tables.ecospec.rows import (
    AVERAGE,
    MEASURED_COLUMNS,
    NOTES,
    PAPER_COLUMNS,
    TABLE_1_NAMES,
    add_paper,
    cells,
    counterpart,
    measured_row,
    merged,
    paper_beside,
    renamed,
    workloads_of,
)


def table_1(run: EcoRun, paper: Paper) -> Table:
    """Speedup, acceptance length and E by method, temperature and workload, in long form.

    Where the paper has a target of the same geometry, its figures stand in the same row.
    """
    columns = ["target", "method", "temperature", "workload", "prompts", "tag", "uniform"]
    notes = [NOTES[0].replace("experts_per_layer", "E"), NOTES[1]]
    table = Table(1, paper.table(1).title, columns + with_ends(*MEASURED_COLUMNS), notes=notes)
    model = counterpart(run.target, paper)
    for temperature, found in run.by_temperature.items():
        table.sources.append(found)
        shown = []
        for method in found.arms:
            if parts_of(method)[1] not in ("confidence", ECOSPEC):
                continue
            rows = [measured_row(run, found, method, w, temperature) for w in [*workloads_of(found), AVERAGE]]
            table.rows += [row | paper_beside(row, paper, model) for row in rows]
            shown.append(cells(rows[-1], ["method", "speedup", "alpha", "experts_per_layer", "uniform"]))
        header = ["method", "speedup", "alpha", "E", "uniform"]
        table.views.append(View(f"{run.platform} ({found.tag}), T = {temperature:g}, all workloads", header, shown))
    add_paper(table, paper, lambda row: row["workload"] == "Average")
    table.columns = [*table.columns, *PAPER_COLUMNS]
    if model is not None and table.sources:
        table.notes.append(f"`paper_*` in the CSV: {model}, which has as many routed experts and the same top-k.")
    return renamed(table, TABLE_1_NAMES)


def table_2(run: EcoRun, paper: Paper) -> Table:
    """Bytes a verification step reads: by the traffic model from E, and those that the store really moved."""
    table = Table(
        2, paper.table(2).title, ["target", "method", "tag", "experts_per_layer", "model_gb", "moved_gb", "read_gb"],
        notes=[
            "`model_gb` = resident weights + MoE layers x E x bytes an expert, E measured; `moved_gb` is what the disk "
            "store read a cycle, for drafting and verification (resident weights stay in memory). The paper's "
            "`read_gb` follows from its own E by the same formula."
        ],
    )  # fmt: skip
    found = run.by_temperature.get(0.0)
    if found is not None:
        table.sources.append(found)
        model = TrafficModel(
            int(run.target["moe_layers"]), float(run.target["expert_bytes"]), float(run.target["resident_bytes"])
        )
        shown = []
        for method, arms in found.arms.items():
            experts = metrics.pooled(metrics.experts_per_layer(arm.steps) for arm in arms.values()).value
            moved = metrics.pooled(map(bytes_moved, arms.values())).value
            row: Row = {
                "target": run.target.get("name"), "method": method, "tag": found.tag, "experts_per_layer": experts,
                "model_gb": None if experts is None else model.step_bytes(experts) / 1e9,
                "moved_gb": None if moved is None else moved / 1e9,
            }  # fmt: skip
            table.rows.append(row)
            shown.append(cells(row, ["method", "experts_per_layer", "model_gb", "moved_gb"]))
        table.views.append(View(f"{run.platform} ({found.tag})", ["method", "E", "model GB", "moved GB"], shown))
    add_paper(table, paper)
    return table


def table_3(run: EcoRun, paper: Paper) -> Table:
    """Where a step's time goes."""
    seconds = ["predictor_s", "draft_s", "verify_s", "step_s"]
    columns = ["target", "method", "tag", *seconds, "experts_per_layer", "alpha", *with_ends("speedup")]
    table = Table(3, paper.table(3).title, columns, notes=["Of AR, `step_s` is the time a token. " + NOTES[1]])
    found = run.by_temperature.get(0.0)
    if found is not None:
        table.sources.append(found)
        shown = []
        for method, arms in found.arms.items():
            if parts_of(method)[1] not in ("confidence", ECOSPEC, GLOBAL):
                continue
            row = measured_row(run, found, method, AVERAGE, 0.0)
            steps = [step for arm in arms.values() for step in arm.steps]
            row = {key: value for key, value in row.items() if key in columns} | {
                "predictor_s": metrics.pooled(map(predict_time, arms.values())).value,
                "draft_s": None if method == AR else metrics.draft_time(steps).value,
                "verify_s": None if method == AR else metrics.verify_time(steps).value,
                "step_s": metrics.pooled(metrics.Ratio(step.cycle_s, 1) for step in steps).value,
            }
            table.rows.append(row)
            shown.append(cells(row, ["method", *seconds, "alpha", "speedup"], digits=3))
        header = ["method", "predict s", "draft s", "verify s", "step s", "alpha", "speedup"]
        table.views.append(View(f"{run.platform} ({found.tag}), T = 0", header, shown))
    add_paper(table, paper)
    return table


def table_4(run: EcoRun, paper: Paper) -> Table:
    """Static global cost against marginal cost, of the same trees."""
    table = _selections(run, paper, 4, ("confidence", GLOBAL, ECOSPEC, EPSILON), "strategy")
    epsilon = run.target.get("epsilon")
    table.notes.append(f"`EcoSpec` takes epsilon {epsilon} in P / (cost + epsilon), `epsilon x` the value x.")
    return table


def table_5(run: EcoRun, paper: Paper) -> Table:
    """A drafter trained for its trees (GTO), without and with selection by marginal cost."""
    columns = ["target", "method", "temperature", "workload", "prompts", "tag", "uniform"]
    table = Table(5, paper.table(5).title, columns + with_ends(*MEASURED_COLUMNS), notes=list(NOTES))
    found = run.by_temperature.get(0.0)
    if found is not None and GTO in found.arms:
        table.sources.append(found)
        shown = []
        for method in found.arms:
            if parts_of(method)[0] == GTO and parts_of(method)[1] in ("confidence", ECOSPEC):
                rows = [measured_row(run, found, method, w, 0.0) for w in [*workloads_of(found), AVERAGE]]
                table.rows += rows
                shown += [cells(row, ["method", "workload", "speedup", "alpha", "experts_per_layer"]) for row in rows]
        header = ["method", "workload", "speedup", "alpha", "E"]
        table.views.append(View(f"{run.platform} ({found.tag}), T = 0", header, shown))
    add_paper(table, paper)
    return table


def table_6(run: EcoRun, paper: Paper) -> Table:
    """Batch size: speed against AR at the same batch size, and the union over the batch."""
    return _batches(run, paper, 6, ["speedup", "experts_per_layer"], ["speedup", "E"])


def table_8(run: EcoRun, paper: Paper) -> Table:
    """rho: the time of an AR step over that of a verification step, by batch size."""
    return _batches(run, paper, 8, ["rho", "speedup"], ["rho", "speedup"])


def table_7(run: EcoRun, paper: Paper) -> Table:
    """Table 6 of the paper's other target: ours is one target a recipe, so its rows are the same."""
    return _batches(run, paper, 7, ["speedup", "experts_per_layer"], ["speedup", "E"])


def _batches(run: EcoRun, paper: Paper, number: int, names: list[str], heads: list[str]) -> Table:
    columns = ["target", "method", "batch_size", "tag", "tokens_per_s", *names]
    notes = [
        "A batch's requests run in lockstep and load the union of their experts once; `speedup` is tokens of all "
        "requests over the seconds of the batch, against AR at the same batch size. One batch of each size: no "
        "intervals."
    ]
    table = Table(number, paper.table(number).title, columns, notes=notes)
    shown = []
    for size, found in sorted(run.by_batch.items()):
        table.sources.append(found)
        ar = list(found.arms.get(AR, {}).values())
        ar_step = metrics.pooled(metrics.Ratio(step.verify_s, 1) for step in batch_cycles(ar))
        for method, arms in found.arms.items():
            mine = list(arms.values())
            cycles = batch_cycles(mine)
            verify = metrics.pooled(metrics.Ratio(step.verify_s, 1) for step in cycles)
            values = {
                "speedup": metrics.quotient(batch_rate(mine), batch_rate(ar)),
                "experts_per_layer": metrics.experts_per_layer(cycles).value,
                "rho": metrics.quotient(ar_step, verify),
            }
            row: Row = {
                "target": run.target.get("name"), "method": method, "batch_size": size, "tag": found.tag,
                "tokens_per_s": batch_rate(mine).value, **{name: values[name] for name in names},
            }  # fmt: skip
            table.rows.append(row)
            shown.append(cells(row, ["batch_size", "method", "tokens_per_s", *names]))
    if shown:
        table.views.append(View(f"{run.platform} (measured), T = 0", ["batch", "method", "tokens/s", *heads], shown))
    add_paper(table, paper, lambda row: row.get("workload", "Average") == "Average")
    return table


def table_9(run: EcoRun, paper: Paper) -> Table:
    """How much the predictor's accuracy matters: checkpoints on the way, the last, and the oracle."""
    columns = ["target", "method", "predictor", "overlap", "tag", "uniform", *with_ends(*MEASURED_COLUMNS)]
    notes = ["`overlap` is the mean top-k overlap of predicted and routed experts over verified nodes.", NOTES[0]]
    table = Table(9, paper.table(9).title, columns, notes=notes)
    found = run.by_temperature.get(0.0)
    if found is not None:
        table.sources.append(found)
        shown = []
        swept = {parts_of(method)[0] for method in found.arms if parts_of(method)[1] == ORACLE}
        for method, arms in found.arms.items():
            drafter, strategy = parts_of(method)
            if drafter not in swept or not strategy.startswith((ECOSPEC, ORACLE)):
                continue
            row = measured_row(run, found, method, AVERAGE, 0.0)
            row = {name: value for name, value in row.items() if name in columns}
            level = strategy.removeprefix(ECOSPEC).strip() or "converged"
            steps = [step for arm in arms.values() for step in arm.steps]
            row |= {"predictor": level, "overlap": metrics.router_agreement(steps).value}
            if strategy == ORACLE:
                row |= dict.fromkeys(with_ends("speedup"))
            table.rows.append(row)
            shown.append(cells(row, ["predictor", "overlap", "speedup", "alpha", "experts_per_layer"]))
        header = ["predictor", "overlap", "speedup", "alpha", "E"]
        table.views.append(View(f"{run.platform} ({found.tag}), T = 0", header, shown))
    add_paper(table, paper)
    return table


def table_10(run: EcoRun, paper: Paper) -> Table:
    """The target's own expert sets against the learned predictor's, under the same rule."""
    table = _selections(run, paper, 10, ("confidence", ORACLE, ECOSPEC, CHEAPEST), "predictor")
    table.notes.append(
        "`oracle` picks by the target's own routing; `cheapest` takes, of all prefix-closed choices of as many nodes, "
        "the one with the fewest experts by that routing, whatever its probability: no selection from these trees "
        "has a lower E."
    )
    return table


def _selections(run: EcoRun, paper: Paper, number: int, strategies: tuple[str, ...], key: str) -> Table:
    columns = ["target", "method", key, "tag", "uniform", "verify_s", *with_ends(*MEASURED_COLUMNS)]
    table = Table(number, paper.table(number).title, columns, notes=[NOTES[0]])
    found = run.by_temperature.get(0.0)
    if found is not None:
        table.sources.append(found)
        shown = []
        compared = {parts_of(method)[0] for method in found.arms if parts_of(method)[1] in (GLOBAL, ORACLE)}
        for method, arms in found.arms.items():
            drafter, strategy = parts_of(method)
            if drafter not in compared or not (
                strategy in strategies or _is_epsilon(strategy) and EPSILON in strategies
            ):
                continue
            row = measured_row(run, found, method, AVERAGE, 0.0)
            row = {name: value for name, value in row.items() if name in columns}
            row[key] = strategy
            row["verify_s"] = metrics.verify_time([step for arm in arms.values() for step in arm.steps]).value
            if strategy in (
                ORACLE,
                CHEAPEST,
            ):  # their expert sets come from running the target: no method, and no speed
                for name in with_ends("speedup"):
                    row[name] = None
            table.rows.append(row)
            shown.append(cells(row, ["method", "speedup", "alpha", "experts_per_layer", "verify_s"], digits=3))
        header = ["method", "speedup", "alpha", "E", "verify s"]
        table.views.append(View(f"{run.platform} ({found.tag}), T = 0", header, shown))
    add_paper(table, paper)
    return table


def _is_epsilon(strategy: str) -> bool:
    return strategy.split()[0] == EPSILON


def table_11(run: EcoRun, paper: Paper) -> Table:
    """The verification budget gamma."""
    return _budgets(run, paper, 11, [AVERAGE])


def table_12(run: EcoRun, paper: Paper) -> Table:
    """Table 11 of the paper's other target; here by workload."""
    found = run.by_temperature.get(0.0)
    return _budgets(run, paper, 12, [] if found is None else workloads_of(found))


def _budgets(run: EcoRun, paper: Paper, number: int, workloads: list[str]) -> Table:
    columns = ["target", "method", "budget", "temperature", "workload", "prompts", "tag", "uniform"]
    table = Table(number, paper.table(number).title, columns + with_ends(*MEASURED_COLUMNS), notes=list(NOTES))
    shown = []
    others = [found for gamma, found in run.by_gamma.items() if gamma != run.target.get("gamma")]
    swept = {method for found in others for method in found.arms}
    for gamma, found in sorted(run.by_gamma.items()):
        table.sources.append(found)
        for method in found.arms:
            if method == AR or method not in swept:
                continue
            for workload in workloads:
                row = measured_row(run, found, method, workload, 0.0) | {"budget": gamma}
                table.rows.append(row)
                shown.append(cells(row, ["budget", "workload", "method", "speedup", "alpha", "experts_per_layer"]))
    if shown:
        table.views.append(
            View(f"{run.platform} (measured), T = 0", ["gamma", "workload", "method", "speedup", "alpha", "E"], shown)
        )
    add_paper(table, paper, lambda row: row["workload"] == "Average")
    return table


def table_13(run: EcoRun, paper: Paper) -> Table:
    """The targets' geometry."""
    columns = [
        "target", "tag", "blocks", "moe_layers", "dense_layers", "experts", "top_k", "max_context", "total_active",
    ]  # fmt: skip
    table = Table(13, paper.table(13).title, columns)
    if run.target:
        target = run.target
        table.rows.append({
            "target": target["name"], "tag": "measured", "blocks": target["layers"], "moe_layers": target["moe_layers"],
            "dense_layers": target["layers"] - target["moe_layers"], "top_k": target["top_k"],
            "experts": f"{target['num_experts']} routed + {target['num_shared']} shared",
            "max_context": str(target["max_positions"]),
        })  # fmt: skip
    for row in paper.table(13).rows:
        table.rows.append({**row, "tag": PAPER})
    shown = [cells(row, ["target", "blocks", "moe_layers", "experts", "top_k"]) for row in table.rows]
    table.views.append(View("", ["target", "blocks", "MoE layers", "experts", "top-k"], shown))
    return table


TABLES: dict[int, Callable[[EcoRun, Paper], Table]] = {
    1: table_1, 2: table_2, 3: table_3, 4: table_4, 5: table_5, 6: table_6, 7: table_7, 8: table_8, 9: table_9,
    10: table_10, 11: table_11, 12: table_12, 13: table_13,
}  # fmt: skip


def build_tables(folder: Path, samples: int = 2000) -> list[Table]:
    """The tables of what a run folder holds on all platforms, the paper's rows always among them."""
    runs, paper = load_eco_runs(folder, samples), load_paper("ecospec")
    return [merged([(run.platform, make(run, paper)) for run in runs]) for make in TABLES.values()]
