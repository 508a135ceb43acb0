"""Where the artifacts of a recipe lie, and how to open them: target folder, draft experts, store, engine, methods.

Stages meet only here, through folders: each can be run alone, and what is there already is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moexp.errors import MoexpError
from moexp.recipe import Recipe
from moexp.rundir import artifact_path, home
from moexp.schema import DecodeSection, StoreSection

if TYPE_CHECKING:
    from moexp.learn.predictor_model import RoutingPredictor
    from moexp.runtime.forward import Engine
    from moexp.runtime.method import Method
    from moexp.runtime.predictors import ExpertPredictor
    from moexp.runtime.store import ExpertStore
    from moexp.runtime.verify import Sampling
    from moexp.target.draft_expert import DraftExperts
    from moexp.target.draft_head import DraftHead
    from moexp.target.load import Target


def target_folder(recipe: Recipe) -> Path:
    """Where the recipe's built target lies (unpadded), whether it is there yet or not."""
    if recipe.paths.target is not None:
        return Path(recipe.paths.target)
    return artifact_path("targets", recipe, "target", "seed")


def padded_folder(recipe: Recipe) -> Path:
    """Where the target to decode from lies: the padded copy where the recipe asks for one."""
    folder, width = target_folder(recipe), recipe.target.pad_expert_width
    return folder if width is None else padded_beside(folder, width)


def padded_beside(folder: Path, width: int) -> Path:
    """Where the copy of the target in `folder` lies whose experts are padded to `width`."""
    return folder.with_name(f"{folder.name}-pad{width}")


def draft_folder(recipe: Recipe) -> Path:
    """Where the recipe's draft experts lie."""
    if recipe.paths.draft_experts is not None:
        return Path(recipe.paths.draft_experts)
    return artifact_path("drafts", recipe, "target", "draft", "seed")


def predictor_recipe(recipe: Recipe) -> Recipe:
    """The recipe with the trace that its expert predictor learns from."""
    trace = recipe.trace.model_copy(update={"tokens": recipe.predictor.trace_tokens, "gates": False})
    return recipe.model_copy(update={"trace": trace})


def predictor_folder(recipe: Recipe) -> Path:
    """Where the recipe's expert predictor lies; checkpoints that it kept on the way are folders within."""
    if recipe.paths.predictor is not None:
        return Path(recipe.paths.predictor)
    sections = ("target", "predictor", "trace", "draft.corpus", "seed")
    return artifact_path("predictors", predictor_recipe(recipe), *sections)


def with_head(recipe: Recipe, kind: str) -> Recipe:
    """The recipe with its head of this kind and otherwise the same settings."""
    return recipe.model_copy(update={"head": recipe.head.model_copy(update={"kind": kind})})


def head_folder(recipe: Recipe) -> Path:
    """Where the recipe's draft head lies."""
    folder = artifact_path("heads", recipe, "target", "head", "draft.corpus", "draft.held_out_rows", "seed")
    return folder.with_name(f"{recipe.head.kind}-{folder.name}")


def source_cache() -> Path:
    """Fetched files that targets are built from."""
    return home() / "sources"


def find_target(recipe: Recipe, *, padded: bool = False) -> Path:
    """The checkpoint folder to open.

    Raises:
        MoexpError: not built yet, or (kind hub) not to be had.
    """
    if recipe.target.kind == "hub":
        from moexp.target.hub_folder import hub_folder

        assert recipe.target.path is not None
        return hub_folder(recipe.target.path, recipe.target.revision)
    folder = padded_folder(recipe) if padded else target_folder(recipe)
    command = f"moexp build-target --recipe {recipe.name}"
    _demand((folder / "config.json").exists(), "the target is not built", folder, command)
    return folder


def _demand(there: bool, missing: str, folder: Path, command: str) -> None:
    """MoexpError naming the command that makes what is not there."""
    if not there:
        raise MoexpError(missing, where=str(folder), valid=f"run: {command}")


def open_target(recipe: Recipe, *, padded: bool = False, dtype: str | None = None) -> Target:
    """Loads everything but the routed experts of the recipe's target, to its device.

    Raises:
        MoexpError: not built yet, or a device that is not there or that the recipe's store cannot serve.
    """
    import torch

    from moexp.compute import pick_device
    from moexp.target.load import load_target

    device = pick_device(recipe.device, recipe.store.kind)
    folder = find_target(recipe, padded=padded)
    return load_target(folder, dtype=getattr(torch, dtype or recipe.target.dtype), device=device)


def open_draft_experts(recipe: Recipe, target: Target) -> DraftExperts:
    """The recipe's draft experts, in the target's dtype.

    Raises:
        MoexpError: not trained yet, or trained for another target.
    """
    from moexp.target.draft_expert import HEADER, load_draft_experts
    from moexp.target.load import drafters_identity

    folder = draft_folder(recipe)
    command = f"moexp train-draft-expert --recipe {recipe.name}"
    _demand((folder / HEADER).exists(), "the draft experts are not trained", folder, command)
    return load_draft_experts(folder, drafters_identity(target.folder), dtype=target.dtype).to(target.device)


