"""DraftExpert's speeds from its acceptance, costs and loading (Tables 1 to 5, Figure 2). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moexp.audit.lines import Input, Line, cell, derive, only, printed
from moexp.papers import Paper

NAME = "draftexpert"
TARGETS = {"DeepSeek-V2-Lite": "ds", "Moonlight-16B-A3B": "ml"}
PLATFORMS = {"CG": "cg", "MN": "mn"}
DRAFT_TOKENS = 4  # K of table 3
TOP_K = 6

CHOSEN = Input("k", TOP_K, "Table 1")
CYCLE = "(1 + K a) / (K c / s + v)"
FULL = "confidence-expansion+prefetch"
INDEPENDENT = "assumes that tokens agree independently with one p"


def pairs() -> Iterator[tuple[str, str, str]]:
    """Target, platform, and both in short."""
    for target, short in TARGETS.items():
        for platform, name in PLATFORMS.items():
            yield target, platform, f"{short}.{name}"


def top_1_speed(paper: Paper, name: str) -> Input:
    """Top-1 drafting's speed over the target (Figure 2)."""
    return printed(only(paper.figures[2]["rows"], drafter="top-1"), "draft_speedup", "Figure 2", name)


def mobile_rates(paper: Paper) -> list[Input]:
    """AR's tokens/s on MN, all weights resident and experts staged from flash (Table 1)."""
    row = only(paper.table(1).rows, platform="MN")
    columns = {"resident": "ar_tps_resident_reference", "staged": "ar_tps_flash_staged"}
    return [Input(name, row[column], "Table 1", 0.01) for name, column in columns.items()]


def _cost_inputs(paper: Paper, target: str, platform: str, drafter: str, policy: str) -> list[Input]:
    """Acceptance a and cost c (Table 3), top-1's speed s over the target (Figure 2), verification cost v (Table 4)."""
    draft = {"target": target, "platform": platform, "drafter": drafter}
    return [
        cell(paper, 3, "acceptance", "a", **draft),
        cell(paper, 3, "cost", "c", **draft),
        top_1_speed(paper, "s"),
        cell(paper, 4, "verify_cost", "v", target=target, platform=platform, policy=policy),
    ]


def cycles(paper: Paper) -> Iterator[Line]:
    """Speedup = (1 + K a) / (K c / s + v) of full blocks of K = 4 (Tables 2, 3, 4, Figure 2)."""
    policies = {"fixed": ("fixed", "fixed K = 4"), FULL: ("full", "K = 4 at full costs")}
    for policy, (short, words) in policies.items():
        for target, platform, ends in pairs():
            note = "Figure 2 does not say of which target and platform s is"
            if short == "full":
                note += "; this policy's blocks are shorter than K, by how much is not printed"
            yield derive(
                NAME, CYCLE, _cost_inputs(paper, target, platform, "draft-expert", policy),
                cell(paper, 2, "speedup", target=target, platform=platform, method="draft-expert"),
                id=f"de.cycle.{short}.{ends}", what=f"Speedup of {target} on {platform}, {words}",
                given={"K": str(DRAFT_TOKENS)}, unit="x", note=note,
            )  # fmt: skip


def truncated(paper: Paper) -> Iterator[Line]:
    """Draft tokens a cycle for which the full method's costs give Table 2's speedup, at Table 3's acceptance."""
    why = "neither its tokens/s nor the mean length of its blocks is printed"
    yield Line("de.cycle.truncated", NAME, "Speedup with truncation and without prefetch", "(1 + n a) / (n c / s + v)",
               (), None, note=why)  # fmt: skip
    for target, platform, ends in pairs():
        speedup = cell(paper, 2, "speedup", "S", target=target, platform=platform, method="draft-expert")
        yield derive(
            NAME, "n of S = (1 + n a) / (n c / s + v): (S v - 1) / (a - S c / s)",
            [*_cost_inputs(paper, target, platform, "draft-expert", FULL), speedup],
            id=f"de.block.{ends}", what=f"Draft tokens a cycle, {target} on {platform}, full method", unit="tokens",
            note="the paper prints no mean length of truncated blocks; a is taken from full blocks",
        )  # fmt: skip


