"""DraftExpert's Table 2 from raw records: decode throughput with its byte bound, and where a token's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from moexp import metrics
from moexp.tables.core.rows import Arms, sameness, steps_of, throughput, with_ends
from moexp.tables.core.run import NEW_TOKENS, Measured
from moexp.tables.core.table import Columns, Row, Table, View, paper_table, shown, text, view_of
from moexp.tables.draftexpert.data import Run, present
from moexp.tables.draftexpert.labels import AR, FULL, SHORT, TOP_1_FULL, row_method, settings_text, short
from moexp.tables.draftexpert.parts import add_paper, add_simulated, paper_view, say_missing, simulated_rows

COLUMNS = [
    "target", "platform", "method", "workload", "settings", "tag", "output", "identical", "prompts",
    *with_ends("tokens_per_s", "speedup", "alpha", "bytes_per_token", "byte_bound"),
    "byte_bound_share", "ar_bound_share", *(f"{part}_ms" for part in metrics.TIME_PARTS),
]  # fmt: skip

NOTES = (
    "`mean` pools all prompts of all workloads: tokens (counted by ids) over seconds. Prefill is not in it. "
    "Intervals are 95% bootstrap intervals over prompts, a prompt's arms drawn together.",
    "`top-r` is the best of all top-r methods that ran: r = 1, 2, 3 with K = 4 (no truncation, no prefetch), and "
    f"`{TOP_1_FULL}` (`{SHORT[TOP_1_FULL]}`): shared + top-1 with the truncation and prefetch of the full method.",
    "Byte bound: alpha k / E, the speedup if loading the verified block's experts were all that costs; E is "
    "`unique_verify` over MoE layers. Loads for drafting and wasted prefetches count against the method.",
    "Where a token's time goes: `wait` is stalls for experts, while drafting and while verifying; computing while "
    "prefetches arrive is no waiting.",
    "`output` is exact where every prompt's token ids equal those of AR in the same run (T = 0).",
)

MEAN = "mean"
"""Stands for all workloads together."""


def table_2(run: Run) -> Table:
    """Decode throughput: AR, the best of top-r, and the full method, by workload; with bytes and their bound.

    Paper: DraftExpert Table 2.
    """
    table = paper_table("draftexpert", 2, COLUMNS, *NOTES)
    for platform in run.platforms:
        _add_platform(table, run, platform)
    add_simulated(table, _simulated(run), "method", ["tokens_per_s", "speedup"])
    add_paper(table, workload=MEAN)
    columns = {name: name for name in ("target", "platform", "method")}
    table.views.append(paper_view(table, {**columns, "tokens/s": "tokens_per_s", "speedup": "speedup"}))
    say_missing(table, run.platforms)
    return table


def _add_platform(table: Table, run: Run, platform: Measured) -> None:
    table.sources.append(platform)
    workloads = list(dict.fromkeys(arm.request.workload for arms in platform.arms.values() for arm in arms.values()))
    by_method: dict[str, dict[str, Row]] = {}
    for method in present(platform):
        by_method[method] = {name: _row(run, platform, method, name) for name in [*workloads, MEAN]}
        table.rows += by_method[method].values()
    if AR in by_method:
        by_method[AR][MEAN]["ar_bound_share"] = _ar_bound(platform)[0]
    best = max(
        (method for method in by_method if method.startswith("top-")),
        key=lambda method: by_method[method][MEAN]["tokens_per_s"] or 0.0,
        default=None,
    )
    if best is not None:
        for row in by_method[best].values():
            table.rows.append({**row, "method": "top-r", "settings": f"{best}: {row['settings']}"})
    table.views += _views(f"{platform.name} ({platform.tag})", by_method, workloads, best)
    table.notes += _notes(platform)
    full = [by_method[FULL][name]["speedup"] for name in workloads] if FULL in by_method else []
    speedups = [value for value in full if isinstance(value, float)]
    if speedups:
        table.notes.append(
            f"{platform.name}: the arithmetic mean of the full method's speedups on the {len(speedups)} workloads is "
            f"{statistics.mean(speedups):.2f}."
        )


def _row(run: Run, platform: Measured, method: str, workload: str) -> Row:
    arms: Arms = {n: arm for n, arm in platform.arms[method].items() if workload in (arm.request.workload, MEAN)}
    ar = platform.arms.get(AR, {})
    row = run.head(platform) | {"method": row_method(method), "workload": workload, "prompts": len(arms)}
    row["settings"] = settings_text(platform, method)
    row |= sameness(arms, ar, platform.settings.get("temperature") or 0.0)
    row |= throughput(run, arms, None if method == AR else ar, run.target["top_k"])
    speedup, limit = row["speedup"], row["byte_bound"]
    row["byte_bound_share"] = speedup / limit if isinstance(speedup, float) and isinstance(limit, float) else None
    return row


def _views(
    title: str, by_method: Mapping[str, Mapping[str, Row]], workloads: Sequence[str], best: str | None
) -> list[View]:
    """Of one platform: speed, bytes, time, and speed by workload."""
    rows = [by_workload[MEAN] for by_workload in by_method.values()]
    method: Columns = {"method": lambda row: short(row["method"])}
    speed: Columns = {"tokens/s": shown("tokens_per_s", ends=True), "speedup": shown("speedup", ends=True)}
    moved: Columns = {
        "MB/token": shown("bytes_per_token", 1, factor=1e-6), "alpha k/E": shown("byte_bound", ends=True),
        "speedup": "speedup", "share of bound": "byte_bound_share",
    }  # fmt: skip
    times = [[short(row["method"]), *_time_cells(row)] for row in rows]
    by_workload = [[short(m), *(text(by_method[m][w]["speedup"]) for w in workloads)] for m in by_method if m != AR]
    named = f"{title}, mean of the workloads" + (f"; best top-r: {best}" if best else "")
    return [
        view_of(named, rows, {**method, **speed, "alpha": "alpha", "output": "output"}),
        view_of(f"{title}, bytes", rows, {**method, **moved}),
        View(
            f"{title}, where a token's time goes, ms",
            ["method", "draft", "wait", "verify", "wait", "rest", "sum"],
            times,
        ),
        View(f"{title}, speedup by workload", ["method", *workloads], by_workload),
    ]


def _time_cells(row: Row) -> list[str]:
    parts = [row[f"{part}_ms"] for part in metrics.TIME_PARTS]
    known = [part for part in parts if isinstance(part, float)]
    return [text(part, 1) for part in [*parts, sum(known) if known else None]]


def _ar_bound(platform: Measured) -> tuple[float | None, str]:
    """Share of AR's bound (bytes over the probed bandwidth, plus resident compute) that it reached, and in words."""
    steps = steps_of(platform.arms.get(AR, {}))
    token_s, moved = metrics.token_time(steps).value, metrics.bytes_per_token(steps).value
    samples, compute_s = platform.probe.get("bandwidth_bytes_s"), platform.probe.get("compute_s")
    if not token_s or not moved or not samples or compute_s is None:
        return None, ""
    bandwidth = statistics.median(samples)
    share = (moved / bandwidth + compute_s) / token_s
    words = (
        f"{platform.name}: AR takes {1000 * token_s:.1f} ms a token. Its bound is {moved / 1e6:.3g} MB at "
        f"{bandwidth / 1e9:.3g} GB/s ({1000 * moved / bandwidth:.1f} ms) plus the compute of a one-token step with "
        f"every expert resident ({1000 * compute_s:.1f} ms), one after the other; AR reaches {share:.2f} of it (above "
        f"1: the two overlap). Loading adds {token_s / compute_s - 1:.2f} times the compute"
    )
    return share, words