def open_predictor(recipe: Recipe, target: Target, level: str | None = None) -> RoutingPredictor:
    """The recipe's expert predictor, in the target's dtype.

    Args:
        level: a checkpoint that was kept on the way, a key of `moexp.learn.predictor.LEVELS`.

    Raises:
        MoexpError: not trained yet, never at that level, or trained for another target.
    """
    from moexp.learn.predictor_files import HEADER, load_predictor
    from moexp.target.load import drafters_identity

    folder = predictor_folder(recipe)
    command = f"moexp train-predictor --recipe {recipe.name}"
    _demand((folder / HEADER).exists(), "the expert predictor is not trained", folder, command)
    embedding: Any = target.model.get_input_embeddings()
    identity = drafters_identity(target.folder)
    loaded = load_predictor(folder / (level or ""), identity, embedding.weight, dtype=target.dtype)
    return loaded.to(target.device)


def open_draft_head(recipe: Recipe, target: Target) -> DraftHead:
    """The recipe's draft head, in the target's dtype.

    Raises:
        MoexpError: not trained yet, or trained for another target.
    """
    from moexp.target.eagle_files import load_eagle_head
    from moexp.target.load import drafters_identity
    from moexp.target.mtp_files import load_mtp_head

    folder = head_folder(recipe)
    _demand(folder.exists(), "the draft head is not trained", folder, f"moexp train-drafter --recipe {recipe.name}")
    identity = drafters_identity(target.folder)
    if recipe.head.kind == "mtp":
        return load_mtp_head(folder, target.model, identity, dtype=target.dtype).to(target.device)
    embedding = target.model.get_input_embeddings()
    return load_eagle_head(folder, target.spec, embedding, fingerprint=identity, dtype=target.dtype).to(target.device)


@contextmanager
def opened_store(target: Target, section: StoreSection) -> Iterator[ExpertStore]:
    """The store that a recipe's section describes, closed at the end.

    Raises:
        MoexpError: it is to keep the most demanded experts, and no routing trace of the target is there.
    """
    from moexp.runtime.cache import STATIC_HOT
    from moexp.runtime.pacing import Pacer
    from moexp.runtime.store import open_store
    from moexp.target.load import drafters_identity

    pace = section.pace
    pacer = None if pace is None else Pacer(pace.bandwidth_gb_s * 1e9, pace.latency_us * 1e-6, pace.concurrency)
    store = open_store(
        target.index,
        section.kind,
        policy=section.policy,
        demands=traced_demands(drafters_identity(target.folder)) if section.policy == STATIC_HOT else None,
        budget_bytes=None if section.budget_mib is None else int(section.budget_mib * 2**20),
        io_threads=section.io_threads,
        pacer=pacer,
        dtype=target.dtype,
        device=target.device,
    )
    try:
        yield store
    finally:
        store.close()


def traced_demands(fingerprint: str) -> dict[tuple[int, int], float]:
    """How often each expert (layer, expert) is used in the longest routing trace of a target under `home()`.

    Raises:
        MoexpError: there is none.
    """
    from moexp.learn.trace_files import MANIFEST, expert_demands, read_manifest, read_trace

    found = [(manifest.tokens, path.parent) for path in sorted((home() / "traces").glob(f"*/{MANIFEST}"))
             if (manifest := read_manifest(path.parent)).complete and manifest.target == fingerprint]  # fmt: skip
    if not found:
        missing = f"static-hot needs a routing trace of target {fingerprint[:12]}"
        raise MoexpError(missing, where=str(home() / "traces"), valid="run: moexp trace-routing")
    return expert_demands(read_trace(max(found)[1], fingerprint))


@contextmanager
def opened_engine(
    target: Target,
    section: StoreSection,
    draft_experts: DraftExperts | None = None,
    draft_head: DraftHead | None = None,
    predictors: Mapping[str, Callable[[], ExpertPredictor]] | None = None,
) -> Iterator[Engine]:
    """An engine over the target with a store of its own."""
    from moexp.runtime.forward import Engine

    with opened_store(target, section) as store:
        yield Engine(target, store, draft_experts=draft_experts, draft_head=draft_head, predictors=predictors)


def predictors_of(recipe: Recipe, target: Target, method: Method) -> dict[str, Callable[[], ExpertPredictor]]:
    """What makes the predictors that a method needs, for `Engine`: the recipe's trained one, where it asks for that.

    Raises:
        MoexpError: it is not trained yet, or for another target.
    """
    if method.tree is None or method.tree.predictor != "learned":
        return {}
    return {"learned": learned_predictor(recipe, target)}


def learned_predictor(recipe: Recipe, target: Target, level: str | None = None) -> Callable[[], ExpertPredictor]:
    """What makes learned predictors, one a request, that share the weights of `open_predictor`."""
    from moexp.learn.predictor_model import PredictorSession
    from moexp.runtime.predictors import LearnedPredictor

    model = open_predictor(recipe, target, level)
    return lambda: LearnedPredictor(PredictorSession(model))


def method_of(section: DecodeSection) -> Method:
    """The decoding method that a recipe's section describes."""
    from moexp.runtime.method import Method, TreePlan
    from moexp.runtime.tree import TreeShape

    plan = None
    if section.tree is not None:
        tree = section.tree
        shape = TreeShape(tree.steps, tree.width, tree.beam, tree.pruned)
        plan = TreePlan(shape, tree.selector, tree.gamma, tree.epsilon, tree.predictor)
    names = ("drafter", "r", "max_draft", "policy", "tau", "budget", "prefetch", "prefetch_top")
    return Method(**{name: getattr(section, name) for name in names}, tree=plan)


def sampling_of(section: DecodeSection, seed: int) -> Sampling:
    """The sampling that a recipe's section describes."""
    from moexp.runtime.verify import Sampling

    return Sampling(temperature=section.temperature, top_k=section.top_k, top_p=section.top_p, seed=seed)
