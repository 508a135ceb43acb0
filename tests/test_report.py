"""Tables from hand-made records, whose numbers can be worked out on paper."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moexp.base.errors import MoexpError
from moexp.config.recipe import load_recipe
from moexp.metrics import Interval
from moexp.records import RequestRecord, StepRecord
from moexp.tables.core.run import load_measured
from moexp.tables.core.table import Row, Table, View, set_interval, text, text_of, to_csv, to_markdown, write_table
from moexp.tables.draftexpert.data import load_run
from moexp.tables.draftexpert.index import TABLES, build_tables
from moexp.tables.draftexpert.labels import AR, FIXED, FULL, LOSSES, TRUNCATED
from moexp.tables.write import rebuild

PROVENANCE = {
    "command": "moexp bench --recipe pocket",
    "started": "2026-01-02T03:04:05+00:00",
    "seed": 7,
    "git": {"commit": "0123456789abcdef", "dirty": True},
    "versions": {"python": "3.11.9", "torch": "2.13.0", "datasets": None},
    "hardware": {"cpu": "A CPU", "cores": 2, "memory_gib": 24.0, "gpus": []},
}
METRICS = {"acceptance": 0.4, "per_row": [0.2, 0.6], "agreement": 0.5, "kl": 0.7, "router_agreement": 0.8}


def method(name: str, **values: Any) -> dict[str, Any]:
    plain = {"drafter": "draft-expert", "max_draft": 4, "policy": "fixed", "tau": 0.5, "budget": 60, "prefetch": False}
    return {"name": name, **plain, **values}


SETTINGS = {
    "tag": "measured",
    "temperature": 0.0,
    "expert_width": 352,
    "threads": 2,
    "methods": [
        method(AR, drafter="ar"),
        method("top-1", drafter="top-r"),
        method(FIXED),
        method(TRUNCATED, policy="confidence-expansion"),
        method(FULL, policy="confidence-expansion", prefetch=True),
    ],
}


def cycles(
    name: str, request: int, tokens: list[int], per_cycle: int, seconds: float, **values: Any
) -> list[StepRecord]:
    """Cycles that emit `per_cycle` tokens each and take `seconds`, half of it drafting (but for AR)."""
    made = []
    for cycle, begin in enumerate(range(0, len(tokens), per_cycle)):
        emitted = tokens[begin : begin + per_cycle]
        step = StepRecord(
            request=request, cycle=cycle, method=name, drafted=0 if name == AR else 4, accepted=len(emitted) - 1,
            emitted=len(emitted), tokens=emitted, draft_s=0.0 if name == AR else seconds / 2,
            verify_s=seconds if name == AR else seconds / 2, cycle_s=seconds, unique_draft=None if name == AR else 10,
            unique_verify=12, union_layers=2, store={"read_bytes": 1000, "stall_s": 0.01, "prefetched": 0, "used": 0},
        )  # fmt: skip
        made.append(replace(step, **values))
    return made


def save(folder: Path, steps: list[StepRecord], workload: str = "chat", **settings: Any) -> None:
    """Adds one request of one method to a platform's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({**SETTINGS, **settings}))
    (folder / "provenance.json").write_text(json.dumps({"invocations": [PROVENANCE]}))
    tokens = [token for step in steps for token in step.tokens]
    first = steps[0]
    seconds = sum(step.cycle_s for step in steps)
    record = RequestRecord(first.request, workload, first.method, 5, len(tokens), 0.1, seconds, "length", tokens)
    with open(folder / "steps.jsonl", "a") as file:
        file.writelines(json.dumps(asdict(step)) + "\n" for step in steps)
    with open(folder / "requests.jsonl", "a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


TOKENS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]
PREFETCH = {"read_bytes": 500, "stall_s": 0.02, "prefetched": 10, "used": 9, "cancelled": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two workloads of one prompt: AR 0.1 s a token; the full method emits 4 tokens in 0.2 s."""
    folder = tmp_path / "run"
    disk = folder / "local-disk"
    for request, (tokens, workload) in enumerate(zip(TOKENS, ("chat", "math"), strict=True)):
        save(disk, cycles(AR, request, tokens, 1, 0.1), workload)
        save(disk, cycles("top-1", request, tokens, 2, 0.4, unique_draft=10), workload)
        save(disk, cycles(FIXED, request, tokens, 4, 0.4), workload)
        save(disk, cycles(FULL, request, tokens, 4, 0.2, store=PREFETCH), workload)
        save(folder / "resident", cycles("top-1", request, tokens, 2, 0.4, unique_draft=10), workload)
        save(folder / "resident", cycles(FIXED, request, tokens, 4, 0.4, unique_draft=11), workload)
    (disk / "probe.json").write_text(
        json.dumps({"compute_s": 0.02, "bandwidth_bytes_s": [20_000, 25_000, 1e9], "read_bytes": 500, "threads": 8})
    )
    for loss in LOSSES:
        rows = [{"loss": one, "steps": 3, "metrics": METRICS} for one in LOSSES]
        save(folder / "ablation", cycles(loss, 0, TOKENS[0], 4, 0.2, store=PREFETCH), rows=rows)
    target = {"name": "pocket", "top_k": 3, "platforms": ["local-disk", "paced-cg"]}
    (folder / "target.json").write_text(json.dumps(target))
    names = ("top-1", "top-2", "draft-expert")
    (folder / "draft_metrics.json").write_text(json.dumps({"metrics": dict.fromkeys(names, METRICS)}))
    (folder / "recipe.yaml").write_text("")
    return folder


def tables(folder: Path) -> dict[int, Table]:
    return {table.number: table for table in build_tables(folder, samples=50)}


def row(table: Table, **keys: Any) -> Row:
    found = [row for row in table.rows if all(row.get(key) == value for key, value in keys.items())]
    assert len(found) == 1, (keys, found)
    return found[0]


# --- the tables' numbers ---


def test_table_2_has_throughput_speedup_and_byte_bound_by_workload_and_pooled(run: Path):
    table = tables(run)[2]
    ours = {"target": "pocket", "platform": "local-disk", "workload": "mean"}
    ar, full = row(table, method="ar", **ours), row(table, method="draft-expert", **ours)
    assert (ar["tokens_per_s"], full["tokens_per_s"]) == (pytest.approx(10), pytest.approx(20))
    assert full["speedup"] == pytest.approx(2) and full["speedup_lo"] == pytest.approx(2)
    assert ar["speedup"] is None and ar["byte_bound"] is None
    assert full["alpha"] == pytest.approx(4)
    assert full["bytes_per_token"] == pytest.approx(125)
    assert full["byte_bound"] == pytest.approx(4 * 3 / 6)  # alpha k / E, E = 12 / 2
    assert full["byte_bound_share"] == pytest.approx(1)
    assert (full["draft_compute_ms"], full["verify_compute_ms"]) == (pytest.approx(25), pytest.approx(25))  # of 50
    assert "where a token's time goes" in str([view.title for view in table.views])
    assert (full["output"], full["identical"], full["prompts"]) == ("exact", "2/2", 2)
    assert full["settings"] == "K=4 tau=0.5 B=60 prefetch"
    assert row(table, method="draft-expert", platform="local-disk", workload="math")["prompts"] == 1
    # 1000 bytes at the median of 25,000 bytes/s plus 0.02 s of compute, out of 0.1 s
    assert ar["ar_bound_share"] == pytest.approx(0.6)


def test_settings_say_how_much_is_prefetched(run: Path):
    path = run / "local-disk" / "settings.json"
    settings = json.loads(path.read_text())
    for method in settings["methods"]:
        method["prefetch_top"] = 3
    path.write_text(json.dumps(settings))
    full = row(tables(run)[2], method="draft-expert", platform="local-disk", target="pocket", workload="mean")
    assert full["settings"] == "K=4 tau=0.5 B=60 prefetch=3"


def test_table_2_names_the_best_top_r(run: Path):
    for request, tokens in enumerate(TOKENS):
        save(run / "local-disk", cycles("top-2", request, tokens, 2, 0.3), ("chat", "math")[request])
    table = tables(run)[2]
    best = row(table, method="top-r", platform="local-disk", workload="mean")
    assert str(best["settings"]).startswith("top-2")
    assert best["speedup"] == row(table, method="top-2", platform="local-disk", workload="mean")["speedup"]


def test_a_method_with_other_tokens_than_ar_is_called_lossy(run: Path):
    path = run / "local-disk" / "requests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = next(line for line in lines if line["method"] == FULL and line["request"] == 1)
    wrong["tokens"][-1] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    full = row(tables(run)[2], method="draft-expert", platform="local-disk", workload="mean")
    assert (full["output"], full["identical"]) == ("lossy", "1/2")


def test_table_3_counts_whole_blocks_only_and_compares_draft_cost(run: Path):
    short = cycles(FIXED, 2, [1, 2], 2, 9.0, drafted=1, unique_draft=1)
    save(run / "resident", short)
    save(run / "local-disk", short)
    ours = row(tables(run)[3], platform="local-disk", drafter="draft-expert", target="pocket")
    assert (ours["unique_draft"], ours["acceptance"]) == (pytest.approx(11), pytest.approx(3 / 4))
    assert (ours["acceptance_ctx"], ours["blocks"]) == (pytest.approx(0.4), 4)
    assert ours["acceptance_ctx_lo"] == pytest.approx(0.2) and ours["acceptance_ctx_hi"] == pytest.approx(0.6)
    assert ours["cost"] == pytest.approx(1)  # 0.2 s for 4 drafts, as top-1 takes
    assert row(tables(run)[3], platform="local-disk", drafter="top-1", target="pocket")["acceptance"] == pytest.approx(
        0.25
    )


def test_table_3_leaves_empty_what_a_platform_did_not_run(run: Path):
    top_2 = row(tables(run)[3], platform="local-disk", drafter="top-2", target="pocket")
    assert top_2["acceptance_ctx"] == pytest.approx(0.4)
    assert top_2["cost"] is None and top_2["acceptance"] is None
    cells = next(csv.DictReader(io.StringIO(to_csv(tables(run)[3].columns, [top_2]))))
    assert (cells["cost"], cells["acceptance"]) == ("", "")
    assert not [r for r in tables(run)[3].rows if r["drafter"] == "top-3" and r["tag"] != "paper"]


def test_table_4_has_cost_hit_waste_and_stall(run: Path):
    table = tables(run)[4]
    ours = {"target": "pocket", "platform": "local-disk"}
    full, fixed = row(table, policy="confidence-expansion+prefetch", **ours), row(table, policy="fixed", **ours)
    assert (full["verify_cost"], fixed["verify_cost"]) == (pytest.approx(1), pytest.approx(2))
    assert (full["cycle_cost"], fixed["cycle_cost"]) == (pytest.approx(2), pytest.approx(4))
    assert (full["prefetch_hit"], full["prefetch_waste"]) == (pytest.approx(0.9), pytest.approx(0.1))
    assert full["prefetch_cancelled"] == pytest.approx(0.1)
    assert full["stall_s"] == pytest.approx(0.02 / 4)
    assert fixed["prefetch_hit"] is None and fixed["prefetch_waste"] is None  # nothing was prefetched: not 0
    assert not [r for r in table.rows if r["policy"] == "confidence-expansion" and r["tag"] == "measured"]


def test_table_5_joins_held_out_metrics_and_prefetch_hits(run: Path):
    table = tables(run)[5]
    ours = [r for r in table.rows if r["target"] == "pocket"]
    assert [r["loss"] for r in ours] == list(LOSSES) == [r["loss"] for r in table.rows if r["tag"] == "paper"][:4]
    assert all((r["kl"], r["agreement"], r["router_agreement"]) == (0.7, 0.5, 0.8) for r in ours)
    assert all(r["prefetch_hit"] == pytest.approx(0.9) for r in ours)


def test_the_papers_rows_stand_in_every_table_with_its_tag(run: Path):
    found = tables(run)
    assert list(found) == list(TABLES) == [2, 3, 4, 5, 6]
    for number, rows in ((2, 12), (3, 16), (4, 12), (5, 8), (6, 6)):
        assert sum(r["tag"] == "paper" for r in found[number].rows) == rows
    assert row(found[4], policy="fixed", platform="CG", target="DeepSeek-V2-Lite")["verify_cost"] == 2.35
    assert {r["tag"] for n in (2, 3, 4, 5) for r in found[n].rows} == {"measured", "paper"}


def test_every_row_fits_its_columns_and_the_named_columns_are_there(run: Path):
    for table in tables(run).values():
        to_csv(table.columns, table.rows)
    columns = {name for table in tables(run).values() for name in table.columns}
    for name in [
        "acceptance",
        "acceptance_ctx",
        "alpha",
        "unique_draft",
        "cost",
        "verify_cost",
        "prefetch_hit",
        "prefetch_waste",
    ]:
        assert {name, f"{name}_lo", f"{name}_hi"} <= columns
    assert {
        "agreement",
        "tokens_per_s_lo",
        "speedup_hi",
        "target",
        "platform",
        "method",
        "drafter",
        "policy",
    } <= columns


def test_a_run_without_records_gives_the_papers_rows_and_says_so(tmp_path: Path):
    for table in build_tables(tmp_path):
        assert all(r["tag"] == "paper" for r in table.rows) and table.rows
        if table.number != 6:
            assert "Not measured yet" in to_markdown(table)


# --- reading records ---


def test_a_torn_last_line_is_left_out(run: Path):
    disk = run / "local-disk"
    whole = load_measured(disk)
    for name in ("steps.jsonl", "requests.jsonl"):
        with open(disk / name, "a") as file:
            file.write('{"request": 99, "cyc')
    torn = load_measured(disk)
    assert whole is not None and torn is not None and torn.arms == whole.arms


def test_missing_steps_are_an_error_and_not_a_faster_method(run: Path):
    path = run / "local-disk" / "steps.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(MoexpError, match="missing or doubled"):
        load_run(run)


def test_report_without_a_run_says_what_to_run(tmp_path: Path):
    with pytest.raises(MoexpError, match="moexp bench --recipe tiny"):
        rebuild(load_recipe("tiny"), results=tmp_path)
    with pytest.raises(MoexpError, match="moexp bench --recipe tiny --paper ecospec"):
        rebuild(load_recipe("tiny"), "ecospec", results=tmp_path)


def test_report_imports_no_torch():
    script = (
        "import sys, moexp.tables.core.table, moexp.tables.draftexpert.index, moexp.tables.ecospec.index; "
        "sys.exit(sorted(m for m in ('torch', 'transformers') if m in sys.modules) != [])"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent).returncode == 0


def test_the_same_records_give_the_same_bytes(run: Path, tmp_path: Path):
    recipe = load_recipe("tiny")
    files = rebuild(recipe, out=run, results=tmp_path / "a")
    again = rebuild(recipe, out=run, results=tmp_path / "b")
    kinds = [file.suffix for file in files]
    assert kinds.count(".md") == 5 and kinds.count(".png") == kinds.count(".svg") == 3
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]


# --- rendering ---


def test_csv_keeps_missing_apart_from_zero():
    rows: list[Row] = [{"a": None, "b": 0.0, "c": "x,y"}, {"a": 1 / 3, "c": True}]
    assert to_csv(["a", "b", "c"], rows) == 'a,b,c\n,0,"x,y"\n0.333333,,True\n'
    with pytest.raises(AssertionError, match="d"):
        to_csv(["a"], [{"d": 1}])


def test_a_cell_holds_value_and_interval():
    row: Row = {}
    set_interval(row, "x", Interval(1.234, 1.0, 1.5, 3))
    set_interval(row, "y", Interval(2.0, None, None, 1))
    set_interval(row, "z", None)
    assert (text_of(row, "x"), text_of(row, "y"), text_of(row, "z")) == ("1.23 (1.00..1.50)", "2.00", "-")
    assert (text(0.0), text(None), text(3)) == ("0.00", "-", "3")


def test_markdown_is_aligned_and_has_its_provenance(run: Path, tmp_path: Path):
    found = tables(run)
    for table in found.values():
        content = to_markdown(table)
        for block in content.split("\n\n"):
            widths = {len(line) for line in block.splitlines() if line.startswith("|")}
            assert len(widths) <= 1
            assert max(widths, default=0) <= 80
    content = to_markdown(found[2])
    for part in ("`moexp bench --recipe pocket`", "0123456789ab (dirty)", "2026-01-02", "A CPU", "2 cores", "seed 7"):
        assert part in content.replace("\n", " ")
    assert "local-disk (experts 352 wide)" in content.replace("\n", " ") and "datasets" not in content
    paths = write_table(tmp_path / "out", found[2])
    assert [path.name for path in paths] == ["table_2.csv", "table_2.md"]


def test_a_pipe_in_a_cell_does_not_end_it():
    table = Table(1, "t", ["a"], views=[View("", ["a"], [["x|y"]])])
    assert "x\\|y" in to_markdown(table)
