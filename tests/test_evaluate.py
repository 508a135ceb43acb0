from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from moexp.base.errors import MoexpError
from moexp.bench import row_invariance
from moexp.bench.exactness import Gate, Outcome, RowLog
from moexp.bench.gate import (
    FRESH,
    already_passed,
    gate_identity,
    gate_methods,
    gate_prompts,
    run_gate,
)
from moexp.bench.row_invariance import row_invariant
from moexp.config import locations
from moexp.config.recipe import Recipe, load_recipe
from moexp.learn.target.build import build_target
from moexp.runtime.decoding.decode import LogitsDigest
from moexp.runtime.decoding.method import Method
from moexp.runtime.selectors.confidence_expansion import POLICIES
from moexp.runtime.verifiers.chain import Verdict, verify_greedy
from moexp.tables.gate import gate_lines, gate_rows, gate_table, write_gate
from moexp.target.draft_expert import DraftExperts, save_draft_experts
from moexp.target.load import load_target, target_identity
from moexp.target.opening import find_target

pytestmark = pytest.mark.e2e

SMALL = ["eval.prompts=2", "eval.max_new_tokens=8", "eval.dtypes=[float32]"]


def tiny(*changes: str, drafts: bool = True) -> Recipe:
    """The tiny recipe with its target built and random draft experts."""
    recipe = load_recipe("tiny", [*SMALL, *changes])
    build_target(recipe, locations.target_folder(recipe), cache=Path("unused"), provenance={})
    if drafts:
        torch.manual_seed(0)
        experts = DraftExperts(recipe.target.tiny.hidden_size, 8, (1, 2))
        identity = target_identity(find_target(recipe))
        save_draft_experts(locations.draft_folder(recipe), experts, identity, {"metrics": {}})
    return recipe


def log(tokens: list[int], rows: list[str] | None = None, gaps: list[float] | None = None) -> RowLog:
    """A request with these tokens; equal strings stand for equal logits rows."""
    made = RowLog(tokens, LogitsDigest(), gaps or [1.0] * len(tokens))
    made.digest.rows = [name.encode() for name in rows or [str(token) for token in tokens]]
    return made


def outcome(ar: RowLog, made: RowLog) -> Outcome:
    result = Outcome("float32", "disk", "plain", "m")
    result.add("p", ar, made)
    return result


# --- comparing ---


def test_equal_requests_are_tier_1_on_any_backend():
    result = outcome(log([1, 2, 3]), log([1, 2, 3]))
    assert (result.rows, result.differing, result.tokens, result.first) == (3, 0, 3, None)
    assert result.tier(True, 0.01) == result.tier(False, 0.01) == 1


def test_other_bits_fail_where_the_backend_is_row_invariant_and_are_tier_2_where_it_is_not():
    result = outcome(log([1, 2, 3]), log([1, 2, 3], ["1", "x", "3"]))
    assert (result.rows, result.differing) == (3, 1)
    assert result.first is not None and result.first.position == 1 and not result.apart
    assert result.tier(True, 0.01) is None and result.tier(False, 0.01) == 2


@pytest.mark.parametrize(("gap", "tier"), [(0.001, 2), (0.01, None), (0.5, None)])
def test_other_tokens_are_allowed_below_the_gap_only(gap: float, tier: int | None):
    ar = log([1, 2, 3, 4], gaps=[1.0, 1.0, gap, 1.0])
    result = outcome(ar, log([1, 2, 9, 7], ["1", "2", "x", "y"]))
    assert (result.rows, result.differing) == (3, 1)  # behind the difference nothing is comparable
    assert [(place.position, place.gap) for place in result.apart] == [(2, gap)]
    assert result.tier(False, 0.01) == tier and result.tier(True, 0.01) is None


def test_other_tokens_from_the_same_logits_are_a_mistake_whatever_the_gap():
    result = outcome(log([1, 2], gaps=[0.0, 0.0]), log([1, 9], ["1", "2"]))
    assert result.wrong == 1 and result.tier(False, 1.0) is None


@pytest.mark.parametrize(("wanted", "found"), [([1, 2, 3], [1, 2]), ([1, 2], [1, 2, 3])])
def test_an_answer_that_ends_elsewhere_is_a_mistake(wanted: list[int], found: list[int]):
    result = outcome(log(wanted, gaps=[0.0] * len(wanted)), log(found))
    assert result.wrong == 1 and result.tier(False, 1.0) is None
    assert result.apart[0].position == 2 and result.apart[0].gap is None


