"""`moexp trace-routing`: the target reads text, and what its routers choose is recorded.

Text is cut into samples and dealt to shards, which are computed and written one by one: a run that was stopped goes on
with the first missing shard, and ends with the same bytes.

Shapes: B samples of a batch, T tokens, L MoE layers, k experts a token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moexp.base import ranks
from moexp.base.atomic import write_text
from moexp.base.errors import MoexpError
from moexp.base.progress import stage
from moexp.config.recipe import Recipe
from moexp.config.target import TraceSection
from moexp.data.prompts import load_texts
from moexp.data.traces import (
    MANIFEST,
    RoutingGeometry,
    ShardEntry,
    Trace,
    TraceManifest,
    TraceShard,
    read_manifest,
    read_trace,
    shard_file,
    shard_problem,
    text_hash,
    write_shard,
)
from moexp.learn.core.experts import by_gate, hooked, routers, set_training_experts
from moexp.learn.corpus.files import Author, corpus_rows, shipped_corpora
from moexp.learn.setup import load_with_experts
from moexp.learn.trace.statistics import ExpertLoad, UnionGrowth, expert_load, union_growth
from moexp.target.load import read_config, target_identity
from moexp.target.spec import MoESpec

CORPUS = "the recipe's corpus"
LOAD_TABLE, UNION_TABLE = "expert_load.csv", "union_growth.csv"


@dataclass(frozen=True)
class TraceReport:
    """A finished trace and what it says. `tokens_per_s` is None where nothing had to be traced."""

    trace: Trace
    load: ExpertLoad
    growth: UnionGrowth
    tokens_per_s: float | None


def trace_routing(
    recipe: Recipe, target: Path, out: Path, *, work: Path, text: str | None = None, provenance: dict[str, Any]
) -> TraceReport:
    """Traces the recipe's target into `out`, unless that is done, and measures expert load and union growth.

    `text` is a source of `load_texts`, by default the corpus of draft experts, which the model may have to write into
    `work`.

    Raises:
        MoexpError: `out` holds another trace, or one over other text; no text; a disk that is full.
    """
    manifest = _manifest(recipe, target, text, provenance)
    earlier = ranks.on_main(lambda: read_manifest(out) if (out / MANIFEST).exists() else None)
    if earlier is not None and earlier.identity != manifest.identity:
        raise MoexpError("another trace is there", where=str(out), valid="its own settings, or another --out")
    speed = None
    if ranks.on_main(lambda: earlier is None or not earlier.complete or _is_damaged(out, earlier)):
        speed = _write(recipe, target, out, work, text, manifest, earlier.shards if earlier else [])
    trace = read_trace(out, manifest.target)

    def tables() -> tuple[ExpertLoad, UnionGrowth]:
        with stage("Expert load, union growth", None):
            load = expert_load(trace.shards(), trace.geometry)
            growth = union_growth(trace.shards(), trace.geometry)
        write_text(out / LOAD_TABLE, load_csv(load, trace.geometry))
        write_text(out / UNION_TABLE, growth_csv(growth))
        return load, growth

    return TraceReport(trace, *ranks.on_main(tables), speed)


def _is_damaged(out: Path, manifest: TraceManifest) -> bool:
    return any(shard_problem(out, entry) for entry in manifest.shards)


def _manifest(recipe: Recipe, target: Path, text: str | None, provenance: dict[str, Any]) -> TraceManifest:
    spec = MoESpec.from_config(read_config(target))
    fingerprint = target_identity(target)
    settings = {
        "target": fingerprint,
        "text": text or recipe.draft.corpus.model_dump(mode="json"),
        "dtype": recipe.target.dtype,
        "seed": recipe.seed,
        **recipe.trace.model_dump(mode="json"),
    }
    return TraceManifest(
        target=fingerprint,
        model_type=spec.model_type,
        geometry=RoutingGeometry(spec.moe_layers, spec.num_experts, spec.top_k),
        gates=recipe.trace.gates,
        source=text or CORPUS,
        identity=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
        provenance=provenance,
    )


def _write(
    recipe: Recipe,
    target: Path,
    out: Path,
    work: Path,
    text: str | None,
    manifest: TraceManifest,
    done: list[ShardEntry],
) -> float | None:
    """Traces every shard that is not in `done`, in order; returns tokens a second, if any was traced."""
    section = recipe.trace
    with stage("Load the target", None):
        model, tokenizer = load_with_experts(target, recipe.target.dtype, recipe.device)
    samples = limited(_samples(recipe, model, tokenizer, text, work), section.sequence_length, section.tokens)
    # After the corpus: what the model writes must not depend on how it is run here.
    set_training_experts(model)
    traced, seconds, first = 0, 0.0, 0
    finished = {entry.file: entry for entry in done}
    with stage("Trace", section.tokens) as advance:
        for number, part in enumerate(shards_of(samples, section.shard_tokens)):
            tokens = np.concatenate(part)
            entry = finished.get(shard_file(number))
            if entry is not None and entry.text != text_hash(tokens):
                what = "the text is not the one that was traced before"
                raise MoexpError(what, where=str(out), valid="another --out")
            if ranks.from_main(entry is None or bool(shard_problem(out, entry))):
                begin_s = time.perf_counter()
                shard = trace_samples(model, part, section, first)
                seconds, traced = seconds + time.perf_counter() - begin_s, traced + len(tokens)
                entry = ranks.on_main(partial(write_shard, out, number, shard, manifest))
            assert entry is not None
            first += len(part)
            manifest.shards.append(entry)
            ranks.on_main(partial(manifest.save, out))
            advance(manifest.tokens)
    if not manifest.shards:
        raise MoexpError("no text to trace", where=text or CORPUS)
    manifest.complete = True
    ranks.on_main(partial(manifest.save, out))
    return traced / seconds if traced else None


def _samples(
    recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str | None, work: Path
) -> Iterator[np.ndarray]:
    """Token ids of one text after another."""
    if text is not None:
        for sample in load_texts(text):
            yield np.array(tokenizer(sample, truncation=False)["input_ids"], dtype=np.int32)
        return
    section = recipe.draft.corpus
    by_target = section.source == "write" or (section.author != "dense" and shipped_corpora("target"))
    names = ["target"] if by_target else ["dense"]
    if by_target and section.source == "shipped" and section.author == "both":
        names.append("dense")  # for long traces: the target's own text is short
    rows = -(-recipe.trace.tokens // section.length)
    enough = section.model_copy(update={"tokens": min(section.tokens, rows * section.length)})
    for name in names:
        author = Author(name, model, tokenizer)
        yield from corpus_rows(enough, author, work / f"corpus-{name}", recipe.seed).numpy()


def limited(texts: Iterable[np.ndarray], longest: int, tokens: int) -> Iterator[np.ndarray]:
    """Samples of at most `longest` tokens, `tokens` in all."""
    left = tokens
    for ids in texts:
        for begin in range(0, len(ids), longest):
            sample = ids[begin : min(begin + longest, begin + left)]
            left -= len(sample)
            yield sample
            if not left:
                return


def shards_of(samples: Iterable[np.ndarray], tokens: int) -> Iterator[list[np.ndarray]]:
    """Uncut samples in order, in shards that end as soon as they have `tokens` tokens."""
    part: list[np.ndarray] = []
    for sample in samples:
        part.append(sample)
        if sum(map(len, part)) >= tokens:
            yield part
            part = []
    if part:
        yield part


@torch.no_grad()
def trace_samples(
    model: PreTrainedModel, samples: list[np.ndarray], section: TraceSection, first: int = 0
) -> TraceShard:
    """Runs the model over samples of token ids and records its routing; `first` is the number of the first sample.

    Processes take the batches in turn; the result is that of one process with as many threads, bit for bit.
    """
    routed: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, gates_Tk, ids_Tk = output
        routed[router] = by_gate_then_id(gates_Tk.float(), ids_Tk)

    layers = routers(model).values()
    shares: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
    begins = range(0, len(samples), section.batch_size)
    with hooked(layers, keep):
        for begin in begins[ranks.rank() :: ranks.world()]:
            batch = samples[begin : begin + section.batch_size]
            longest = max(map(len, batch))
            # Padding stands behind the text, where no token of it can look.
            ids_BT = torch.tensor(np.stack([np.pad(sample, (0, longest - len(sample))) for sample in batch])).long()
            model.model(input_ids=ids_BT.to(model.device), use_cache=False)
            live_T = (torch.arange(longest) < torch.tensor([len(sample) for sample in batch])[:, None]).flatten()
            gates_TLk, experts_TLk = (
                torch.stack([routed[layer][part] for layer in layers], dim=1).cpu()[live_T].numpy() for part in (0, 1)
            )
            shares[begin] = (experts_TLk.astype(np.int32), gates_TLk if section.gates else None)
    batches = {begin: routing for part in ranks.gathered(shares) for begin, routing in part.items()}
    experts, gates = zip(*(batches[begin] for begin in begins), strict=True)
    lengths = [len(sample) for sample in samples]
    return TraceShard(
        sample_T=np.repeat(np.arange(first, first + len(samples)), lengths),
        position_T=np.concatenate([np.arange(length) for length in lengths]),
        token_T=np.concatenate(samples),
        experts_TLk=np.concatenate(experts),
        gates_TLk=np.concatenate(gates) if section.gates else None,
    )


def by_gate_then_id(gates_Tk: Tensor, ids_Tk: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and ids by descending gate, ties by lower id: the order that the runtime sums in."""
    ids_Tk, order_Tk = ids_Tk.sort(dim=-1)
    return by_gate(gates_Tk.gather(-1, order_Tk), ids_Tk)


