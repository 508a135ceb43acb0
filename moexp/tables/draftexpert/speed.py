"""DraftExpert's tables 2 and 4 from raw records: throughput with its byte bound, and the cost of verification."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from moexp import metrics
from moexp.metrics import Interval, Ratio
from moexp.papers import Paper
from moexp.tables.core.rows import Arms, sameness, throughput, with_ends
from moexp.tables.core.run import NEW_TOKENS, ArmRecords, Measured
from moexp.tables.core.table import Row, Table, View, set_interval, text, text_of
from moexp.tables.draftexpert.data import Run, add_paper, paper_by_platform, paper_view, present, say_missing
from moexp.tables.draftexpert.labels import AR, FIXED, FULL, SHORT, TOP_1_FULL, TRUNCATED, settings_text
from moexp.tables.draftexpert.simulated import NOTE, beside_paper, throughput_rows, verify_rows


def table_2(run: Run, paper: Paper) -> Table:
    """Decode throughput: AR, the best of top-r, and the full method, by workload; with bytes and their bound."""
    table = Table(
        2,
        paper.table(2).title,
        ["target", "platform", "method", "workload", "settings", "tag", "output", "identical", "prompts"]
        + with_ends("tokens_per_s", "speedup", "alpha", "bytes_per_token", "byte_bound")
        + ["byte_bound_share", "ar_bound_share", *(f"{part}_ms" for part in metrics.TIME_PARTS)],
    )
    table.notes += [
        "`mean` pools all prompts of all workloads: tokens (counted by ids) over seconds. Prefill is not in it. "
        "Intervals are 95% bootstrap intervals over prompts, a prompt's arms drawn together.",
        "`top-r` is the best of all top-r methods that ran: r = 1, 2, 3 with K = 4 (no truncation, no prefetch), and "
        f"`{TOP_1_FULL}` (`{SHORT[TOP_1_FULL]}`): shared + top-1 with the truncation and prefetch of the full method.",
        "Byte bound: alpha k / E, the speedup if loading the verified block's experts were all that costs; E is "
        "`unique_verify` over MoE layers. Loads for drafting and wasted prefetches count against the method.",
        "Where a token's time goes: `wait` is stalls for experts, while drafting and while verifying; computing while "
        "prefetches arrive is no waiting.",
        "`output` is exact where every prompt's token ids equal those of AR in the same run (T = 0).",
    ]
    for platform in run.platforms:
        _table_2_platform(table, run, platform)
    simulated = throughput_rows(run)
    if simulated:
        table.rows += simulated
        table.views.append(beside_paper(2, simulated, ["tokens_per_s", "speedup"]))
        table.notes.append(NOTE)
    add_paper(table, paper, workload="mean")
    header = ["target", "platform", "method", "tokens/s", "speedup"]
    table.views.append(paper_view(table, header, ["target", "platform", "method", "tokens_per_s", "speedup"]))
    say_missing(table, run.platforms)
    return table


def _table_2_platform(table: Table, run: Run, platform: Measured) -> None:
    table.sources.append(platform)
    ar = platform.arms.get(AR, {})
    top_k = run.target["top_k"]
    workloads = list(dict.fromkeys(arm.request.workload for arms in platform.arms.values() for arm in arms.values()))
    by_method: dict[str, dict[str, Row]] = {}
    for method in present(platform):
        arms = platform.arms[method]
        rows = by_method[method] = {}
        for workload in [*workloads, "mean"]:
            mine = {n: arm for n, arm in arms.items() if workload in (arm.request.workload, "mean")}
            rows[workload] = _throughput_row(run, platform, method, workload, mine, ar, top_k)
        if method == AR:
            rows["mean"]["ar_bound_share"] = _ar_bound(platform)[0]
    best = max(
        (m for m in by_method if m.startswith("top-")),
        key=lambda m: by_method[m]["mean"]["tokens_per_s"] or 0.0,
        default=None,
    )
    for rows in by_method.values():
        table.rows += rows.values()
    if best is not None:
        table.rows += [
            {**row, "method": "top-r", "settings": f"{best}: {row['settings']}"} for row in by_method[best].values()
        ]
    shown = {method: by_method[method]["mean"] for method in by_method}
    table.views += [
        View(
            f"{platform.name} ({platform.tag}), mean of the workloads" + (f"; best top-r: {best}" if best else ""),
            ["method", "tokens/s", "speedup", "alpha", "output"],
            [
                [
                    SHORT.get(m, m),
                    text_of(r, "tokens_per_s"),
                    text_of(r, "speedup"),
                    text(r["alpha"]),
                    text(r["output"]),
                ]
                for m, r in shown.items()
            ],
        ),
        View(
            f"{platform.name} ({platform.tag}), bytes",
            ["method", "MB/token", "alpha k/E", "speedup", "share of bound"],
            [
                [
                    SHORT.get(m, m),
                    text(None if r["bytes_per_token"] is None else float(r["bytes_per_token"]) / 1e6, 1),
                    text_of(r, "byte_bound"),
                    text(r["speedup"]),
                    text(r["byte_bound_share"]),
                ]
                for m, r in shown.items()
            ],
        ),
        View(
            f"{platform.name} ({platform.tag}), where a token's time goes, ms",
            ["method", "draft", "wait", "verify", "wait", "rest", "sum"],
            [[SHORT.get(m, m), *_time_cells(r)] for m, r in shown.items()],
        ),
        View(
            f"{platform.name} ({platform.tag}), speedup by workload",
            ["method", *workloads],
            [[SHORT.get(m, m), *(text(by_method[m][w]["speedup"]) for w in workloads)] for m in shown if m != AR],
        ),
    ]
    table.notes += _platform_notes(platform)
    full = [by_method[FULL][w]["speedup"] for w in workloads] if FULL in by_method else []
    speedups = [value for value in full if isinstance(value, float)]
    if speedups:
        table.notes.append(
            f"{platform.name}: the arithmetic mean of the full method's speedups on the {len(speedups)} workloads is "
            f"{statistics.mean(speedups):.2f}."
        )


def _throughput_row(run: Run, platform: Measured, method: str, workload: str, arms: Arms, ar: Arms, top_k: int) -> Row:
    row: Row = {
        "target": run.target["name"],
        "platform": platform.name,
        "method": "draft-expert" if method == FULL else method,
        "workload": workload,
        "settings": settings_text(platform, method),
        "tag": platform.tag,
        "prompts": len(arms),
    }
    row |= sameness(arms, ar, platform.settings.get("temperature") or 0.0)
    row |= throughput(run, arms, None if method == AR else ar, top_k)
    speedup, limit = row["speedup"], row["byte_bound"]
    row["byte_bound_share"] = speedup / limit if isinstance(speedup, float) and isinstance(limit, float) else None
    return row


def _time_cells(row: Row) -> list[str]:
    parts = [row[f"{part}_ms"] for part in metrics.TIME_PARTS]
    known = [part for part in parts if isinstance(part, float)]
    return [text(part, 1) for part in [*parts, sum(known) if known else None]]


def _ar_bound(platform: Measured) -> tuple[float | None, str]:
    """Share of AR's bound (bytes over the probed bandwidth, plus resident compute) that it reached, and in words."""
    steps = [step for arm in platform.arms.get(AR, {}).values() for step in arm.steps]
    took, moved = metrics.token_time(steps).value, metrics.bytes_per_token(steps).value
    samples, compute_s = platform.probe.get("bandwidth_bytes_s"), platform.probe.get("compute_s")
    if not took or not moved or not samples or compute_s is None:
        return None, ""
    bandwidth = statistics.median(samples)
    share = (moved / bandwidth + compute_s) / took
    words = (
        f"{platform.name}: AR takes {1000 * took:.1f} ms a token. Its bound is {moved / 1e6:.3g} MB at "
        f"{bandwidth / 1e9:.3g} GB/s ({1000 * moved / bandwidth:.1f} ms) plus the compute of a one-token step with "
        f"every expert resident ({1000 * compute_s:.1f} ms), one after the other; AR reaches {share:.2f} of it (above "
        f"1: the two overlap). Loading adds {took / compute_s - 1:.2f} times the compute"
    )
    return share, words