def test_one_bad_prompt_among_good_ones_fails():
    result = Outcome("float32", "disk", "plain", "m")
    near = log([1, 2], gaps=[1.0, 0.001])
    result.add("a", log([1, 2]), log([1, 2]))
    result.add("b", near, log([1, 5], ["1", "x"]))
    assert result.tier(False, 0.01) == 2
    result.add("c", log([1, 2]), log([1, 5], ["1", "x"]))
    assert result.tier(False, 0.01) is None
    assert result.first is not None and result.first.prompt == "b"
    gate = Gate((outcome(log([1]), log([1])), result), {"float32": False}, 0.01)
    assert not gate.passed and "1 of 2 methods differ" in gate_lines(gate)[-1]


def test_a_row_log_keeps_digest_and_gap():
    kept = RowLog()
    for rows in ([[1.0, 4.0, 2.5], [0.0, 0.0, -1.0]], [[1.0, 4.0, 2.5]]):
        cycle: Any = SimpleNamespace(logits_BV=torch.tensor(rows))
        kept(cycle)
    assert kept.gaps == [1.5, 0.0, 1.5]
    assert kept.digest.rows[0] == kept.digest.rows[2] != kept.digest.rows[1]


# --- what is tested ---


def test_every_drafter_meets_every_policy_and_prefetch_on_and_off():
    methods = gate_methods(load_recipe("pocket"), True, 6)
    assert len({method.label for method in methods}) == len(methods)
    assert methods[0].drafter == "target"
    for drafter, r in (("top-r", 1), ("top-r", 2), ("top-r", 3), ("draft-expert", 1)):
        mine = [method for method in methods if (method.drafter, method.r) == (drafter, r)]
        assert {method.policy for method in mine} == set(POLICIES)
        assert {method.prefetch for method in mine} == {True, False}
    drafted = [method for method in methods if method.drafter == "draft-expert" and method.tree is None]
    assert len(drafted) == 6
    trees = [method for method in methods if method.tree is not None]
    assert {method.drafter for method in trees} == {"top-r", "draft-expert"}
    assert not any(method.drafter == "draft-expert" for method in gate_methods(load_recipe("pocket"), False, 6))
    assert max(method.r for method in gate_methods(load_recipe("tiny"), False, 2)) == 2


def test_prompts_come_from_tuning_and_every_workload_in_turn():
    recipe = load_recipe("pocket", ["eval.prompts=7"])
    prompts = gate_prompts(recipe)
    assert len(prompts) == 7 and len({prompt.id for prompt in prompts}) == 7
    assert len({prompt.id.rsplit("-", 1)[0] for prompt in prompts[:6]}) == 6
    assert len(gate_prompts(recipe, everything=True)) > 100


# --- the gate on the tiny target ---


def test_the_gate_passes_in_both_dtypes_on_every_store(monkeypatch):
    recipe = tiny("eval.dtypes=[bfloat16, float32]", "eval.prompts=1", "target.pad_expert_width=48")
    gate = run_gate(recipe)
    assert gate.passed and gate.invariant == {"bfloat16": True, "float32": True}
    places = {(result.dtype, result.store, result.target) for result in gate.outcomes}
    # fp32 weights on disk cannot be served as bf16: host memory takes the disk's place
    assert places == {
        (dtype, store, target)
        for dtype, main in (("bfloat16", "host"), ("float32", "disk"))
        for store, target in ((main, "plain"), ("resident", "plain"), (main, "padded"))
    }
    methods = {result.method for result in gate.outcomes}
    assert FRESH in methods and "target K4" in methods and "draft-expert K4 confidence-expansion prefetch" in methods
    assert all(result.rows == result.tokens == 8 * result.prompts for result in gate.outcomes)


def test_a_verifier_that_accepts_a_wrong_token_fails_the_gate(monkeypatch):
    plain = verify_greedy

    def generous(draft: Any, target: Any) -> Verdict:
        return Verdict.of_chain(len(draft), target[-1]) if len(draft) > 1 else plain(draft, target)

    recipe = tiny(drafts=False)
    monkeypatch.setattr("moexp.runtime.verifiers.chain.verify_greedy", generous)
    gate = run_gate(recipe)
    failed = {result.method for result in gate.outcomes if gate.tier(result) is None}
    assert not gate.passed and FRESH not in failed and "top-1 K4" in failed and "target K4" not in failed


