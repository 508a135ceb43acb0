"""DraftExpert's speeds from its acceptance, costs and loading (Tables 1 to 5, Figure 2). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moexp import metrics
from moexp.audit.lines import Input, Line, derive, only, printed
from moexp.papers import Paper

NAME = "draftexpert"
TARGETS = {"DeepSeek-V2-Lite": "ds", "Moonlight-16B-A3B": "ml"}
PLATFORMS = {"CG": "cg", "MN": "mn"}
DRAFT_TOKENS = 4  # K of table 3
TOP_K = 6

CHOSEN = Input("k", TOP_K, "Table 1")
K = Input("K", DRAFT_TOKENS, "Table 3")


def places() -> Iterator[tuple[str, str, str]]:
    for target, short in TARGETS.items():
        for platform, name in PLATFORMS.items():
            yield target, platform, f"{short}.{name}"


def _cost_inputs(paper: Paper, target: str, platform: str, drafter: str, policy: str) -> list[Input]:
    """Acceptance a and cost c (Table 3), top-1's speed s over the target (Figure 2), verification cost v (Table 4)."""
    draft = only(paper.table(3).rows, target=target, platform=platform, drafter=drafter)
    verify = only(paper.table(4).rows, target=target, platform=platform, policy=policy)
    speed = only(paper.figures[2]["rows"], drafter="top-1")
    return [
        printed(draft, "acceptance", "Table 3", "a"),
        printed(draft, "cost", "Table 3", "c"),
        printed(speed, "draft_speedup", "Figure 2", "s"),
        printed(verify, "verify_cost", "Table 4", "v"),
    ]


def _cycle(a: float, c: float, s: float, v: float) -> float:
    return metrics.cycle_speedup(1 + DRAFT_TOKENS * a, DRAFT_TOKENS, c / s, v)


def cycles(paper: Paper) -> Iterator[Line]:
    """Speedup = (1 + K a) / (K c / s + v) of full blocks of K = 4 (Tables 2, 3, 4, Figure 2)."""
    policies = {"fixed": ("fixed", "fixed K = 4"), "confidence-expansion+prefetch": ("full", "K = 4 at full costs")}
    for policy, (short, words) in policies.items():
        for target, platform, place in places():
            row = only(paper.table(2).rows, target=target, platform=platform, method="draft-expert")
            note = "Figure 2 does not say of which target and platform s is"
            if short == "full":
                note += "; this policy's blocks are shorter than K, by how much is not printed"
            yield derive(
                f"de.cycle.{short}.{place}", NAME, f"Speedup of {target} on {platform}, {words}",
                "(1 + K a) / (K c / s + v)", _cycle, _cost_inputs(paper, target, platform, "draft-expert", policy),
                printed(row, "speedup", "Table 2"), unit="x", note=note,
            )  # fmt: skip


def truncated(paper: Paper) -> Iterator[Line]:
    """Draft tokens a cycle for which the full method's costs give Table 2's speedup, at Table 3's acceptance."""
    why = "neither its tokens/s nor the mean length of its blocks is printed"
    yield Line("de.cycle.truncated", NAME, "Speedup with truncation and without prefetch", "(1 + n a) / (n c / s + v)",
               (), None, note=why)  # fmt: skip
    for target, platform, place in places():
        row = only(paper.table(2).rows, target=target, platform=platform, method="draft-expert")
        inputs = _cost_inputs(paper, target, platform, "draft-expert", "confidence-expansion+prefetch")
        yield derive(
            f"de.block.{place}", NAME, f"Draft tokens a cycle, {target} on {platform}, full method",
            "n of S = (1 + n a) / (n c / s + v): (S v - 1) / (a - S c / s)",
            lambda a, c, s, v, speedup: (speedup * v - 1) / (a - speedup * c / s),
            [*inputs, printed(row, "speedup", "Table 2", "S")], unit="tokens",
            note="the paper prints no mean length of truncated blocks; a is taken from full blocks",
        )  # fmt: skip


def top_r(paper: Paper) -> Iterator[Line]:
    """Tokens/s of the best shared + top-r drafter with full blocks, r = 1, 2, 3 (Tables 2, 3, 4, Figure 2)."""
    rows = paper.table(2).rows
    for target, platform, place in places():
        ar = printed(only(rows, target=target, platform=platform, method="ar"), "tokens_per_s", "Table 2", "AR")
        lines = [
            derive(
                "", NAME, "", "max over r of AR (1 + K a) / (K c / s + v)",
                lambda a, c, s, v, rate: rate * _cycle(a, c, s, v),
                [*_cost_inputs(paper, target, platform, f"top-{r}", "fixed"), ar],
                printed(only(rows, target=target, platform=platform, method="top-r"), "tokens_per_s", "Table 2"),
                unit="tokens/s", note=f"r = {r}; which r Table 2 takes is not printed",
            )
            for r in (1, 2, 3)
        ]  # fmt: skip
        best = max(lines, key=lambda line: line.implied or 0.0)
        yield replace(best, id=f"de.top-r.{place}", what=f"Best top-r of {target} on {platform}, tokens/s")


