"""`moexp train-draft-expert`: both stages of distillation, and what the draft experts reach on held-out text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moexp.base import ranks
from moexp.config.learn import DraftSection
from moexp.config.recipe import Recipe
from moexp.learn.core.experts import by_gate, gated_matrices, hooked
from moexp.learn.core.loop import UNSAVED, Run, Schedule, followed
from moexp.learn.draft_expert.distill import DistillSettings, distill, warm_up
from moexp.learn.draft_expert.losses import Weights
from moexp.learn.draft_expert.measure import held_contexts, measure_acceptance, measure_agreement
from moexp.learn.draft_expert.path import DraftPath
from moexp.learn.setup import TrainingSetup, open_setup
from moexp.target.draft_expert import DraftExperts, save_draft_experts

CONTEXT_STARTS = tuple(range(64, 256, 24))  # positions of a held-out row at which blocks start
AGREEMENT_ROWS = 12  # every position of a row counts, so few rows will do
START_TOKENS = 4096  # tokens that decide which neurons a draft expert starts from


@torch.no_grad()
def start_from_neurons(path: DraftPath, experts: DraftExperts, rows_BL: Tensor) -> None:
    """Copies neurons of the routed experts, those that matter most beyond top-1, into the draft experts, in place.

    A neuron n of expert e contributes g_e a_n d_n where e is chosen but not first. The W of most energy are taken;
    each down column is scaled by sum(g a^2) / sum(a^2), the least-squares stand-in for the gate.
    """
    blocks = {layer: path.model.model.layers[layer].mlp for layer in experts.layers}
    inputs: dict[nn.Module, Tensor] = {}

    def capture(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[block] = args[0].flatten(0, 1)

    with hooked(blocks.values(), capture, before=True):
        path.model.model(input_ids=rows_BL.long().to(path.model.device), use_cache=False)
    for layer, block in blocks.items():
        hidden_TH = inputs.pop(block)
        gate_up_EJH, down_EHI = gated_matrices(getattr(block, path.family.experts))
        _, weight_Tk, index_Tk = getattr(block, path.family.router)(hidden_TH)
        weight_Tk, index_Tk = by_gate(weight_Tk, index_Tk)
        weight_Tk[:, 0] = 0.0  # the draft path has the top-1 expert already
        gates_TE = weight_Tk.new_zeros(len(hidden_TH), path.spec.num_experts, dtype=torch.float32)
        gates_TE.scatter_(1, index_Tk, weight_Tk.float())
        energy_EI, factor_EI = [], []
        for expert in range(path.spec.num_experts):
            gate_TI, up_TI = F.linear(hidden_TH, gate_up_EJH[expert]).float().chunk(2, dim=-1)
            square_TI = (F.silu(gate_TI) * up_TI).square()
            gated_I = gates_TE[:, expert] @ square_TI
            factor_EI.append(gated_I / square_TI.sum(0).clamp_min(1e-12))
            energy_EI.append(gates_TE[:, expert].square() @ square_TI * down_EHI[expert].float().square().sum(0))
        best_W = torch.stack(energy_EI).flatten().argsort(descending=True, stable=True)[: experts.width]
        gate_up_E2IH = gate_up_EJH.unflatten(1, (2, -1))
        draft: Any = experts.experts[str(layer)]
        count = len(best_W)
        draft.gate_up[:count] = gate_up_E2IH[:, 0].flatten(0, 1)[best_W].float()
        draft.gate_up[experts.width : experts.width + count] = gate_up_E2IH[:, 1].flatten(0, 1)[best_W].float()
        down_NH = down_EHI.transpose(1, 2).flatten(0, 1)[best_W].float()
        draft.down[:, :count] = (down_NH * torch.stack(factor_EI).flatten()[best_W][:, None]).T


def settings_of(section: DraftSection, seed: int) -> DistillSettings:
    """The section's settings: 15% of a time cap goes to the warm-up."""
    cap = section.max_minutes
    terms = {
        name: getattr(section, name).weight if getattr(section, name).enabled else 0.0
        for name in ("logit", "token", "residual", "router")
    }
    return DistillSettings(
        warmup=Schedule(section.warmup_steps, section.warmup_lr, warmup=5, max_minutes=cap and cap * 0.15),
        main=Schedule(section.steps, section.lr, warmup=5, max_minutes=cap and cap * 0.85),
        weights=Weights(**terms, temperature=section.logit.temperature),
        block=section.block_length,
        seed=seed,
        **section.model_dump(include={"context", "rows", "warmup_rows", "optimizer"}),
    )