def load_csv(load: ExpertLoad, geometry: RoutingGeometry) -> str:
    """`expert_load.csv`: how many tokens chose each expert, and that over the layer's mean."""
    rows = [
        (layer, expert, int(count), f"{count / counts_E.mean():.4f}", "measured")
        for layer, counts_E in zip(geometry.layers, load.counts_LE, strict=True)
        for expert, count in enumerate(counts_E)
    ]
    return _csv(("layer", "expert", "tokens", "load_over_mean", "tag"), rows)


def growth_csv(growth: UnionGrowth) -> str:
    """`union_growth.csv`: experts a layer against block length (mean, lowest and highest layer), uniform beside."""
    rows = []
    for length, blocks in enumerate(growth.blocks_B.tolist(), start=1):
        unique_L = growth.unique_LB[:, length - 1]
        measured = [f"{value:.4f}" if blocks else "" for value in (unique_L.mean(), unique_L.min(), unique_L.max())]
        rows.append((length, *measured, f"{growth.uniform_B[length - 1]:.4f}", blocks, "measured"))
    header = ("block_length", "unique_verify_per_layer", "lowest_layer", "highest_layer", "uniform", "blocks", "tag")
    return _csv(header, rows)


def _csv(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """No value holds a comma or a quote."""
    return "".join(",".join(map(str, row)) + "\n" for row in (header, *rows))
