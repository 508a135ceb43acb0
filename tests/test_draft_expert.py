from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moexp.base.errors import MoexpError
from moexp.target import trained
from moexp.target.draft_expert import HEADER, WEIGHTS, DraftExperts, load_draft_experts, read_header, save_draft_experts

TARGET = "a" * 64


@pytest.fixture
def experts() -> DraftExperts:
    torch.manual_seed(0)
    experts = DraftExperts(16, 8, (1, 3))
    for expert in experts.experts.values():
        expert.down.data.normal_()  # type: ignore[operator]
        expert.scale.data.fill_(0.5)  # type: ignore[operator]
    return experts


@pytest.fixture
def folder(experts: DraftExperts, tmp_path: Path) -> Path:
    save_draft_experts(tmp_path / "drafts", experts, TARGET, {"metrics": {"kl": 0.25}})
    return tmp_path / "drafts"


def test_a_draft_expert_is_a_scaled_swiglu_that_starts_at_zero(experts: DraftExperts):
    x_TH = torch.randn(5, 16)
    assert not DraftExperts(16, 8, (1,)).forward_layer(1, x_TH).any()
    expert = experts.experts["3"]
    gate, up = expert.gate_up[:8], expert.gate_up[8:]  # type: ignore[index]
    wanted = 0.5 * (F.silu(x_TH @ gate.T) * (x_TH @ up.T)) @ expert.down.T  # type: ignore[operator]
    assert torch.allclose(experts.forward_layer(3, x_TH), wanted, atol=1e-6)
    assert not torch.equal(experts.forward_layer(1, x_TH), experts.forward_layer(3, x_TH))
    assert sum(parameter.nbytes for parameter in experts.parameters()) == 2 * 4 * (3 * 8 * 16 + 1)


def test_what_was_saved_is_loaded(experts: DraftExperts, folder: Path):
    loaded = load_draft_experts(folder, TARGET, dtype=torch.float32)
    assert (loaded.hidden, loaded.width, loaded.layers) == (16, 8, (1, 3))
    for name, tensor in experts.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert read_header(folder)["metrics"] == {"kl": 0.25}


def test_draft_experts_of_another_target_are_refused(folder: Path):
    with pytest.raises(MoexpError, match="draft experts of target aaaaaaaaaaaa, but the target is bbbbbbbbbbbb"):
        load_draft_experts(folder, "b" * 64)


def test_damage_is_one_error(folder: Path, tmp_path: Path):
    with pytest.raises(MoexpError, match="no draft-expert checkpoint"):
        load_draft_experts(tmp_path / "nowhere", TARGET)
    weights = folder / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MoexpError, match="damaged weights"):
        load_draft_experts(folder, TARGET)
    weights.unlink()
    with pytest.raises(MoexpError, match="damaged weights"):
        load_draft_experts(folder, TARGET)
    weights.write_bytes(whole)
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | {"width": 9}))
    with pytest.raises(MoexpError, match="damaged weights"):
        load_draft_experts(folder, TARGET)
    (folder / HEADER).write_text(json.dumps(header | {"format": "other"}))
    with pytest.raises(MoexpError, match="unknown format 'other'"):
        load_draft_experts(folder, TARGET)


def test_a_full_disk_leaves_the_old_checkpoint(experts: DraftExperts, folder: Path, monkeypatch):
    before = (folder / WEIGHTS).read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trained, "save_file", full)
    with pytest.raises(MoexpError, match="disk full"):
        save_draft_experts(folder, experts, "c" * 64, {})
    assert (folder / WEIGHTS).read_bytes() == before and read_header(folder)["target"] == TARGET