def _platform_notes(platform: Measured) -> list[str]:
    probe = platform.probe
    notes = []
    _, words = _ar_bound(platform)
    if words:
        how = ""
        if "read_bytes" in probe:
            how = (
                f". The bandwidth is the median of {len(probe['bandwidth_bytes_s'])} O_DIRECT probes taken between the "
                f"prompts of this run, {probe['read_bytes'] / 1e6:.2f} MB a read, {probe['threads']} threads"
            )
        notes.append(words + how + ".")
    asked, got = platform.settings.get("max_new_tokens"), platform.settings.get(NEW_TOKENS)
    if asked and got and got < asked:
        notes.append(
            f"{platform.name}: {got} new tokens a prompt of the {asked} asked for, so that the run takes about "
            f"{platform.settings['minutes']:g} minutes (`bench.part_minutes`)."
        )
    if probe.get("direct") is False:
        notes.append(f"{platform.name}: O_DIRECT was refused, so reads went through the page cache.")
    if "derivation" in probe:
        notes.append(
            f"{platform.name} is emulated: experts in host memory behind a link of "
            f"{probe['bandwidth_bytes_s'][0] / 1e9:.3g} GB/s = {probe['ar_bytes_per_token'] / 1e6:.3g} MB / "
            f"{1000 * probe['load_s']:.1f} ms (L). {probe['derivation']}; here c = {1000 * probe['compute_s']:.1f} ms "
            f"and x = {1000 * probe['exposed_s']:.1f} ms."
        )
    return notes


