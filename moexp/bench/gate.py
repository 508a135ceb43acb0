"""`moexp eval`: the exactness gate. Every method must give AR's tokens from AR's logits."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moexp.base.progress import stage
from moexp.bench.engine import PromptEngine
from moexp.bench.exactness import Gate, Outcome, RowLog
from moexp.bench.row_invariance import row_invariant
from moexp.config import locations
from moexp.config.decode import StoreSection
from moexp.config.recipe import Recipe
from moexp.data.prompts import Prompt, load_prompts, render_chat
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import HEAD, Method, TreePlan
from moexp.runtime.engine.engine import Engine
from moexp.runtime.opening import method_of, opened_engine, opened_store, predictors_of
from moexp.runtime.selectors.confidence_expansion import POLICIES
from moexp.runtime.verifiers.sampling import Sampling
from moexp.tables.gate import JSON
from moexp.target.draft_expert import HEADER, WEIGHTS
from moexp.target.load import Target, checkpoint_fingerprint, read_config
from moexp.target.opening import find_target, head_fingerprint, open_draft_experts, open_draft_head, open_target
from moexp.target.spec import MoESpec

FRESH = "ar, fresh engine"  # the control: AR against AR


@dataclass(frozen=True)
class Setting:
    """One store to test on, and the methods to test on it."""

    store: StoreSection
    padded: bool
    methods: tuple[Method, ...]
    control: bool  # also AR on a fresh engine


def gate_methods(recipe: Recipe, drafts: bool, top_k: int) -> tuple[Method, ...]:
    """The methods of the gate: the target drafting for itself, then every drafter under every policy.

    Prefetch alternates, so that each drafter and each policy meets both; the draft experts (the method that is to be
    used) have all combinations.
    """
    section = recipe.decode
    common: dict[str, Any] = {"max_draft": section.max_draft, "tau": section.tau, "budget": section.budget}
    top_r = [
        Method("top-r", r=r, policy=policy, prefetch=(r + number) % 2 == 0, **common)
        for r in range(1, min(3, top_k) + 1)
        for number, policy in enumerate(POLICIES)
    ]
    draft_experts = [
        Method("draft-expert", policy=policy, prefetch=prefetch, **common)
        for policy in POLICIES
        for prefetch in (False, True)
    ]
    trees = [Method("top-r", tree=TreePlan(selector="confidence", predictor="none"))]
    trees += [Method("draft-expert", prefetch=True, tree=TreePlan())] if drafts else []
    return (Method("target", **common), *top_r, *(draft_experts if drafts else []), *trees)


def run_gate(recipe: Recipe, *, tokens: int | None = None) -> Gate:
    """Runs the gate over `eval.prompts` prompts in every dtype of `eval.dtypes`.

    All methods run on the recipe's kind of store; AR and the recipe's own method also with everything resident, and on
    the padded target where the recipe has one.

    Args:
        tokens: go on over more prompts until so many tokens have been compared in all.

    Raises:
        MoexpError: the target is not built, or the draft experts belong to another.
    """
    gates: dict[str, bool] = {}
    outcomes: list[Outcome] = []
    drafts = (locations.draft_folder(recipe) / HEADER).exists()
    settings = _settings(recipe, drafts)
    runs = len(recipe.eval.dtypes) * sum(len(setting.methods) + setting.control for setting in settings)
    share = None if tokens is None else -(-tokens // runs)
    for dtype in recipe.eval.dtypes:
        for setting in settings:
            target = open_target(recipe, padded=setting.padded, dtype=dtype)
            trained = _trained(recipe, target, drafts)
            if dtype not in gates:
                gates[dtype] = row_invariant(target)
            outcomes += _run_setting(recipe, target, trained, setting, dtype, share)
    return Gate(tuple(outcomes), gates, recipe.eval.near_tie_gap)


def _trained(recipe: Recipe, target: Target, drafts: bool) -> dict[str, Any]:
    """What engines run the gate's methods with: draft experts, and the head and predictors of the recipe's own."""
    own = method_of(recipe.decode)
    return {
        "draft_experts": open_draft_experts(recipe, target) if drafts else None,
        "draft_head": open_draft_head(recipe, target) if own.drafter == HEAD else None,
        "predictors": predictors_of(recipe, target, own),
    }


def _settings(recipe: Recipe, drafts: bool) -> list[Setting]:
    """Which methods run where: all of them once, the recipe's own wherever it can run."""
    own = method_of(recipe.decode)
    if own.is_ar or (own.drafter == "draft-expert" and not drafts):
        own = Method("top-r", max_draft=recipe.decode.max_draft, prefetch=True)
    every = gate_methods(recipe, drafts, _top_k(recipe))
    settings = [Setting(recipe.store, False, every if own in every else (*every, own), control=True)]
    if recipe.store.kind != "resident":
        settings.append(Setting(StoreSection(kind="resident"), False, (own,), control=True))
    if recipe.target.pad_expert_width is not None:
        settings.append(Setting(recipe.store, True, (own,), control=False))
    return settings