def fit(
    setup: TrainingSetup, section: DraftSection, seed: int, *, label: str = "Distil", run: Run = UNSAVED
) -> tuple[DraftExperts, dict[str, Any] | None]:
    """New draft experts, trained, and the metrics of the last step; `label` names the stages in the progress."""
    settings = settings_of(section, seed)
    torch.manual_seed(seed)
    plain = DraftPath(setup.model, None)
    experts = DraftExperts(plain.spec.hidden_size, section.width, plain.spec.moe_layers).to(setup.model.device)
    if section.init == "neurons":
        rows = max(1, START_TOKENS // setup.train_NL.shape[1])
        start_from_neurons(plain, experts, setup.train_NL[:rows])
    path = DraftPath(setup.model, experts)
    folder, last = run.checkpoint, None
    stages = [("warm-up", warm_up, settings.warmup, "residual"), ("end-to-end", distill, settings.main, "kl")]
    if ranks.on_main(lambda: folder is not None and (folder / "end-to-end").exists()):
        stages = stages[1:]  # its checkpoint already holds what stage one learned
    for name, train_stage, schedule, shown in stages:
        if schedule.steps:
            log: list[dict[str, Any]] = []
            with followed(f"{label}, {name}", schedule.steps, shown, log=log) as on_step:
                stage_run = Run(folder and folder / name, run.identity, on_step)
                train_stage(path, setup.train_NL, settings, stage_run)
            last = {"stage": name, **log[-1]} if log else last
    return experts, last


def context_starts(length: int) -> list[int]:
    """The `CONTEXT_STARTS` inside rows of `length` tokens, or their middle."""
    return [start for start in CONTEXT_STARTS if start <= length] or [length // 2]


def measure(setup: TrainingSetup, experts: DraftExperts | None, top_r: int = 1) -> dict[str, Any]:
    """Agreement, KL, router agreement and acceptance on the held-out rows."""
    held = experts.to(setup.model.dtype) if experts is not None else None
    path = DraftPath(setup.model, held, top_r=top_r, same_kernels=True)
    agreement = measure_agreement(path, setup.held_NL[:AGREEMENT_ROWS])
    starts = context_starts(setup.held_NL.shape[1])
    if setup.contexts is None:
        setup.contexts = held_contexts(path, setup.held_NL, starts)
    acceptance = measure_acceptance(path, setup.held_NL, starts, contexts=setup.contexts)
    return {**asdict(agreement), **asdict(acceptance)}


def train_draft_expert(recipe: Recipe, target: Path, out: Path, *, provenance: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves the recipe's draft experts for the target in `target`; returns what was measured."""
    setup = open_setup(recipe, target, out)
    identity = f"{setup.identity}:{recipe.digest('draft', 'seed')}"
    experts, last = fit(setup, recipe.draft, recipe.seed, run=Run(setup.state, identity))

    def measured() -> dict[str, Any]:
        metrics = {f"top-{r}": measure(setup, None, top_r=r) for r in (1, 2, 3)}
        return {**metrics, "draft-expert": measure(setup, experts)}

    def save(metrics: dict[str, Any]) -> None:
        details = {
            "metrics": metrics,
            "training": {"tokens": setup.train_NL.numel(), "last": last},
            "recipe": recipe.draft.model_dump(mode="json"),
            "provenance": provenance,
        }
        save_draft_experts(out, experts.to(torch.bfloat16), setup.identity, details)

    return setup.finish(measured, save)
