"""Opens what a recipe decodes with: store, engine, expert predictors, method, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moexp.base.errors import MoexpError
from moexp.config.decode import DecodeSection, StoreSection
from moexp.config.locations import home, predictor_folder, require
from moexp.config.recipe import Recipe
from moexp.data.traces import MANIFEST, expert_demands, read_manifest, read_trace
from moexp.runtime.decoding.method import LEARNED, Method, TreePlan
from moexp.runtime.drafters.draft_tree import TreeShape
from moexp.runtime.engine.engine import Engine
from moexp.runtime.predictors.files import HEADER, load_predictor
from moexp.runtime.predictors.learned import LearnedPredictor, RoutingPredictor
from moexp.runtime.predictors.predictor import ExpertPredictor
from moexp.runtime.store.opening import open_store
from moexp.runtime.store.pacing import Pacer
from moexp.runtime.store.policies import STATIC_HOT, make_policy
from moexp.runtime.store.store import ExpertStore
from moexp.runtime.store.transfer import StoreOptions
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.draft_expert import DraftExperts
from moexp.target.heads.head import DraftHead
from moexp.target.load import Target, drafters_identity


def open_predictor(recipe: Recipe, target: Target, level: str | None = None) -> RoutingPredictor:
    """The recipe's expert predictor, in the target's dtype.

    Args:
        level: a checkpoint saved during training, a key of `moexp.learn.predictor.lesson.LEVELS`.

    Raises:
        MoexpError: not trained yet, never at that level, or trained for another target.
    """
    folder = predictor_folder(recipe)
    command = f"moexp train-predictor --recipe {recipe.name}"
    require((folder / HEADER).exists(), "the expert predictor is not trained", folder, command)
    embedding: Any = target.model.get_input_embeddings()
    identity = drafters_identity(target.folder)
    loaded = load_predictor(folder / (level or ""), identity, embedding.weight, dtype=target.dtype)
    return loaded.to(target.device)


@contextmanager
def opened_store(target: Target, section: StoreSection) -> Iterator[ExpertStore]:
    """The store that a recipe's section describes, closed at the end.

    Raises:
        MoexpError: it is to keep the most demanded experts, and there is no routing trace of the target.
    """
    pace = section.pace
    pacer = None if pace is None else Pacer(pace.bandwidth_gb_s * 1e9, pace.latency_us * 1e-6, pace.concurrency)
    demands = traced_demands(drafters_identity(target.folder)) if section.policy == STATIC_HOT else None
    with open_store(
        target.index,
        section.kind,
        policy=make_policy(section.policy, demands),
        budget_bytes=None if section.budget_mib is None else int(section.budget_mib * 2**20),
        dtype=target.dtype,
        device=target.device,
        options=StoreOptions(io_threads=section.io_threads, pacer=pacer),
    ) as store:
        yield store


def traced_demands(fingerprint: str) -> dict[tuple[int, int], float]:
    """How often each expert (layer, expert) is used in the longest routing trace of a target under `home()`.

    Raises:
        MoexpError: there is none.
    """
    traces = [(manifest.tokens, path.parent) for path in sorted((home() / "traces").glob(f"*/{MANIFEST}"))
              if (manifest := read_manifest(path.parent)).complete and manifest.target == fingerprint]  # fmt: skip
    if not traces:
        missing = f"static-hot needs a routing trace of target {fingerprint[:12]}"
        raise MoexpError(missing, where=str(home() / "traces"), valid="run: moexp trace-routing")
    return expert_demands(read_trace(max(traces)[1], fingerprint))


@contextmanager
def opened_engine(
    target: Target,
    section: StoreSection,
    draft_experts: DraftExperts | None = None,
    draft_head: DraftHead | None = None,
    predictors: Mapping[str, Callable[[], ExpertPredictor]] | None = None,
) -> Iterator[Engine]:
    """An engine over the target with a store of its own."""
    with opened_store(target, section) as store:
        yield Engine(target, store, draft_experts=draft_experts, draft_head=draft_head, predictors=predictors)


def predictors_of(recipe: Recipe, target: Target, method: Method) -> dict[str, Callable[[], ExpertPredictor]]:
    """What makes the predictors that a method needs, for `Engine`: the recipe's trained one, where it asks for that.

    Raises:
        MoexpError: it is not trained yet, or for another target.
    """
    if method.tree is None or method.tree.predictor != LEARNED:
        return {}
    return {LEARNED: learned_predictor(recipe, target)}


def learned_predictor(recipe: Recipe, target: Target, level: str | None = None) -> Callable[[], ExpertPredictor]:
    """What makes learned predictors, one a request, that share the weights of `open_predictor`."""
    model = open_predictor(recipe, target, level)
    return lambda: LearnedPredictor(model)


def method_of(section: DecodeSection) -> Method:
    """The decoding method that a recipe's section describes."""
    plan = None
    if section.tree is not None:
        tree = section.tree
        shape = TreeShape(tree.steps, tree.width, tree.beam, tree.pruned)
        plan = TreePlan(shape, tree.selector, tree.gamma, tree.epsilon, tree.predictor)
    names = ("drafter", "r", "max_draft", "policy", "tau", "budget", "prefetch", "prefetch_top")
    return Method(**{name: getattr(section, name) for name in names}, tree=plan)


def sampling_of(section: DecodeSection, seed: int) -> Sampling:
    """The sampling that a recipe's section describes."""
    return Sampling(temperature=section.temperature, top_k=section.top_k, top_p=section.top_p, seed=seed)
