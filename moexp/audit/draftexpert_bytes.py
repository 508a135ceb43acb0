"""DraftExpert's bytes and unions of experts: link rates, weights, and uniform routing (Tables 1 to 4, Figure 1). Pure.

What the paper does not print of its targets is their published geometry, as inputs with that source.

Paper: DraftExpert Table 1; DraftExpert Table 2; DraftExpert Table 3; DraftExpert Table 4; DraftExpert Figure 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from moexp import metrics
from moexp.audit.draftexpert import (
    CHOSEN,
    DRAFT_TOKENS,
    NAME,
    PLATFORMS,
    TARGETS,
    TOP_K,
    mobile_rates,
    pairs,
    top_1_speed,
)
from moexp.audit.lines import Input, Line, cell, derive
from moexp.papers import Paper

K = Input("K", DRAFT_TOKENS, "Table 3")
LAYERS = Input("layers", 26, "published config: 27 layers, the first dense")
EXPERTS = Input("experts", 64, "Table 1")
EXPERT_PARAMS = Input("expert_params", 3 * 2048 * 1408, "published config: 3 x 2048 x 1408")
WEIGHT_BYTES = {"CG": Input("weight_bytes", 2, "BF16"), "MN": Input("weight_bytes", 0.5625, "Q4_0: 18 bytes for 32")}
PEAKS = {
    "CG": Input("peak", 31.5, "PCIe 4.0 x16 (peak)"),
    "MN": Input("peak", 5.8, "UFS 4.0, 2 lanes of 23.2 Gb/s (peak)"),
}


def unions(paper: Paper) -> Iterator[Line]:
    """Layer-experts of K draft tokens against independent uniform routing: layers N (1 - (1 - r/N)^K) (Table 3)."""
    for target, short in TARGETS.items():
        for drafter, r in {"top-1": 1, "top-2": 2, "top-3": 3, "draft-expert": 1}.items():
            yield derive(
                NAME, "layers N (1 - (1 - r / N)^K)", [LAYERS, EXPERTS, Input("r", r, "Table 3"), K],
                cell(paper, 3, "unique_draft", target=target, platform="CG", drafter=drafter), relation="<=",
                id=f"de.unique.{short}.{drafter}", what=f"Unique layer-experts of {drafter}, {target}, if uniform",
                given={"N": "experts"},
            )  # fmt: skip
    ratios = {
        "CG": ("(s1 - 1) / (1 - s1 / k)", [top_1_speed(paper, "s1")]),
        "MN": ("resident / staged - 1", mobile_rates(paper)),
    }
    limit = Input("uniform", metrics.uniform_union(64, TOP_K, DRAFT_TOKENS + 1), "uniform routing of K + 1 tokens")
    for platform, (ratio, inputs) in ratios.items():
        cost = cell(paper, 4, "verify_cost", "v", target="DeepSeek-V2-Lite", platform=platform, policy="fixed")
        yield derive(
            NAME, f"E = k (v (1 + x) - 1) / x with x = {ratio}", [cost, CHOSEN, *inputs], limit, relation=">=",
            id=f"de.verify.{PLATFORMS[platform]}",
            what=f"Experts a layer that fixed blocks' cost needs, DeepSeek-V2-Lite on {platform}",
            note=f"assumes that loading alone grows with the block; {TOP_K * (DRAFT_TOKENS + 1)} is the most that "
            "K + 1 tokens can choose",
        )  # fmt: skip


def links(paper: Paper) -> Iterator[Line]:
    """GB/s that AR's rate needs if every token loads its experts: layers k bytes x tokens/s (Table 2)."""
    token = [LAYERS, CHOSEN, EXPERT_PARAMS]
    for target, platform, ends in pairs():
        rate = cell(paper, 2, "tokens_per_s", "AR", target=target, platform=platform, method="ar")
        yield derive(
            NAME, "layers k expert_params weight_bytes AR / 1e9", [*token, WEIGHT_BYTES[platform], rate],
            PEAKS[platform], relation=">=", id=f"de.link.{ends}", what=f"Link rate of AR, {target} on {platform}",
            unit="GB/s",
            note="no expert is kept from one token to the next, as the setup says; the paper names no link "
            "rate, so the peaks are of the GPU's interface and of phones of that generation",
        )  # fmt: skip
    resident, staged = mobile_rates(paper)
    yield derive(
        NAME, "layers k expert_params weight_bytes / (1 / staged - 1 / resident) / 1e9",
        [*token, WEIGHT_BYTES["MN"], staged, resident], PEAKS["MN"], relation=">=", id="de.link.added",
        what="Link rate on MN if loading takes only the time that it adds, DeepSeek-V2-Lite", unit="GB/s",
        note="loads that overlap computing need less",
    )  # fmt: skip


def weights(paper: Paper) -> Iterator[Line]:
    """Figure 1(a)'s sizes of DeepSeek-V2-Lite from its geometry."""
    figure = paper.figures[1]
    params = Input("routed", figure["routed_params_b"], "Figure 1", 0.1)
    gib, other = (
        Input(name, figure[key], "Figure 1", 0.1)
        for name, key in (("gib", "routed_bf16_gib"), ("other", "non_routed_gib"))
    )
    yield derive(
        NAME, "layers experts expert_params / 1e9", [LAYERS, EXPERTS, EXPERT_PARAMS], params,
        id="de.weights.params", what="Routed parameters, billions", unit="B",
    )  # fmt: skip
    yield derive(
        NAME, "2 routed 1e9 / 2^30", [params], gib, id="de.weights.gib", what="Routed weights in BF16", unit="GiB"
    )
    yield derive(
        NAME, "gib / (gib + other)", [gib, other], Input("share", figure["routed_share"], "Figure 1", 0.001),
        id="de.weights.share", what="Routed share of all weights",
    )  # fmt: skip
    yield derive(
        NAME, "k / experts", [CHOSEN, EXPERTS], Input("share", paper.facts["active_share"], "Background", 0.001),
        id="de.weights.active", what="Share of the routed pool that a token activates",
    )  # fmt: skip
