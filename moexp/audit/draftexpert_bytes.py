"""DraftExpert's bytes and unions of experts: link rates, weights, and uniform routing (Tables 1 to 4, Figure 1). Pure.

What the paper does not print of its targets is their published geometry, as inputs with that source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moexp import metrics
from moexp.audit.draftexpert import CHOSEN, DRAFT_TOKENS, NAME, PLATFORMS, TARGETS, TOP_K, K, places
from moexp.audit.lines import Input, Line, derive, only, printed
from moexp.papers import Paper

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
            row = only(paper.table(3).rows, target=target, platform="CG", drafter=drafter)
            yield derive(
                f"de.unique.{short}.{drafter}", NAME, f"Unique layer-experts of {drafter}, {target}, if uniform",
                "layers N (1 - (1 - r / N)^K)",
                lambda layers, n, r, k: layers * metrics.uniform_union(int(n), int(r), k),
                [LAYERS, EXPERTS, Input("r", r, "Table 3"), K], printed(row, "unique_draft", "Table 3"), relation="<=",
            )  # fmt: skip
    figure = only(paper.figures[2]["rows"], drafter="top-1")
    mobile = only(paper.table(1).rows, platform="MN")
    ways: dict[str, tuple[str, list[Input], Callable[..., float]]] = {
        "CG": ("(s1 - 1) / (1 - s1 / k)", [printed(figure, "draft_speedup", "Figure 2", "s1")],
               lambda s: metrics.ratio_from_draft_speedup(s, TOP_K)),
        "MN": ("resident / staged - 1", [Input("resident", mobile["ar_tps_resident_reference"], "Table 1", 0.01),
               Input("staged", mobile["ar_tps_flash_staged"], "Table 1", 0.01)], lambda a, b: a / b - 1),
    }  # fmt: skip
    limit = Input("uniform", metrics.uniform_union(64, TOP_K, DRAFT_TOKENS + 1), "uniform routing of K + 1 tokens")
    for platform, (text, inputs, ratio) in ways.items():
        row = only(paper.table(4).rows, target="DeepSeek-V2-Lite", platform=platform, policy="fixed")
        yield derive(
            f"de.verify.{PLATFORMS[platform]}", NAME,
            f"Experts a layer that fixed blocks' cost needs, DeepSeek-V2-Lite on {platform}",
            f"E = k (v (1 + x) - 1) / x with x = {text}", _experts_of_cost(ratio),
            [printed(row, "verify_cost", "Table 4", "v"), CHOSEN, *inputs], limit, relation=">=",
            note=f"assumes that loading alone grows with the block; {TOP_K * (DRAFT_TOKENS + 1)} is the most that "
            "K + 1 tokens can choose",
        )  # fmt: skip


def _experts_of_cost(ratio: Callable[..., float]) -> Callable[..., float]:
    def experts(cost: float, top_k: float, *values: float) -> float:
        x = ratio(*values)
        return top_k * (cost * (1 + x) - 1) / x

    return experts


def links(paper: Paper) -> Iterator[Line]:
    """GB/s that AR's rate needs if every token loads its experts: layers k bytes x tokens/s (Table 2)."""
    token = [LAYERS, CHOSEN, EXPERT_PARAMS]
    for target, platform, place in places():
        row = only(paper.table(2).rows, target=target, platform=platform, method="ar")
        yield derive(
            f"de.link.{place}", NAME, f"Link rate of AR, {target} on {platform}",
            "layers k expert_params weight_bytes AR / 1e9", lambda n, k, p, b, rate: n * k * p * b * rate / 1e9,
            [*token, WEIGHT_BYTES[platform], printed(row, "tokens_per_s", "Table 2", "AR")], PEAKS[platform],
            relation=">=", unit="GB/s",
            note="no expert is kept from one token to the next, as the setup says; the paper names no link "
            "rate, so the peaks are of the GPU's interface and of phones of that generation",
        )  # fmt: skip
    mobile = only(paper.table(1).rows, platform="MN")
    yield derive(
        "de.link.added", NAME, "Link rate on MN if loading takes only the time that it adds, DeepSeek-V2-Lite",
        "layers k expert_params weight_bytes / (1 / staged - 1 / resident) / 1e9",
        lambda n, k, p, b, staged, resident: n * k * p * b / (1 / staged - 1 / resident) / 1e9,
        [*token, WEIGHT_BYTES["MN"], Input("staged", mobile["ar_tps_flash_staged"], "Table 1", 0.01),
         Input("resident", mobile["ar_tps_resident_reference"], "Table 1", 0.01)],
        PEAKS["MN"], relation=">=", unit="GB/s", note="loads that overlap computing need less",
    )  # fmt: skip


def weights(paper: Paper) -> Iterator[Line]:
    """Figure 1(a)'s sizes of DeepSeek-V2-Lite from its geometry."""
    figure = paper.figures[1]
    routed, rest = "routed", Input("other", figure["non_routed_gib"], "Figure 1", 0.1)
    params = Input(routed, figure["routed_params_b"], "Figure 1", 0.1)
    yield derive(
        "de.weights.params", NAME, "Routed parameters, billions", "layers experts expert_params / 1e9",
        lambda n, e, p: n * e * p / 1e9, [LAYERS, EXPERTS, EXPERT_PARAMS], params, unit="B",
    )  # fmt: skip
    yield derive(
        "de.weights.gib", NAME, "Routed weights in BF16", "2 routed 1e9 / 2^30", lambda b: 2 * b * 1e9 / 2**30,
        [params], Input("gib", figure["routed_bf16_gib"], "Figure 1", 0.1), unit="GiB",
    )  # fmt: skip
    yield derive(
        "de.weights.share", NAME, "Routed share of all weights", "gib / (gib + other)", lambda a, b: a / (a + b),
        [Input("gib", figure["routed_bf16_gib"], "Figure 1", 0.1), rest],
        Input("share", figure["routed_share"], "Figure 1", 0.001),
    )  # fmt: skip
    yield derive(
        "de.weights.active", NAME, "Share of the routed pool that a token activates", "k / experts",
        lambda k, e: k / e, [CHOSEN, EXPERTS], Input("share", paper.facts["active_share"], "Background", 0.001),
    )  # fmt: skip