def _top_k(recipe: Recipe) -> int:
    return MoESpec.from_config(read_config(find_target(recipe))).top_k


def _run_setting(
    recipe: Recipe, target: Target, trained: dict[str, Any], setting: Setting, dtype: str, share: int | None
) -> list[Outcome]:
    """Compares the setting's methods with AR, prompt by prompt; with a share, until each has so many tokens."""
    store = store_for(setting.store, target)
    name = "padded" if setting.padded else "plain"
    labels = [*([FRESH] if setting.control else []), *(method.label for method in setting.methods)]
    outcomes = [Outcome(dtype, store.kind, name, label) for label in labels]
    prompts = gate_prompts(recipe, everything=share is not None)
    length = recipe.eval.max_new_tokens if share is None else max(recipe.eval.max_new_tokens, -(-share // len(prompts)))
    total = None if share else len(prompts) * (1 + len(labels))
    with ExitStack() as stack:
        # Prefill is the same for all methods, so they share AR's; only the fresh engine computes its own.
        engine = PromptEngine(target, stack.enter_context(opened_store(target, store)), **trained)
        runs: list[tuple[Engine, Method]] = [(engine, method) for method in (Method(), *setting.methods)]
        if setting.control:
            runs.insert(1, (stack.enter_context(opened_engine(target, store, **trained)), Method()))
        advance = stack.enter_context(stage(f"{dtype}, {store.kind}, {name}", total))
        done = itertools.count(1)
        for prompt in prompts:
            ids = render_chat(target.tokenizer, prompt)
            logs = []
            for chosen, method in runs:
                logs.append(_answer(target, chosen, method, ids, length))
                advance(next(done))
            for outcome, log in zip(outcomes, logs[1:], strict=True):
                outcome.add(prompt.id, logs[0], log)
            if share is not None and min(outcome.tokens for outcome in outcomes) >= share:
                break
    return outcomes


def _answer(target: Target, engine: Engine, method: Method, ids: Sequence[int], length: int) -> RowLog:
    """A method's greedy answer to a prompt."""
    log = RowLog()
    _, request = decode_all(
        engine, ids, method, Sampling(), max_new_tokens=length, stop_ids=target.stop_ids, on_cycle=log
    )
    log.tokens = request.tokens
    return log


def store_for(section: StoreSection, target: Target) -> StoreSection:
    """The store to test a target on: in another dtype than the stored one, host memory stands in for a disk."""
    if section.kind == "disk" and not target.index.converts_to(target.dtype):
        return section.model_copy(update={"kind": "host"})
    return section


def gate_prompts(recipe: Recipe, *, everything: bool = False) -> list[Prompt]:
    """`eval.prompts` prompts, the tuning prompts and each of the bench's workloads in turn; or all there are."""
    limit = None if everything else recipe.eval.prompts  # of a large hub set, no more rows than are used
    sources = [load_prompts(source, limit) for source in dict.fromkeys(("tune", *recipe.bench.workloads))]
    turns = [prompt for round_ in itertools.zip_longest(*sources) for prompt in round_ if prompt is not None]
    return turns if everything else turns[: recipe.eval.prompts]


def gate_identity(recipe: Recipe) -> str:
    """A hash of all that the gate's result depends on: target, draft experts, head, and the recipe's sections."""
    folder = find_target(recipe)
    weights = locations.draft_folder(recipe) / WEIGHTS
    parts = [
        checkpoint_fingerprint(folder),
        hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else "",
        recipe.digest("decode", "store", "eval", "bench.workloads", "target.pad_expert_width"),
    ]
    if recipe.decode.drafter == HEAD:
        parts.append(head_fingerprint(recipe))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def already_passed(folder: Path, identity: str) -> bool:
    """Whether the gate was passed with exactly this target, draft experts and recipe."""
    try:
        result = json.loads((folder / JSON).read_text())
        return bool(result["passed"]) and result["identity"] == identity
    except (OSError, ValueError, KeyError, TypeError):
        return False
