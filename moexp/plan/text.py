"""A plan as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from moexp.config.recipe import Recipe
from moexp.plan.memory import (
    DRAFT_EXPERT,
    KV_TOKENS,
    Part,
    Place,
    compute_place,
    count,
    decoding_parts,
    disk_parts,
    kept_experts,
    packed_bytes,
    sizes_of,
    training_bytes,
)
from moexp.plan.shape import Shape
from moexp.plan.speed import Rate, Speed

WIDTH = 80
_NAME, _VALUE = 27, 9
_LINE_GBIT = 1.0  # of the network, for the time to fetch


def plan_text(recipe: Recipe, shape: Shape, speeds: Sequence[Speed]) -> str:
    """The whole plan; ends in a newline."""
    sections = [
        _head(recipe, shape),
        _sizes(recipe, shape),
        _memory(recipe, shape),
        _disk(recipe, shape),
        *(_speed(speed, recipe) for speed in speeds),
        _legend(speeds),
        _time(recipe, shape, speeds),
    ]
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _head(recipe: Recipe, shape: Shape) -> Iterator[str]:
    geometry = shape.geometry
    shared = f" and {geometry.shared_experts} shared" if geometry.shared_experts else ", none shared"
    yield f"{recipe.name}: {shape.place}"
    yield from _wrapped(
        f"{geometry.layers} layers, {geometry.moe_layers} of them with {geometry.experts} routed experts "
        f"(top-{geometry.top_k}){shared}; hidden {geometry.hidden}, expert width {geometry.expert_width}"
    )
    yield from _wrapped(f"from {geometry.source}; nothing was fetched or loaded")


def _sizes(recipe: Recipe, shape: Shape) -> Iterator[str]:
    geometry, sizes = shape.geometry, sizes_of(shape, recipe)
    share = geometry.routed_params / (geometry.routed_params + geometry.loaded_params)
    known = "counted" if shape.counted else "calculated"
    yield "Sizes"
    yield from _row(
        "checkpoint", amount(shape.checkpoint_bytes), f"{count(geometry.checkpoint_params)} weights, {known}"
    )
    yield from _row(
        "routed experts", amount(sizes.routed), f"{share:.1%} of the weights, {geometry.layer_experts:,} experts"
    )
    three = f"3 x {geometry.hidden} x {geometry.expert_width}"
    yield from _row("one of them", amount(sizes.stored), f"{three} in {geometry.precision}")
    yield from _row("all else, loaded", amount(sizes.loaded), f"{count(geometry.loaded_params)} weights")
    if recipe.decode.drafter == DRAFT_EXPERT:
        yield from _row("draft experts", amount(sizes.draft), f"{geometry.moe_layers} of width {recipe.draft.width}")
    if sizes.kv:
        yield from _row(f"KV of {KV_TOKENS:,} tokens", amount(sizes.kv), "")
    yield from _loads(recipe, shape)


def _memory(recipe: Recipe, shape: Shape) -> Iterator[str]:
    store, here = recipe.store, compute_place(recipe)
    yield f"Memory to decode (store.kind {store.kind}, store.policy {store.policy})"
    parts = decoding_parts(shape, recipe)
    for part in parts:
        yield from _row(part.what, amount(part.size), f"{part.place:<5}{part.how}")
    for place in ("host", "GPU"):
        if any(part.place == place for part in parts):
            aside = "activations and libraries aside"
            if recipe.decode.drafter == "head":
                aside = "draft head, expert predictor, " + aside
            yield from _row(f"needed, {place}", amount(_total(parts, place)), aside)
    if here == "GPU":
        without = amount(sum(part.size for part in parts) + packed_bytes(shape, recipe))
        yield from _row("needed without a GPU", without, "all of it in host memory, packed copies too")
    size, how = training_bytes(shape, recipe)
    yield from _row("to train", amount(size), f"at least, the whole target is held: {how}, and activations")


def _disk(recipe: Recipe, shape: Shape) -> Iterator[str]:
    parts = disk_parts(shape, recipe)
    yield "Disk"
    for part in parts:
        yield from _row(part.what, amount(part.size), part.how)
    yield from _row("needed", amount(_total(parts, "disk")), "corpora, traces and results aside")


def _speed(speed: Speed, recipe: Recipe) -> Iterator[str]:
    platform = speed.platform
    yield from _wrapped(f"Speed on {platform.name}, tokens/s: {platform.summary}; constants: {platform.tag}")
    link = f"{platform.link.bandwidth_gb_s:,.1f} GB/s"
    kept = f", {speed.held:.0%} kept there (uniform routing)" if speed.held else ""
    yield from _row(
        "L, loading a token", f"{speed.load_ms:.1f} ms", f"{amount(speed.moved_bytes)} at {link}{kept}; estimated"
    )
    computing = "unknown" if speed.compute_ms is None else f"{speed.compute_ms:.1f} ms"
    yield from _row("C, computing a token", computing, speed.note or "estimated from the platform's constants")
    for rate in speed.rates:
        yield from _rate(rate)


def _rate(rate: Rate) -> Iterator[str]:
    if rate.tokens_per_s is None:
        yield from _row(rate.what, "", rate.how)
        return
    times = "" if rate.speedup is None else f"{rate.speedup:.2f}x "
    yield from _row(rate.what, f"{rate.tokens_per_s:.2f}", f"{times}{rate.how}; {rate.tag}")


def _legend(speeds: Sequence[Speed]) -> Iterator[str]:
    formulas = " ".join(rate.how for speed in speeds for rate in speed.rates)
    if "K c / s" in formulas:
        yield from _wrapped(
            "K: drafted tokens; a: acceptance, c: cost of drafting over top-1's (DraftExpert, Table 3); s: speed of "
            "top-1 drafting over AR (Figure 2); v: verification over an AR step (Table 4)."
        )
    if "T_step" in formulas:
        yield from _wrapped("alpha: tokens a cycle; T_AR, T_step: seconds a step (EcoSpec, Table 3).")
    if "alpha k / E" in formulas:
        yield from _wrapped(
            "alpha: tokens a cycle, of the paper; k: top-k; E: experts a layer of its block (uniform routing where the "
            "paper prints none). The bound holds where loading is all that costs and nothing is kept."
        )
    yield from _wrapped(
        "Other machines: moexp calibrate measures yours (--platform this-machine); moexp simulate replays recorded "
        "routing in place of these formulas."
    )


def _time(recipe: Recipe, shape: Shape, speeds: Sequence[Speed]) -> Iterator[str]:
    yield "Time"
    fetch = shape.checkpoint_bytes * 8 / (_LINE_GBIT * 1e9)
    yield from _row("to fetch it", duration(fetch), f"{_LINE_GBIT:g} Gbit/s")
    tokens, workloads = recipe.decode.max_new_tokens, len(recipe.bench.workloads)
    if recipe.bench.tables:
        prompts, each = recipe.bench.local_disk_prompts, recipe.bench.max_new_tokens
    else:
        prompts, each = recipe.ecospec.prompts, recipe.ecospec.max_new_tokens
    arm = workloads * prompts * each
    for speed in speeds:
        ar = speed.rates[0].tokens_per_s
        if ar is not None:
            where = f"AR on {speed.platform.name}"
            yield from _row(f"an answer, {tokens} tokens", duration(tokens / ar), where)
            how = f"{workloads} x {prompts} x {each} tokens by {where}"
            yield from _row("one method in a table", duration(arm / ar), how)


def _loads(recipe: Recipe, shape: Shape) -> Iterator[str]:
    """What AR brings in for a token."""
    geometry, sizes, kept = shape.geometry, sizes_of(shape, recipe), kept_experts(shape, recipe)
    if recipe.store.kind == "resident":
        return
    size = geometry.experts_per_token * sizes.moved
    how = f"{geometry.moe_layers} x {geometry.top_k} experts"
    if kept:
        share = kept / geometry.layer_experts
        how += f"; {amount(size * (1 - share))} with {share:.0%} of them kept (uniform routing)"
    yield from _row("AR loads a token", amount(size), how)


def _total(parts: Sequence[Part], place: Place | str) -> int:
    return sum(part.size for part in parts if part.place == place)


def _row(what: str, value: str, how: str) -> Iterator[str]:
    """Name, value and formula in columns; a long formula goes on below itself."""
    lines = textwrap.wrap(how, WIDTH - _NAME - _VALUE - 4) or [""]
    yield f"  {what:<{_NAME}}{value:>{_VALUE}}  {lines[0]}".rstrip()
    yield from (" " * (_NAME + _VALUE + 4) + line for line in lines[1:])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def amount(size: float) -> str:
    """Bytes in the unit that suits them, of 10^9, 10^6 or 10^3."""
    for unit, length in (("GB", 1e9), ("MB", 1e6)):
        if size >= length:
            value = size / length
            return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f} {unit}"
    return f"{size / 1e3:.2f} kB"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