def table_4(run: Run, paper: Paper) -> Table:
    """Verification cost over a one-token AR step, by truncation and prefetch."""
    table = Table(
        4,
        paper.table(4).title,
        ["target", "platform", "policy", "settings", "tag", "prompts"]
        + with_ends("verify_cost", "prefetch_hit", "prefetch_waste", "stall_s", "cycle_cost", "alpha")
        + ["prefetch_cancelled"],
    )
    policies = {
        "ar": AR,
        "fixed": FIXED,
        "confidence-expansion": TRUNCATED,
        "confidence-expansion+prefetch": FULL,
    }
    for platform in run.platforms:
        rows = [
            _verify_row(run, platform, policy, method) for policy, method in policies.items() if method in platform.arms
        ]
        table.rows += rows
        table.sources.append(platform)
        table.views.append(
            View(
                f"{platform.name} ({platform.tag})",
                ["policy", "verify_cost", "hit", "waste", "stall ms", "cycle_cost"],
                [
                    [
                        SHORT.get(str(row["policy"]), str(row["policy"])),
                        text_of(row, "verify_cost"),
                        text(row["prefetch_hit"]),
                        text(row["prefetch_waste"]),
                        text(None if row["stall_s"] is None else 1000 * float(row["stall_s"]), 1),
                        text(row["cycle_cost"]),
                    ]
                    for row in rows
                ],
            )
        )
    simulated = verify_rows(run)
    if simulated:
        table.rows += simulated
        table.views.append(beside_paper(4, simulated, ["verify_cost", "prefetch_hit"]))
        table.notes.append(NOTE)
    add_paper(table, paper)
    shared, header = ["prefetch_hit", "prefetch_waste"], ["target", "policy", "hit", "waste"]
    table.views.append(paper_by_platform(table, ["target", "policy"], shared, "verify_cost", header))
    say_missing(table, run.platforms)
    table.notes += [
        "`verify_cost` is the time of verifying a block over that of a one-token AR step, same store, same run.",
        "Experts that arrive while drafting, prefetched or not, are not loaded by the verifier any more: prefetch "
        "moves cost out of verification, and some of it into drafting. `cycle_cost` is the whole cycle, drafting "
        "included, over the same AR step; `stall_s` (a token emitted; in ms above) counts all waiting for experts.",
        "`prefetch_hit` is used / prefetched and `prefetch_waste` 1 - hit; of the prefetched, `prefetch_cancelled` "
        "were dropped before their read began and cost no bytes.",
        "`fixed` has the paper's K = 4, the other policies the recipe's K (`settings` in the CSV).",
    ]
    return table


def _verify_row(run: Run, platform: Measured, policy: str, method: str) -> Row:
    arms, ar = platform.arms[method], platform.arms.get(AR, {})
    row: Row = {
        "target": run.target["name"], "platform": platform.name, "policy": policy,
        "settings": settings_text(platform, method), "tag": platform.tag, "prompts": len(arms),
    }  # fmt: skip

    def over(of: Callable[[list[Any]], Ratio]) -> Interval:
        return run.over(arms.values(), lambda arm: of(arm.steps))

    def token_s(arm: ArmRecords) -> Ratio:
        return metrics.token_time(arm.steps)

    def cycle_s(arm: ArmRecords) -> Ratio:
        return metrics.pooled(Ratio(step.cycle_s, 1) for step in arm.steps)

    set_interval(row, "verify_cost", run.against(arms, lambda arm: metrics.verify_time(arm.steps), ar, token_s))
    set_interval(row, "prefetch_hit", over(metrics.prefetch_hit))
    set_interval(row, "prefetch_waste", over(metrics.prefetch_waste))
    set_interval(row, "stall_s", over(metrics.stall_per_token))
    set_interval(row, "cycle_cost", run.against(arms, cycle_s, ar, token_s))
    set_interval(row, "alpha", over(metrics.alpha))
    row["prefetch_cancelled"] = metrics.pooled(
        Ratio(step.store["cancelled"], step.store["prefetched"])
        for arm in arms.values()
        for step in arm.steps
        if "cancelled" in step.store and "prefetched" in step.store
    ).value
    return row