def agreements(paper: Paper) -> Iterator[Line]:
    """Acceptance at K = 4 if every token agrees independently with Table 5's p, and the p that Table 3 needs."""
    stages = {"top-1 (untrained)": "top-1", "+ router": "draft-expert"}
    for target, short in TARGETS.items():
        for loss, drafter in stages.items():
            five = only(paper.table(5).rows, target=target, loss=loss)
            three = only(paper.table(3).rows, target=target, platform="CG", drafter=drafter)
            yield derive(
                f"de.accept.{short}.{drafter}", NAME, f"Acceptance of {drafter}, {target}, from agreement",
                "(p + p^2 + p^3 + p^4) / 4", metrics.expected_acceptance, [printed(five, "agreement", "Table 5", "p")],
                printed(three, "acceptance", "Table 3"),
                note="assumes that tokens agree independently with one p",
            )  # fmt: skip
        yield derive(
            f"de.agreement.{short}", NAME, f"Agreement that the draft expert's acceptance needs, {target}",
            "p of (p + p^2 + p^3 + p^4) / 4 = a", agreement_for, [printed(three, "acceptance", "Table 3", "a")],
            printed(five, "agreement", "Table 5"), note="assumes that tokens agree independently with one p",
        )  # fmt: skip


def agreement_for(acceptance: float) -> float:
    """The per-token agreement p with `metrics.expected_acceptance(p)` = acceptance, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if metrics.expected_acceptance(middle) < acceptance else (low, middle)
    return (low + high) / 2


def draft_costs(paper: Paper) -> Iterator[Line]:
    """What loading in proportion to r implies for drafting: a step costs c + L r / k (Figure 2, Tables 1, 3)."""
    figure = {row["drafter"]: row for row in paper.figures[2]["rows"]}
    speed = printed(figure["top-1"], "draft_speedup", "Figure 2", "s1")
    (mobile,) = [row for row in paper.table(1).rows if row["platform"] == "MN"]
    rates = [
        Input("resident", mobile["ar_tps_resident_reference"], "Table 1", 0.01),
        Input("staged", mobile["ar_tps_flash_staged"], "Table 1", 0.01),
    ]
    for r in (2, 3):
        drafter, more = f"top-{r}", Input("r", r, "Table 3")
        yield derive(
            f"de.draft.speed.{drafter}", NAME, f"Speed of {drafter} drafting over the target",
            "(1 + x) / (1 + x r / k) with x = (s1 - 1) / (1 - s1 / k)", lambda s, k, r: _draft_speed(s, k, r),
            [speed, CHOSEN, more], printed(figure[drafter], "draft_speedup", "Figure 2"), unit="x",
        )  # fmt: skip
        keys = {"target": "DeepSeek-V2-Lite", "drafter": drafter}
        found = {p: only(paper.table(3).rows, platform=p, **keys) for p in PLATFORMS}
        yield derive(
            f"de.draft.cost.{drafter}.cg", NAME, f"Cost of {drafter} over top-1, DeepSeek-V2-Lite on CG",
            "s1 / s_r", lambda one, other: one / other,
            [speed, printed(figure[drafter], "draft_speedup", "Figure 2", f"s{r}")],
            printed(found["CG"], "cost", "Table 3"), unit="x",
            note="Figure 2 averages over draft lengths and does not say of which target and platform it is",
        )  # fmt: skip
        yield derive(
            f"de.draft.cost.{drafter}.mn", NAME, f"Cost of {drafter} over top-1, DeepSeek-V2-Lite on MN",
            "(1 + x r / k) / (1 + x / k) with x = resident / staged - 1",
            lambda a, b, k, r: (1 + (a / b - 1) * r / k) / (1 + (a / b - 1) / k), [*rates, CHOSEN, more],
            printed(found["MN"], "cost", "Table 3"), unit="x",
            note="assumes that what loading adds to AR is all that grows with r",
        )  # fmt: skip
    yield derive(
        "de.resident", NAME, "Resident AR over staged AR on MN, beside the full method's speedup",
        "resident / staged", lambda a, b: a / b, rates,
        printed(only(paper.table(2).rows, target="DeepSeek-V2-Lite", platform="MN", method="draft-expert"),
                "speedup", "Table 2"),
        relation="<=", unit="x",
        note="what removing all loading would give without speculation; speculation also shares computing",
    )  # fmt: skip


def _draft_speed(speed: float, top_k: float, r: float) -> float:
    ratio = metrics.ratio_from_draft_speedup(speed, int(top_k))
    return (1 + ratio) / (1 + ratio * r / top_k)
