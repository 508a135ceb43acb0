from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moexp.base.errors import MoexpError
from moexp.cli.generate import TokenStream, experts_loaded, generate, printable
from moexp.config import locations
from moexp.config.recipe import Recipe, load_recipe
from moexp.learn.target.build import build_target
from moexp.records import StepRecord
from moexp.target.draft_expert import DraftExperts, save_draft_experts
from moexp.target.load import target_identity
from moexp.target.tiny import byte_tokenizer

pytestmark = pytest.mark.e2e

TEXT = "What is 2 + 2? Grüße 🙂"
BYTES = byte_tokenizer()


def tiny(*changes: str) -> Recipe:
    """The tiny recipe with its target built and random draft experts, on a store from memory."""
    recipe = load_recipe("tiny", ["store.kind=host", *changes])
    folder = build_target(recipe, locations.target_folder(recipe), cache=Path("unused"), provenance={})
    experts = DraftExperts(recipe.target.tiny.hidden_size, 8, (1, 2))
    save_draft_experts(locations.draft_folder(recipe), experts, target_identity(folder), {"metrics": {}})
    return recipe


def shown(recipe: Recipe, *, terminal: bool = False, **options: Any) -> tuple[Any, str]:
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=terminal, width=80, color_system="standard" if terminal else None)
    return generate(recipe, TEXT, console, **options), sink.getvalue()


# --- text from tokens ---


def pieces(ids: list[int], tokenizer: Any = BYTES) -> list[str]:
    stream = TokenStream(tokenizer)
    found = [stream.push(token, False) for token in ids] + [stream.flush()]
    return [piece.text for piece in found if piece is not None]


@given(st.lists(st.integers(0, 255), max_size=24))
def test_the_pieces_joined_are_the_text_of_all_tokens(ids: list[int]):
    assert "".join(pieces(ids)) == BYTES.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=12))
def test_no_character_is_ever_cut(text: str):
    made = pieces(BYTES.encode(text, add_special_tokens=False))
    assert "".join(made) == text
    if "\ufffd" not in text:
        assert len(made) == len(text)  # each as soon as it is whole


def test_a_tokenizer_that_writes_a_token_by_what_stands_before_it():
    class Spaced:
        """Puts a blank before every word but the first, as sentencepiece does."""

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return " ".join("abc"[token] for token in ids)

    assert pieces([0, 1, 2], Spaced()) == ["a", " b", " c"]


def test_a_piece_belongs_to_the_token_that_completed_it():
    stream = TokenStream(BYTES)
    ids = BYTES.encode("é!", add_special_tokens=False)
    found = [stream.push(token, drafted) for token, drafted in zip(ids, (True, False, True), strict=True)]
    assert found[0] is None
    assert [(piece.text, piece.drafted) for piece in found[1:] if piece] == [("é", False), ("!", True)]


def test_special_tokens_are_not_shown():
    ids = BYTES.encode("a", add_special_tokens=False)
    assert pieces([*ids, BYTES.eos_token_id, *ids]) == ["a", "a"]


