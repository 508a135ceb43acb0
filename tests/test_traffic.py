from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moexp.papers import load_paper
from moexp.sim.traffic import TrafficModel

# MoE layers and megabytes an expert as the paper has them; the resident gigabytes are the constant that fits both rows.
MODELS = {
    "Qwen3-235B-A22B": TrafficModel(94, 37.75e6, 15.2e9),
    "GPT-OSS-120B": TrafficModel(36, 12.45e6, 0.8e9),
    "DeepSeek-V3.1": TrafficModel(58, 44.04e6, 17.1e9),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_papers_gigabytes_follow_from_its_own_expert_counts(model: str):
    paper = load_paper("ecospec")
    experts = {row["method"]: row["experts_per_layer"] for row in paper.table(3).rows if row["target"] == model}
    reported = {row["method"]: row["read_gb"] for row in paper.table(2).rows if row["target"] == model}
    assert len(reported) == 2
    for method, read_gb in reported.items():
        assert MODELS[model].step_bytes(experts[method]) / 1e9 == pytest.approx(read_gb, abs=0.2)


@given(experts=st.floats(0, 300), layers=st.integers(1, 100))
def test_bytes_and_experts_are_each_others_inverse(experts: float, layers: int):
    model = TrafficModel(layers, 1e6, 5e8)
    assert model.experts_per_layer(model.step_bytes(experts)) == pytest.approx(experts, abs=1e-3)
