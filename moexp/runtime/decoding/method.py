"""What to decode with: a choice of drafter, selection and prefetch, as plain data. Nothing here runs a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moexp.base.errors import MoexpError
from moexp.runtime.drafters.draft_tree import TreeShape
from moexp.runtime.selectors.confidence_expansion import Truncation
from moexp.runtime.selectors.registry import SelectorOptions, make_selector

if TYPE_CHECKING:
    from moexp.runtime.engine.engine import Engine

DRAFT_ROUTER, LEARNED = "draft-router", "learned"
PREDICTORS = (DRAFT_ROUTER, LEARNED, "oracle", "none")
HEAD = "head"  # the drafter that reads the target's hidden states


@dataclass(frozen=True)
class TreePlan:
    """How a draft tree is grown, and which of its nodes are verified.

    Attributes:
        shape: steps, tokens a node, nodes expanded a step.
        selector: a key of `SELECTORS`.
        gamma: nodes verified, the pending token included.
        epsilon: of the selectors by cost.
        predictor: whose expert sets selection and prefetch go by: the draft router's (at the price of draft passes for
            the leaves), those of a model trained to predict them (of nodes that the draft path ran, its router's), the
            target's own (recorded: a bound, not a method), or none.
    """

    shape: TreeShape = field(default_factory=TreeShape)
    selector: str = "marginal-cost"
    gamma: int = 8
    epsilon: float = 1.0
    predictor: str = DRAFT_ROUTER


@dataclass(frozen=True)
class Method:
    """A choice of drafter, truncation and prefetch. All of them emit what the target alone would.

    Attributes:
        drafter: "ar" (none), "top-r", "draft-expert", "head" (of the engine; trees only), or "target" (the control: it
            drafts for itself).
        r: routed experts while drafting.
        max_draft: K, drafted tokens a cycle at most.
        policy: a key of `POLICIES`.
        tau: confidence below which a token is doubtful.
        budget: layer-experts that a doubtful token may add (B), or "cache": the room left in the expert cache.
        prefetch: launch predicted verifier experts while drafting.
        prefetch_inline: launch them layer by layer within the draft step (its input token is verified whether or not
            the token it drafts is appended), not only once the drafted token is appended (Algorithm 1, line 13).
        prefetch_top: of a layer's predicted experts, launch only this many, by descending gate; None: all.
        tree: draft a tree and select from it, in place of a chain of `max_draft` and `policy`.
        name: for records; by default composed of the above.
    """

    drafter: str = "ar"
    r: int = 1
    max_draft: int = 4
    policy: str = "fixed"
    tau: float = 0.5
    budget: int | Literal["cache"] = 60
    prefetch: bool = False
    prefetch_top: int | None = None
    prefetch_inline: bool = True
    tree: TreePlan | None = None
    name: str = ""

    @property
    def is_ar(self) -> bool:
        return self.drafter == "ar"

    @property
    def label(self) -> str:
        """The name, or one like "top-2 K4 confidence-expansion prefetch"."""
        if self.name or self.is_ar:
            return self.name or "ar"
        drafter = f"top-{self.r}" if self.drafter == "top-r" else self.drafter
        prefetch = [f"prefetch{self.prefetch_top or ''}"] if self.prefetch else []
        if self.tree is not None:
            shape, selector = self.tree.shape, [f"gamma{self.tree.gamma}", self.tree.selector]
            return " ".join([drafter, f"tree {shape.steps}x{shape.width}x{shape.beam}", *selector, *prefetch])
        policy = [] if self.policy == "fixed" else [self.policy]
        return " ".join([drafter, f"K{self.max_draft}", *policy, *prefetch])


def check_method(method: Method, engine: Engine) -> None:
    """Whether the engine can run the method.

    Raises:
        MoexpError: an unknown name, a number out of range, or draft experts that are not loaded.
    """
    from moexp.runtime.drafters.self_chain import DRAFTERS  # plain data needs no torch, running it does

    if method.is_ar:
        return
    if method.drafter == HEAD:
        if method.tree is None:
            raise MoexpError("a head drafts trees", where="decode.tree", valid="a tree; of width 1 it is a chain")
        if engine.draft_head is None:
            raise MoexpError("no draft head is loaded", where="decode.drafter", valid="train one, or top-r")
    elif method.drafter not in DRAFTERS:
        valid = ", ".join(["ar", HEAD, *sorted(DRAFTERS)])
        raise MoexpError(f"unknown drafter {method.drafter!r}", where="decode.drafter", valid=valid)
    if not 1 <= method.r <= engine.spec.top_k:
        raise MoexpError(f"r = {method.r}", where="decode.r", valid=f"1 to {engine.spec.top_k}")
    if method.tree is not None:
        _check_tree(method.tree, engine, method.drafter)
    Truncation(method.policy)
    if method.tree is None and not 1 <= method.max_draft < engine.block:
        raise MoexpError(
            f"max_draft = {method.max_draft} in steps of {engine.block} rows",
            where="decode.max_draft",
            valid=f"1 to {engine.block - 1}",
        )
    if method.drafter == "draft-expert" and engine.draft_experts is None:
        raise MoexpError("no draft experts are loaded", where="decode.drafter", valid="train them, or top-r")


def _check_tree(plan: TreePlan, engine: Engine, drafter: str) -> None:
    block = engine.block
    selector = make_selector(plan.selector, SelectorOptions(plan.epsilon))
    if plan.predictor not in (*PREDICTORS, *engine.predictors):
        raise MoexpError(f"unknown predictor {plan.predictor!r}", where="decode.predictor", valid=", ".join(PREDICTORS))
    if drafter == HEAD and plan.predictor == DRAFT_ROUTER:
        raise MoexpError("a head has no draft router", where="decode.predictor", valid="learned, oracle, none")
    if plan.predictor in (LEARNED, "oracle") and plan.predictor not in engine.predictors:
        missing = f"no {plan.predictor} predictor is loaded"
        raise MoexpError(missing, where="decode.predictor", valid="train one, or none")
    lacking = {"none": False, "predicted": plan.predictor == "none", "recorded": plan.predictor != "oracle"}
    if lacking[selector.needs]:
        raise MoexpError(
            f"selector {plan.selector} with predictor {plan.predictor}",
            where="decode.selector",
            valid="confidence, or a predictor",
        )
    if not 1 <= plan.gamma <= block:
        raise MoexpError(f"gamma = {plan.gamma} in steps of {block} rows", where="decode.gamma", valid=f"1 to {block}")
    # The nodes that a draft step runs, and all their ancestors, go into one block.
    grown = 1 + sum(min(plan.shape.beam, plan.shape.width**step) for step in range(1, plan.shape.steps))
    if drafter != HEAD and grown > block:
        raise MoexpError(f"a tree of {grown} inner nodes in steps of {block} rows", where="decode.tree",
                         valid=f"at most {block}: fewer steps, or a smaller beam")  # fmt: skip