def test_a_cache_that_is_not_rolled_back_fails_the_gate(monkeypatch):
    from moexp.runtime.engine.engine import Engine

    plain = Engine.rollback

    def forgetful(self: Engine, length: int) -> None:
        """Leaves rejected rows in the cache now and then."""
        if self.length - length not in (3, 4):
            plain(self, length)

    recipe = tiny(drafts=False)
    monkeypatch.setattr(Engine, "rollback", forgetful)
    assert not run_gate(recipe).passed


def test_tokens_asks_for_so_many_in_all():
    recipe = tiny(drafts=False)
    gate = run_gate(recipe, tokens=250)
    assert sum(result.tokens for result in gate.outcomes) >= 250
    assert len({result.prompts for result in gate.outcomes if result.store == "disk"}) == 1


def test_the_target_must_be_built():
    with pytest.raises(MoexpError, match="target is not built"):
        run_gate(load_recipe("tiny"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_probe_finds_this_backend_row_invariant_and_another_not(dtype: str, monkeypatch):
    recipe = tiny(drafts=False)
    target = load_target(find_target(recipe), dtype=getattr(torch, dtype))
    assert row_invariant(target)

    def uneven(weight: torch.Tensor, *, rows: int, pack: bool) -> Any:
        def linear(x_TH: torch.Tensor) -> torch.Tensor:
            return x_TH @ weight.T + 1e-2 * torch.arange(len(x_TH))[:, None].to(x_TH.dtype)

        return linear

    monkeypatch.setattr(row_invariance, "make_linear", uneven)
    assert not row_invariant(target)


# --- results ---


def test_results_say_what_was_compared_and_a_passed_gate_is_not_repeated(tmp_path: Path):
    recipe = tiny(drafts=False)
    good = outcome(log([1, 2]), log([1, 2]))
    bad = outcome(log([1, 2], gaps=[1.0, 0.25]), log([1, 3], ["1", "x"]))
    identity = gate_identity(recipe)
    assert not already_passed(tmp_path, identity)
    write_gate(Gate((good, bad), {"float32": True}, 0.01), tmp_path, identity, {"seed": 0})
    assert not already_passed(tmp_path, identity)
    rows = list(csv.DictReader((tmp_path / "eval.csv").open()))
    assert [(row["tier"], row["first_mismatch"], row["gap"]) for row in rows] == [
        ("1", "", ""),
        ("FAILED", "p:1", "0.25"),
    ]
    values = json.loads((tmp_path / "eval.json").read_text())
    assert values["passed"] is False and [result["tier"] for result in values["outcomes"]] == [1, None]

    write_gate(Gate((good,), {"float32": True}, 0.01), tmp_path, identity, {"seed": 0})
    assert already_passed(tmp_path, identity)
    other = tiny("eval.prompts=3", drafts=False)
    assert not already_passed(tmp_path, gate_identity(other))
    assert gate_identity(tiny()) != identity  # draft experts were trained since


def test_the_table_fits_a_terminal_and_the_verdict_is_in_words(capsys):
    long = Outcome("bfloat16", "disk", "plain", "draft-expert K4 confidence-expansion prefetch")
    long.add("summary-12", log([1, 2], gaps=[1.0, 0.001]), log([1, 3], ["1", "x"]))
    gate = Gate((long,), {"bfloat16": False}, 0.01)
    Console(width=80).print(gate_table(gate))
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    lines = gate_lines(gate)
    assert "not row-invariant" in lines[0]
    assert lines[-1] == "near-tie tier: 2 tokens, 1 requests part from AR, all at near ties"
    exact = Gate((outcome(log([1, 2]), log([1, 2])),), {"float32": True}, 0.01)
    assert gate_lines(exact) == ["exact: 2 tokens, 2 logits rows, every bit as AR has it"]
    assert gate_rows(exact)[0]["tag"] == "measured"


# --- long ---


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ten_thousand_tokens_are_exact(dtype: str):
    recipe = tiny(f"eval.dtypes=[{dtype}]", "eval.max_new_tokens=48", "decode.budget=6")
    gate = run_gate(recipe, tokens=10_000)
    assert sum(result.tokens for result in gate.outcomes) >= 10_000
    assert gate.passed and gate.invariant == {dtype: True}


def test_the_own_method_of_a_recipe_without_draft_experts_is_replaced():
    recipe = tiny(drafts=False)
    resident = [result.method for result in run_gate(recipe).outcomes if result.store == "resident"]
    assert resident == [FRESH, Method("top-r", prefetch=True).label]
