"""Where a target is decoded, and the process's settings."""

from __future__ import annotations

import pytest
import torch

from moexp.base.devices import pick_device, prepare
from moexp.base.errors import MoexpError
from moexp.config.recipe import load_recipe


@pytest.mark.parametrize(
    "wanted, store, there, device",
    [
        ("auto", "disk", True, "cpu"),
        ("auto", "host", True, "cuda"),
        ("auto", "resident", False, "cpu"),
        ("cpu", "host", True, "cpu"),
        ("cuda", "resident", True, "cuda"),
    ],
)
def test_the_device_follows_recipe_store_and_machine(monkeypatch, wanted, store, there, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device(wanted, store) == device


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MoexpError, match="no CUDA device.*valid: cpu, auto"):
        pick_device("cuda", "host")


def test_a_gpu_does_not_take_experts_from_disk(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MoexpError, match=r"device.*valid: store.kind host or resident"):
        pick_device("cuda", "disk")


def test_a_target_is_opened_on_the_recipes_device(tiny_folder, monkeypatch):
    from moexp.runtime.opening import opened_store
    from moexp.target.opening import open_target

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = load_recipe("tiny", ["device=cuda", "store.kind=host", f"paths.target={tiny_folder()}"])
    with pytest.raises(MoexpError, match="no CUDA device"):
        open_target(recipe)
    recipe = load_recipe("tiny", ["store.kind=host", f"paths.target={tiny_folder()}"])
    target = open_target(recipe)
    assert target.device.type == "cpu"
    with opened_store(target, recipe.store) as store:
        assert store is not None


def test_threads_are_those_asked_for():
    before = torch.get_num_threads()
    try:
        assert prepare(1) == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
