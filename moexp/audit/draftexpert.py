"""DraftExpert's speeds from its acceptance, costs and loading, and what it prints twice (Tables 1 to 5). Pure.

Paper: DraftExpert Table 2; DraftExpert Table 3; DraftExpert Table 4; DraftExpert Table 5; DraftExpert Figure 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moexp.audit.lines import Input, Line, cell, derive, farthest, only, printed, same
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


# --- figures that stand in two places ---


def repeated(paper: Paper) -> Iterator[Line]:
    """Figures that stand in two places, and means of rows (abstract, Tables 1 to 5)."""
    full = [({"target": t, "platform": p}, cell(paper, 2, "speedup", target=t, platform=p, method="draft-expert"))
            for t, p, _ in pairs()]  # fmt: skip
    yield farthest("de.speedup", "Speedup of the full method from tokens/s", [
        derive(
            NAME, "DE / AR",
            [cell(paper, 2, "tokens_per_s", name, method=method, **keys)
             for name, method in (("DE", "draft-expert"), ("AR", "ar"))],
            speedup, unit="x", subject=f"{keys['target']} on {keys['platform']}",
        )
        for keys, speedup in full
    ])  # fmt: skip
    yield derive(
        NAME, "mean of the four",
        [replace(speedup, source=f"Table 2, {keys['target']} {keys['platform']}") for keys, speedup in full],
        Input("mean", paper.facts["mean_speedup"], "Table 2, Avg. and abstract", 0.01), unit="x",
        id="de.speedup.mean", what="Mean speedup",
    )  # fmt: skip
    policy = {"platform": "CG", "policy": FULL}
    hits = {t: cell(paper, 4, "prefetch_hit", target=t, **policy) for t in TARGETS}
    agreements = [cell(paper, 5, "agreement", target=t, loss="+ router") for t in TARGETS]
    accepted = [cell(paper, 3, "acceptance", target=t, platform="CG", drafter="draft-expert") for t in TARGETS]
    yield farthest("de.waste", "Prefetch waste as what is left of hits", [
        derive(NAME, "1 - hit", [replace(hit, name="hit")], cell(paper, 4, "prefetch_waste", target=t, **policy),
               subject=t)
        for t, hit in hits.items()
    ])  # fmt: skip
    yield farthest("de.hit", "Prefetch hits of Tables 4 and 5", [
        same(NAME, hit, cell(paper, 5, "prefetch_hit", target=t, loss="+ router"), subject=t) for t, hit in hits.items()
    ])  # fmt: skip
    yield _range(paper, "acceptance", accepted)
    yield _range(paper, "acceptance", agreements)
    yield _range(paper, "prefetch_hit", list(hits.values()))
    yield same(
        NAME, replace(mobile_rates(paper)[1], name="AR"),
        cell(paper, 2, "tokens_per_s", target="DeepSeek-V2-Lite", platform="MN", method="ar"), id="de.ar",
        what="AR tokens/s of Tables 1 and 2, DeepSeek-V2-Lite on MN",
    )  # fmt: skip
    yield farthest("de.figure-2", "Acceptance at K = 4 beside Figure 2's average over draft lengths", [
        same(
            NAME, cell(paper, 3, "acceptance", target="DeepSeek-V2-Lite", platform="CG", drafter=row["drafter"]),
            Input("acceptance", row["acceptance"], "Figure 2", 0.01), subject=row["drafter"],
            note="the lengths that Figure 2 averages over are not printed",
        )
        for row in paper.figures[2]["rows"]
    ])  # fmt: skip


def _range(paper: Paper, fact: str, cells: Sequence[Input]) -> Line:
    """The ends of a range in the abstract against the least and the most of a table's cells."""
    ranked = sorted(cells, key=lambda one: one.value)
    ends = zip(("low", "high"), (ranked[0], ranked[-1]), paper.facts["abstract"][fact], strict=True)
    table = cells[0].source
    return farthest(f"de.abstract.{table[-1]}", f"The abstract's range of {fact} beside {table}", [
        same(NAME, figure, Input("end", value, "the abstract", 0.01), subject=f"its {name} end")
        for name, figure, value in ends
    ])  # fmt: skip