def top_r(paper: Paper) -> Iterator[Line]:
    """Tokens/s of the best shared + top-r drafter with full blocks, r = 1, 2, 3 (Tables 2, 3, 4, Figure 2)."""
    for target, platform, ends in pairs():
        keys = {"target": target, "platform": platform}
        ar = cell(paper, 2, "tokens_per_s", "AR", method="ar", **keys)
        lines = [
            derive(
                NAME, f"AR {CYCLE}", [*_cost_inputs(paper, target, platform, f"top-{r}", "fixed"), ar],
                cell(paper, 2, "tokens_per_s", method="top-r", **keys), given={"K": str(DRAFT_TOKENS)},
                id=f"de.top-r.{ends}", what=f"Best top-r of {target} on {platform}, tokens/s", unit="tokens/s",
                note=f"r = {r}; which r Table 2 takes is not printed",
            )
            for r in (1, 2, 3)
        ]  # fmt: skip
        best = max(lines, key=lambda line: line.implied or 0.0)
        yield replace(best, formula=f"max over r of {best.formula}")


def agreements(paper: Paper) -> Iterator[Line]:
    """Acceptance at K = 4 if every token agrees independently with Table 5's p, and the p that Table 3 needs."""
    mean = "(p + p^2 + p^3 + p^4) / 4"
    for target, short in TARGETS.items():
        for loss, drafter in {"top-1 (untrained)": "top-1", "+ router": "draft-expert"}.items():
            agreement = cell(paper, 5, "agreement", "p", target=target, loss=loss)
            accepted = cell(paper, 3, "acceptance", target=target, platform="CG", drafter=drafter)
            yield derive(
                NAME, mean, [agreement], accepted, id=f"de.accept.{short}.{drafter}",
                what=f"Acceptance of {drafter}, {target}, from agreement", note=INDEPENDENT,
            )  # fmt: skip
        yield derive(
            NAME, f"p of {mean} = a", [replace(accepted, name="a")], replace(agreement, name="agreement"),
            id=f"de.agreement.{short}", what=f"Agreement that the draft expert's acceptance needs, {target}",
            note=INDEPENDENT,
        )  # fmt: skip


def draft_costs(paper: Paper) -> Iterator[Line]:
    """What loading in proportion to r implies for drafting: a step costs c + L r / k (Figure 2, Tables 1, 3)."""
    speed, rates = top_1_speed(paper, "s1"), mobile_rates(paper)
    for r in (2, 3):
        drafter, more = f"top-{r}", Input("r", r, "Table 3")
        figure = printed(only(paper.figures[2]["rows"], drafter=drafter), "draft_speedup", "Figure 2")
        costs = {
            platform: cell(paper, 3, "cost", target="DeepSeek-V2-Lite", platform=platform, drafter=drafter)
            for platform in PLATFORMS
        }
        yield derive(
            NAME, "(1 + x) / (1 + x r / k) with x = (s1 - 1) / (1 - s1 / k)", [speed, CHOSEN, more], figure,
            id=f"de.draft.speed.{drafter}", what=f"Speed of {drafter} drafting over the target", unit="x",
        )  # fmt: skip
        yield derive(
            NAME, "s1 / s_r", [speed, replace(figure, name=f"s{r}")], costs["CG"], given={"s_r": f"s{r}"},
            id=f"de.draft.cost.{drafter}.cg", what=f"Cost of {drafter} over top-1, DeepSeek-V2-Lite on CG", unit="x",
            note="Figure 2 averages over draft lengths and does not say of which target and platform it is",
        )  # fmt: skip
        yield derive(
            NAME, "(1 + x r / k) / (1 + x / k) with x = resident / staged - 1", [*rates, CHOSEN, more], costs["MN"],
            id=f"de.draft.cost.{drafter}.mn", what=f"Cost of {drafter} over top-1, DeepSeek-V2-Lite on MN", unit="x",
            note="assumes that what loading adds to AR is all that grows with r",
        )  # fmt: skip
    yield derive(
        NAME, "resident / staged", rates,
        cell(paper, 2, "speedup", target="DeepSeek-V2-Lite", platform="MN", method="draft-expert"), relation="<=",
        id="de.resident", what="Resident AR over staged AR on MN, beside the full method's speedup", unit="x",
        note="what removing all loading would give without speculation; speculation also shares computing",
    )  # fmt: skip