def _notes(platform: Measured) -> list[str]:
    probe, settings, notes = platform.probe, platform.settings, []
    _, words = _ar_bound(platform)
    if words and "read_bytes" in probe:
        words += (
            f". The bandwidth is the median of {len(probe['bandwidth_bytes_s'])} O_DIRECT probes taken between the "
            f"prompts of this run, {probe['read_bytes'] / 1e6:.2f} MB a read, {probe['threads']} threads"
        )
    if words:
        notes.append(words + ".")
    limit, tokens = settings.get("max_new_tokens"), settings.get(NEW_TOKENS)
    if limit and tokens and tokens < limit:
        notes.append(
            f"{platform.name}: {tokens} new tokens a prompt of the {limit} asked for, so that the run takes about "
            f"{settings['minutes']:g} minutes (`bench.part_minutes`)."
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


def _simulated(run: Run) -> list[Row]:
    """Each method over all prompts."""
    return [
        shared | {
            "method": row_method(label), "workload": MEAN, "settings": arm.settings, "tokens_per_s": arm.rate,
            "speedup": None if label == AR else arm.rate / one.arms[AR].rate, "alpha": arm.alpha,
            "bytes_per_token": arm.counters.read_bytes / arm.tokens,
        }
        for one, shared in simulated_rows(run)
        for label, arm in one.arms.items()
    ]  # fmt: skip
