"""`moexp generate`: one request, streamed as it is decoded, and what speculation made of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from moexp import metrics
from moexp.base.errors import MoexpError
from moexp.config.recipe import Recipe
from moexp.data.prompts import Prompt, render_chat
from moexp.metrics import Ratio
from moexp.records import RequestRecord, StepRecord
from moexp.runtime.decoding.cycle import Cycle
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import HEAD, Method
from moexp.runtime.opening import method_of, opened_engine, predictors_of, sampling_of
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.load import Target
from moexp.target.opening import open_draft_experts, open_draft_head, open_target

DRAFTED, TARGET = "green", "bold cyan"
UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no character (yet)


@dataclass(frozen=True)
class Piece:
    """Text that has become readable, and whether an accepted draft token completed it."""

    text: str
    drafted: bool


class TokenStream:
    """Turns tokens into text as they come, never cutting a character that several tokens make up.

    The pieces joined are what the tokenizer makes of all tokens at once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # shown already; some tokenizers write a token by what stands before it
        self._held: list[int] = []
        self._drafted = False

    def push(self, token: int, drafted: bool) -> Piece | None:
        """Adds a token; the text that is complete now, if any."""
        self._held.append(token)
        self._drafted = drafted
        text = self._new_text()
        if not text or text.endswith(UNFINISHED):
            return None
        return self._emit(text)

    def flush(self) -> Piece | None:
        """What is left when no more tokens come."""
        text = self._new_text()
        return self._emit(text) if text else None

    def _new_text(self) -> str:
        return self._text([*self._context, *self._held])[len(self._text(self._context)) :]

    def _emit(self, text: str) -> Piece:
        self._context, self._held = self._held, []
        return Piece(text, self._drafted)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class MethodRun:
    """One method's run of the request."""

    steps: list[StepRecord]
    request: RequestRecord


@dataclass(frozen=True)
class Generated:
    """The method's run, and AR's of the same request where it was decoded."""

    arm: MethodRun
    ar: MethodRun | None
    sampling: Sampling

    @property
    def identical(self) -> bool | None:
        """Whether both gave the same ids; None where there is nothing to compare, or tokens were drawn."""
        if self.ar is None or not self.sampling.greedy:
            return None
        return self.arm.request.tokens == self.ar.request.tokens


def generate(
    recipe: Recipe, text: str, console: Console, *, compare: bool = True, show_tree: bool = False
) -> Generated:
    """Answers `text` with the recipe's decoding method and store, printing as it goes, then a table.

    Args:
        compare: decode the same request by AR afterwards, on a store of its own.
        show_tree: draw the largest draft tree, and which of its nodes were verified and accepted.

    Raises:
        MoexpError: the target is not built or the draft experts are not trained, or the prompt is too long.
    """
    target = open_target(recipe, padded=True)
    method, sampling = method_of(recipe.decode), sampling_of(recipe.decode, recipe.seed)
    experts = open_draft_experts(recipe, target) if method.drafter == "draft-expert" else None
    head = open_draft_head(recipe, target) if method.drafter == HEAD else None
    ids = render_chat(target.tokenizer, Prompt("prompt", "generate", (text,)))
    if show_tree and method.tree is None:
        raise MoexpError("the method drafts no tree", where="--show-tree", valid="a recipe with decode.tree")
    screen = _Screen(console, target.tokenizer, legend=not method.is_ar)
    trees: list[Cycle] = []

    def watch(cycle: Cycle) -> None:
        screen.show(cycle.record)
        if show_tree and cycle.tree is not None:
            trees.append(cycle)

    arm = _decode(recipe, target, method, ids, watch, draft_experts=experts, draft_head=head)
    screen.end()
    if trees:
        largest = max(trees, key=lambda cycle: (cycle.record.tree_nodes, len(cycle.rows)))
        console.print(draw_tree(largest, target.tokenizer))
    ar = None
    if compare and not method.is_ar:
        with console.status("the same request by AR"):
            ar = _decode(recipe, target, Method(), ids)
    result = Generated(arm, ar, sampling)
    console.print(summary_table(result))
    tag = "emulated" if recipe.store.pace else "measured"
    for line in summary_lines(result, tag):
        console.print(line, highlight=False)
    return result


def _decode(
    recipe: Recipe,
    target: Target,
    method: Method,
    ids: Sequence[int],
    on_cycle: Callable[[Cycle], None] = lambda cycle: None,
    **options: Any,
) -> MethodRun:
    """The request on a fresh engine (with `options`) and store, after a few tokens that are not counted."""
    sampling = sampling_of(recipe.decode, recipe.seed)
    with opened_engine(target, recipe.store, predictors=predictors_of(recipe, target, method), **options) as engine:
        decode_all(engine, ids[:1], method, Sampling(), max_new_tokens=4)
        limit, stop_ids = recipe.decode.max_new_tokens, target.stop_ids
        run = decode_all(engine, ids, method, sampling, max_new_tokens=limit, stop_ids=stop_ids, on_cycle=on_cycle)
        return MethodRun(*run)


