"""What EcoSpec's tables need, measured: trees of every trained drafter with every selection, interleaved on one store.

Drafters: the trained heads (`moexp train-drafter`), and the target on its draft-expert path. Each selects by confidence
(the baseline) and by marginal cost (EcoSpec), from the same trees; heads ask the learned predictor for expert sets, the
draft-expert path its own router. Experts are in memory, where a step costs the traffic of the union (the paper's
setting), and cold on the local disk, as for DraftExpert's tables; padded in both.

Paper: EcoSpec Table 1; EcoSpec Table 2; EcoSpec Table 3; EcoSpec Table 4; EcoSpec Table 9; EcoSpec Table 11.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path

from moexp.base import atomic
from moexp.base.errors import MoexpError
from moexp.bench.engine import PromptEngine
from moexp.bench.folder import settled_tokens
from moexp.bench.measure import measure_on
from moexp.bench.platforms import IN_MEMORY, Platform, find_platform
from moexp.bench.setup import Setup
from moexp.bench.turns import SLICE_S
from moexp.config.bench import EcoSpecSection
from moexp.config.decode import StoreSection
from moexp.config.locations import head_folder, predictor_folder, with_head
from moexp.config.recipe import Recipe
from moexp.config.run_folder import RunDir
from moexp.runtime.decoding.method import HEAD, Method, TreePlan
from moexp.runtime.drafters.draft_tree import TreeShape
from moexp.runtime.opening import learned_predictor, opened_store
from moexp.runtime.predictors.oracle import OraclePredictor
from moexp.runtime.predictors.predictor import ExpertPredictor
from moexp.runtime.store.store import ExpertStore, ResidentStore
from moexp.runtime.verifiers.sampling import Sampling
from moexp.tables.ecospec.data import (
    AR,
    BATCH,
    CHEAPEST,
    DRAFT_EXPERT,
    ECOSPEC,
    EPSILON,
    GAMMA,
    GLOBAL,
    ORACLE,
    T0,
    T1,
    TARGET,
    method_name,
    parts_of,
)
from moexp.target.load import Target, target_identity
from moexp.target.opening import find_target, open_draft_head

HEADS = {"eagle3": "EAGLE-3", "mtp": "MTP", "gto": "GTO"}
ON_DISK = "local-disk"
SWEEP_HEAD = "eagle3"  # whose gamma is swept, and whose selections are compared


def run_ecospec(recipe: Recipe, tables: Collection[int], folder: Path) -> None:
    """Measures what the tables need and the run folder does not hold yet.

    Raises:
        MoexpError: no head or no predictor is trained.
    """
    setup = Setup.open(recipe, padded=True)
    heads = trained_heads(recipe)
    with RunDir(folder, recipe), ExitStack() as stack:
        _describe(recipe, setup.target, folder)
        bench = _Bench(setup, heads, folder, stack)
        for platform in recipe.ecospec.platforms:
            if platform == ON_DISK:
                bench.run(find_platform(ON_DISK), T0, main_methods(recipe, heads), 0.0)
            else:
                _run_in_memory(bench, heads, set(tables))


def _run_in_memory(bench: _Bench, heads: Collection[str], tables: set[int]) -> None:
    """Both temperatures and the sweeps, with experts in memory."""
    recipe, section = bench.setup.recipe, bench.setup.recipe.ecospec
    for temperature in section.temperatures:
        if temperature == 0.0:
            bench.run(IN_MEMORY, T0, main_methods(recipe, heads) + sweep_methods(recipe, heads), 0.0)
        elif tables & {1}:
            part = T1 if temperature == 1.0 else f"t{temperature:g}"
            bench.run(IN_MEMORY, part, main_methods(recipe, heads), temperature)
    if tables & {11, 12} and SWEEP_HEAD in heads:
        for gamma in section.gamma_sweep:
            if gamma != section.gamma:
                bench.run(IN_MEMORY, f"{GAMMA}{gamma}", [Method(name=AR), *_pair(recipe, SWEEP_HEAD, gamma)], 0.0)
    if tables & {6, 7, 8} and SWEEP_HEAD in heads:
        for size in section.batch_sweep:
            methods = [Method(name=AR), *_pair(recipe, SWEEP_HEAD, section.gamma)]
            bench.run(IN_MEMORY, f"{BATCH}{size}", methods, 0.0, size)


def trained_heads(recipe: Recipe) -> list[str]:
    """The kinds of the recipe's heads that are trained, or that of the published one.

    Raises:
        MoexpError: none is.
    """
    if recipe.paths.head is not None:
        return [recipe.head.kind]
    trained = [kind for kind in HEADS if head_folder(with_head(recipe, kind)).exists()]
    if not trained:
        raise MoexpError(
            "no draft head is trained", where=str(head_folder(recipe)), valid="run: moexp train-drafter --recipe ..."
        )
    return trained


def main_methods(recipe: Recipe, heads: Collection[str]) -> list[Method]:
    """AR, and each drafter by confidence and by marginal cost."""
    section = recipe.ecospec
    return [
        Method(name=AR),
        *(method for kind in heads for method in _pair(recipe, kind, section.gamma)),
        _tree(section, "draft-expert", method_name(DRAFT_EXPERT, ""), "confidence", "none"),
        _tree(section, "draft-expert", method_name(DRAFT_EXPERT, ECOSPEC), "marginal-cost", "draft-router"),
    ]


def sweep_methods(recipe: Recipe, heads: Collection[str]) -> list[Method]:
    """Other selections of one head: by global cost, by the target's own routing, by earlier checkpoints of the
    predictor and with other epsilons.
    """
    section = recipe.ecospec
    if SWEEP_HEAD not in heads:
        return []
    rules = [
        (GLOBAL, "global-cost", "learned", section.epsilon),
        (ORACLE, "oracle", "oracle", section.epsilon),
        (CHEAPEST, "cheapest", "oracle", section.epsilon),
        *((f"{ECOSPEC} {level}", "marginal-cost", f"learned {level}", section.epsilon) for level in levels(recipe)),
        *((f"{EPSILON} {value:g}", "marginal-cost", "learned", value) for value in section.epsilon_sweep),
    ]
    return [
        _tree(section, HEAD, method_name(HEADS[SWEEP_HEAD], strategy), selector, predictor, epsilon=epsilon)
        for strategy, selector, predictor, epsilon in rules
    ]


def _pair(recipe: Recipe, kind: str, gamma: int) -> list[Method]:
    """A head by confidence and by marginal cost."""
    return [
        _tree(recipe.ecospec, HEAD, method_name(HEADS[kind], ""), "confidence", "none", gamma=gamma),
        _tree(recipe.ecospec, HEAD, method_name(HEADS[kind], ECOSPEC), "marginal-cost", "learned", gamma=gamma),
    ]


def _tree(
    section: EcoSpecSection,
    drafter: str,
    name: str,
    selector: str,
    predictor: str,
    *,
    gamma: int | None = None,
    epsilon: float | None = None,
) -> Method:
    """A drafter's trees with a selection; gamma and epsilon are the section's by default."""  # fmt: skip
    shape = TreeShape(section.steps, section.width, section.width)
    gamma = section.gamma if gamma is None else gamma
    plan = TreePlan(shape, selector, gamma, section.epsilon if epsilon is None else epsilon, predictor)
    return Method(drafter, tree=plan, name=name)


class _Bench:
    """Engines for all drafters, over a store with all experts in memory that all parts share, or over the disk's.

    Args:
        setup: its target is padded.
        stack: closes the shared store.
    """

    def __init__(self, setup: Setup, heads: Collection[str], folder: Path, stack: ExitStack) -> None:
        recipe, target = setup.recipe, setup.target
        self.setup, self.folder, self.stack = setup, folder, stack
        self.heads = {HEADS[kind]: open_draft_head(with_head(recipe, kind), target) for kind in heads}
        self.learned = {"learned": learned_predictor(recipe, target)}
        for level in levels(recipe):
            self.learned[f"learned {level}"] = learned_predictor(recipe, target, level)
        self.in_memory: ResidentStore | None = None
        self.warm: Callable[[Method], PromptEngine] | None = None
        self.share = 1.0  # of the new tokens in the recipe, that there is time for with experts in memory

    def run(self, platform: Platform, part: str, methods: list[Method], temperature: float, batch: int = 1) -> None:
        """Decodes all prompts by all methods into the platform's part; of a batch run, one full batch."""
        setup, section = self.setup, self.setup.recipe.ecospec
        on_disk, limit = platform.name == ON_DISK, None
        prompts = section.disk_prompts if on_disk else section.prompts
        tokens = section.disk_new_tokens if on_disk else section.max_new_tokens
        if part.startswith(BATCH):
            limit, tokens = max(section.batch_sweep), section.batch_new_tokens
            prompts = -(-limit // len(setup.recipe.bench.workloads))
        first = on_disk or part == T0  # of its kind: the ones that say how much there is time for
        warm = on_disk or self.warm is None
        plan = setup.plan(
            setup.jobs(prompts, limit),
            methods,
            tokens if first else max(1, round(tokens * self.share)),
            sampling=Sampling(temperature=temperature, seed=setup.recipe.seed),
            title=f"EcoSpec {platform.name} {part}",
            warmup=setup.tuning_jobs(setup.recipe.bench.warmup_prompts) if warm else (),
            batch=batch,
            slice_s=SLICE_S if on_disk else None,  # in memory, all methods share one oracle
        )
        folder = self.folder / platform.name / part
        measure_on(
            setup, platform, plan, folder,
            minutes=section.part_minutes if first else None,
            engines=self._engines if on_disk else self._warm_engines,
            store=None if on_disk else self._memory,
        )  # fmt: skip
        if first and not on_disk:
            self.share = (settled_tokens(folder) or tokens) / tokens

    def _memory(self) -> ResidentStore:
        """The shared store, opened when it is first needed."""
        if self.in_memory is None:
            opened = self.stack.enter_context(opened_store(self.setup.target, StoreSection(kind="resident")))
            assert isinstance(opened, ResidentStore)
            self.in_memory = opened
        return self.in_memory

    def _warm_engines(self, store: ExpertStore) -> Callable[[Method], PromptEngine]:
        """Engines over the shared store: opened once, warmed up by the first part that runs."""
        if self.warm is None:
            # The oracle's demands must not be counted in the records: the same weights under counters of its own.
            oracle = PromptEngine(self.setup.target, ResidentStore(self._memory().weights))
            self.warm = self._engines(store, {"oracle": lambda: OraclePredictor({}, oracle)})
        return self.warm

    def _engines(
        self, store: ExpertStore, others: Mapping[str, Callable[[], ExpertPredictor]] | None = None
    ) -> Callable[[Method], PromptEngine]:
        """One engine a drafter, all over the same store. Prompts come from memory where it holds the experts anyway:
        each engine has its own cache to fill.
        """
        predictors = {**self.learned, **(others or {})}
        plain = PromptEngine(self.setup.target, store, draft_experts=self.setup.experts, predictors=predictors)
        by_head = {
            name: PromptEngine(self.setup.target, store, draft_head=head, predictors=predictors)
            for name, head in self.heads.items()
        }
        for engine in (plain, *by_head.values()):
            engine.prefill_store = self.in_memory

        def engine_of(method: Method) -> PromptEngine:
            return by_head[parts_of(method.label)[0]] if method.drafter == HEAD else plain

        return engine_of


def levels(recipe: Recipe) -> list[str]:
    """Checkpoints of the predictor that were saved on the way to its last."""
    return sorted(path.name for path in predictor_folder(recipe).glob("near-*") if path.is_dir())


def _describe(recipe: Recipe, target: Target, folder: Path) -> None:
    """Keeps what the tables need to know of the target."""
    spec, index = target.spec, target.index
    resident = sum(value.numel() * value.element_size() for value in target.model.parameters() if not value.is_meta)
    atomic.write_json(folder / TARGET, {
        "name": recipe.name,
        "fingerprint": target_identity(find_target(recipe)),
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "num_shared": spec.num_shared,
        "layers": spec.num_layers,
        "moe_layers": len(spec.moe_layers),
        "max_positions": spec.max_positions,
        "expert_bytes": index.expert_bytes,
        "expert_width": spec.expert_width,
        "resident_bytes": resident,
        "gamma": recipe.ecospec.gamma,
        "epsilon": recipe.ecospec.epsilon,
    })  # fmt: skip