def test_a_model_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\x07\n\tü🙂") == "a\ufffd[2Jb\ufffd\n\tü🙂"


# --- a request ---


@pytest.mark.parametrize("method", ["draft-expert", "top-r", "target"])
def test_the_answer_is_streamed_and_is_ars(method: str):
    recipe = tiny(f"decode.drafter={method}")
    result, output = shown(recipe)
    assert result.identical is True
    assert "\x1b" not in output and "accepted draft tokens" not in output  # not a terminal
    answer = str(BYTES.decode(result.arm.request.tokens, skip_special_tokens=True))
    assert output.startswith(answer)
    assert "output identical to AR's: 16 tokens, compared by id" in output
    assert "speedup over AR: " in output and "x (measured, one request)" in output
    for row in ("acceptance", "alpha", "experts loaded a token", "tokens/s"):
        assert row in output
    assert all(len(line) <= 80 for line in output.removeprefix(answer).splitlines())
    if method == "target":
        assert all(step.accepted == step.drafted for step in result.arm.steps)


def test_on_a_terminal_drafted_and_target_tokens_have_different_colours():
    result, output = shown(tiny("decode.drafter=target"), terminal=True)
    legend, rest = output.split("\n", 1)
    assert "accepted draft tokens" in legend and "target tokens" in legend
    green, cyan = "\x1b[32m", "\x1b[1;36m"
    assert legend.index(green) < legend.index(cyan)
    drafted = sum(step.accepted for step in result.arm.steps)
    assert 0 < drafted < 16
    assert 0 < rest.count(green) <= drafted and 0 < rest.count(cyan) <= 16 - drafted


def test_without_comparison_ar_does_not_run_and_ar_alone_has_nothing_to_compare_with():
    recipe = tiny()
    result, output = shown(recipe, compare=False)
    assert result.ar is None and result.identical is None
    assert "speedup" not in output and "identical" not in output
    result, output = shown(tiny("decode.drafter=ar"))
    assert result.ar is None and "acceptance" not in output and "prefetch" not in output


def test_drawn_tokens_are_not_compared():
    result, output = shown(tiny("decode.temperature=1.0"))
    assert result.ar is not None and result.identical is None
    assert "tokens were drawn" in output


def test_a_difference_is_said_loudly(monkeypatch):
    recipe = tiny()
    result, _ = shown(recipe)
    monkeypatch.setattr("moexp.cli.generate.Generated.identical", False)
    _, output = shown(recipe)
    assert "OUTPUT DIFFERS FROM AR'S" in output and "identical to" not in output


def test_an_emulated_link_is_tagged():
    _, output = shown(tiny("store.pace={bandwidth_gb_s: 50}"))
    assert "(emulated, one request)" in output


def test_what_is_missing_says_which_command_makes_it():
    recipe = load_recipe("tiny")
    with pytest.raises(MoexpError, match="target is not built.*moexp build-target --recipe tiny"):
        shown(recipe)
    build_target(recipe, locations.target_folder(recipe), cache=Path("unused"), provenance={})
    with pytest.raises(MoexpError, match="draft experts are not trained.*moexp train-draft-expert --recipe tiny"):
        shown(recipe)


def test_draft_experts_of_another_target_are_refused():
    recipe = tiny()
    experts = DraftExperts(recipe.target.tiny.hidden_size, 8, (1, 2))
    save_draft_experts(locations.draft_folder(recipe), experts, "f" * 64, {"metrics": {}})
    with pytest.raises(MoexpError, match="draft experts of target ffffffffffff, but the target is"):
        shown(recipe)


def test_experts_loaded_count_reads_and_not_cancelled_prefetches():
    def step(emitted: int, **store: float) -> StepRecord:
        return StepRecord(0, 0, "m", 0, 0, emitted, [1] * emitted, 0.0, 0.0, 0.0, store=store)

    steps = [step(2, missed=3, prefetched=5, cancelled=1), step(1, missed=2, prefetched=0, cancelled=0)]
    assert experts_loaded(steps).value == 3.0
    assert experts_loaded([step(1)]).value is None


def test_a_tree_is_drawn_with_what_was_chosen_and_what_stands():
    recipe = tiny("decode.tree={selector: marginal-cost, gamma: 4}", "decode.max_new_tokens=12")
    result, output = shown(recipe, show_tree=True)
    assert result.identical
    lines = [line for line in output.splitlines() if "P " in line and ("'" in line or '"' in line)]
    marks = [line.lstrip("│├└─ ")[:1] for line in lines]
    assert len(lines) == 11  # 1 + 2 + 4 + 4
    assert marks.count("*") + marks.count("+") == 4 and marks[0] == "*"
    assert sum("experts" in line for line in lines) == 4


def test_a_method_without_a_tree_has_none_to_draw():
    with pytest.raises(MoexpError, match="drafts no tree.*decode.tree"):
        shown(tiny(), show_tree=True)
