from __future__ import annotations

import pytest

from moexp.papers import load_paper
from moexp.sim.traffic import step_bytes

# MoE layers and megabytes an expert as the paper has them; the resident gigabytes are the constant that fits both rows.
MODELS = {
    "Qwen3-235B-A22B": (94, 37.75e6, 15.2e9),
    "GPT-OSS-120B": (36, 12.45e6, 0.8e9),
    "DeepSeek-V3.1": (58, 44.04e6, 17.1e9),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_papers_gigabytes_follow_from_its_own_expert_counts(model: str):
    paper = load_paper("ecospec")
    experts = {row["method"]: row["experts_per_layer"] for row in paper.table(3).rows if row["target"] == model}
    reported = {row["method"]: row["read_gb"] for row in paper.table(2).rows if row["target"] == model}
    assert len(reported) == 2
    layers, expert_bytes, resident = MODELS[model]
    for method, read_gb in reported.items():
        assert step_bytes(layers, experts[method], expert_bytes, resident) / 1e9 == pytest.approx(read_gb, abs=0.2)