class _Screen:
    """Prints tokens as cycles emit them: on a terminal in the colour of whoever chose them."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase, *, legend: bool) -> None:
        self.make_console = console
        self._stream = TokenStream(tokenizer)
        if legend and console.is_terminal and not console.no_color:
            console.print(Text("accepted draft tokens", DRAFTED), Text("target tokens", TARGET), sep="  ")

    def show(self, step: StepRecord) -> None:
        for index, token in enumerate(step.tokens):
            self._show(self._stream.push(token, drafted=index < step.accepted))

    def end(self) -> None:
        self._show(self._stream.flush())
        self.make_console.print()

    def _show(self, piece: Piece | None) -> None:
        if piece is not None:
            text = printable(piece.text) if self.make_console.is_terminal else piece.text
            style = DRAFTED if piece.drafted else TARGET
            self.make_console.print(Text(text, style), end="", soft_wrap=True)


def draw_tree(cycle: Cycle, tokenizer: PreTrainedTokenizerBase) -> Tree:
    """A draft tree for the terminal: each token with its path probability and the layer-experts it added; accepted
    nodes are marked `*`, other verified ones `+`, and those left out have no mark.
    """
    assert cycle.tree is not None
    tree, chosen, costs = cycle.tree.tree, cycle.tree.chosen, cycle.tree.costs
    accepted = {chosen[row] for row in cycle.rows}

    def label(node: int) -> Text:
        word = printable(str(tokenizer.decode([int(tree.tokens_N[node])]))).replace("\n", "\\n")
        mark, style = ("*", DRAFTED) if node in accepted else ("+", TARGET) if node in chosen else (" ", "dim")
        cost = f", {costs[node]} experts" if node in costs else ""
        return Text(f"{mark} {word!r}  P {tree.path_probs_N[node]:.2f}{cost}", style)

    root = Tree(label(0), guide_style="dim")
    branches = {0: root}
    for node in range(1, len(tree)):
        branches[node] = branches[int(tree.parents_N[node])].add(label(node))
    return root


def printable(text: str) -> str:
    """The text without control characters, by which a model could steer the terminal; line breaks and tabs stay."""
    return "".join(UNFINISHED if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text)


def experts_loaded(steps: Sequence[StepRecord]) -> Ratio:
    """Experts brought in a token emitted: on demand, or by a prefetch that was not cancelled before its read began."""
    return metrics.pooled(
        Ratio(step.store["missed"] + step.store["prefetched"] - step.store["cancelled"], step.emitted)
        for step in steps
        if "missed" in step.store
    )


def summary_table(result: Generated) -> Table:
    """What the request cost, by method."""
    table = Table(box=None, pad_edge=False, show_header=True)
    table.add_column("")
    arms = [result.arm] if result.ar is None else [result.arm, result.ar]
    for arm in arms:
        table.add_column(arm.request.method, justify="right")
    rows: list[tuple[str, Callable[[MethodRun], float | None], str]] = [
        ("tokens", lambda arm: float(arm.request.new_tokens), "{:.0f}"),
        ("acceptance", lambda arm: metrics.acceptance(arm.steps).value, "{:.2f}"),
        ("alpha (tokens a cycle)", lambda arm: metrics.alpha(arm.steps).value, "{:.2f}"),
        ("experts loaded a token", lambda arm: experts_loaded(arm.steps).value, "{:.1f}"),
        ("prefetch hit", lambda arm: metrics.prefetch_hit(arm.steps).value, "{:.2f}"),
        ("prefetch waste", lambda arm: metrics.prefetch_waste(arm.steps).value, "{:.2f}"),
        ("tokens/s", lambda arm: metrics.tokens_per_s([arm.request]).value, "{:.1f}"),
    ]
    for name, value_of, form in rows:
        values = [value_of(arm) for arm in arms]
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else form.format(value) for value in values))
    return table


def summary_lines(result: Generated, tag: str) -> list[str]:
    """Speedup over AR, and whether both gave the same."""
    if result.ar is None:
        return []
    speedup = metrics.speedup([result.arm.request], [result.ar.request])
    lines = [] if speedup is None else [f"speedup over AR: {speedup:.2f}x ({tag}, one request)"]
    if result.identical is None:
        lines.append("tokens were drawn: both follow the target's distribution, and are not compared")
    elif result.identical:
        lines.append(f"output identical to AR's: {result.arm.request.new_tokens} tokens, compared by id")
    else:
        lines.append("OUTPUT DIFFERS FROM AR'S (compared by id): run moexp eval")
    return lines
