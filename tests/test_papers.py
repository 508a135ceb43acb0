from __future__ import annotations

import math
from statistics import mean

import pytest

from moexp import metrics
from moexp.base.errors import MoexpError
from moexp.papers import PAPERS, load_paper

DS, ML = "DeepSeek-V2-Lite", "Moonlight-16B-A3B"


def cell(rows, column, **keys):
    """The one value of `column` in the row with these keys."""
    (row,) = [row for row in rows if all(row[key] == value for key, value in keys.items())]
    return row[column]


@pytest.mark.parametrize("name", PAPERS)
def test_every_table_is_flat_and_no_cell_is_empty(name: str):
    paper = load_paper(name)
    assert paper.title and paper.arxiv
    for table in paper.tables.values():
        assert table.title and table.rows
        for row in table.rows:
            assert all(isinstance(value, str | int | float) and value != "" for value in row.values()), row


def test_an_unknown_paper_or_table_names_what_there_is():
    with pytest.raises(MoexpError, match="draftexpert, ecospec"):
        load_paper("eagle")
    with pytest.raises(MoexpError, match="valid: 1, 2, 3"):
        load_paper("draftexpert").table(99)


def test_draftexperts_speedups_follow_from_its_throughputs():
    paper = load_paper("draftexpert")
    rows = paper.table(2).rows
    speedups = []
    for target, platform in [(DS, "CG"), (DS, "MN"), (ML, "CG"), (ML, "MN")]:
        keys = {"target": target, "platform": platform}
        ar = cell(rows, "tokens_per_s", method="ar", **keys)
        full = cell(rows, "tokens_per_s", method="draft-expert", **keys)
        speedups.append(cell(rows, "speedup", method="draft-expert", **keys))
        assert full / ar == pytest.approx(speedups[-1], abs=0.0075)
        assert cell(rows, "tokens_per_s", method="top-r", **keys) < ar
    assert mean(speedups) == pytest.approx(paper.facts["mean_speedup"], abs=0.005)


def test_draftexperts_table_3_and_5_are_two_metrics():
    tables = load_paper("draftexpert").tables
    acceptance = cell(tables[3].rows, "acceptance", target=DS, platform="CG", drafter="top-1")
    agreement = cell(tables[5].rows, "agreement", target=DS, loss="top-1 (untrained)")
    assert metrics.expected_acceptance(agreement) == pytest.approx(acceptance, abs=0.01)
    full = cell(tables[3].rows, "acceptance", target=DS, platform="CG", drafter="draft-expert")
    trained = cell(tables[5].rows, "agreement", target=DS, loss="+ router")
    assert full - metrics.expected_acceptance(trained) > 0.1


def test_draftexperts_hit_and_waste_add_up_and_table_5_ends_where_table_4_is():
    tables = load_paper("draftexpert").tables
    for row in tables[4].rows:
        if "prefetch_hit" in row:
            assert row["prefetch_hit"] + row["prefetch_waste"] == pytest.approx(1)
            assert cell(tables[5].rows, "prefetch_hit", target=row["target"], loss="+ router") == row["prefetch_hit"]


def test_draftexperts_costs_with_fixed_k_imply_the_full_systems_speedup():
    paper = load_paper("draftexpert")
    keys = {"target": DS, "platform": "CG"}
    draft = cell(paper.table(3).rows, "cost", drafter="draft-expert", **keys)
    verify = cell(paper.table(4).rows, "verify_cost", policy="fixed", **keys)
    acceptance = cell(paper.table(3).rows, "acceptance", drafter="draft-expert", **keys)
    top_1_speed = cell(paper.figures[2]["rows"], "draft_speedup", drafter="top-1")
    implied = metrics.cycle_speedup(4 * acceptance + 1, 4, draft / top_1_speed, verify)
    assert implied == pytest.approx(cell(paper.table(2).rows, "speedup", method="draft-expert", **keys), abs=0.01)


def test_ecospecs_reads_follow_from_layers_experts_and_megabytes():
    paper = load_paper("ecospec")
    megabytes = paper.figures[1]["expert_mb"]
    constant_gb = {"Qwen3-235B-A22B": 15.2, "GPT-OSS-120B": 0.8, "DeepSeek-V3.1": 17.1}
    for row in paper.table(2).rows:
        target = row["target"]
        layers = cell(paper.table(13).rows, "moe_layers", target=target)
        experts = cell(paper.table(3).rows, "experts_per_layer", target=target, method=row["method"])
        expert_gb = layers * experts * megabytes[target] / 1000
        assert expert_gb + constant_gb[target] == pytest.approx(row["read_gb"], abs=0.2)


def test_ecospecs_table_3_does_not_give_its_table_1():
    rows = load_paper("ecospec").table(3).rows
    for target, method, implied in [
        ("Qwen3-235B-A22B", "EAGLE-3", 1.41),
        ("Qwen3-235B-A22B", "EcoSpec", 1.53),
        ("GPT-OSS-120B", "EAGLE-3", 1.03),
        ("GPT-OSS-120B", "EcoSpec", 1.17),
    ]:
        ar_s = cell(rows, "step_s", target=target, method="AR")
        step_s = cell(rows, "step_s", target=target, method=method)
        alpha = cell(rows, "alpha", target=target, method=method)
        assert alpha * ar_s / step_s == pytest.approx(implied, abs=0.01)
        assert abs(implied - cell(rows, "speedup", target=target, method=method)) > 0.1


def test_ecospecs_averages_are_means_of_their_rows_up_to_rounding():
    paper = load_paper("ecospec")
    for number in (6, 7, 11, 12):
        rows = paper.table(number).rows
        settings = {tuple(v for k, v in row.items() if k in ("method", "batch_size", "budget")) for row in rows}
        assert len(rows) == 8 * len(settings)
    rows = paper.table(1).rows
    for row in rows:
        if row["workload"] == "Average":
            same = [
                r["experts_per_layer"]
                for r in rows
                if r["workload"] != "Average" and all(r[key] == row[key] for key in ("target", "temperature", "method"))
            ]
            assert len(same) == 7
            assert math.isclose(mean(same), row["experts_per_layer"], abs_tol=0.3), row
