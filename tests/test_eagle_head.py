"""EAGLE-3 heads: the equations, published files, the vocabulary maps, and every head that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from moexp.base.errors import MoexpError
from moexp.target.heads.draft_vocab import DraftVocab, checked_vocab, coverage, pick_draft_vocab, token_counts
from moexp.target.heads.eagle_files import CONFIG, WEIGHTS, load_eagle_head, save_eagle_head
from moexp.target.heads.eagle_head import (
    EagleConfig,
    EagleHead,
    default_feature_layers,
    new_eagle_head,
    start_from_target,
)
from moexp.target.heads.head import HeadCache, frozen_copy
from tests.heads import (
    DRAFTED,
    FFN,
    HEADS,
    KV,
    SPEC,
    D,
    H,
    V,
    W,
    eagle_1_tensors,
    eagle_json,
    eagle_tensors,
    embedding,
    write_head,
)

TARGET = "a" * 64


def load(folder: Path, **options: Any) -> EagleHead:
    return load_eagle_head(folder, SPEC, embedding(), dtype=torch.float32, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_head(tmp_path / "head", eagle_tensors(), eagle_json())


@pytest.fixture
def head(folder: Path) -> EagleHead:
    return load(folder)


def pairs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids [1, T] and hidden states [1, T, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (1, count), generator=generator), torch.randn(1, count, H, generator=generator)


def run(head: EagleHead, ids: Tensor, hidden: Tensor, cache: HeadCache | None = None, start: int = 0) -> Tensor:
    return head(ids, hidden, torch.arange(start, start + ids.shape[1])[None], None, cache)


# --- what a head computes ---


def plain_step(tensors: dict[str, Tensor], ids: Tensor, hidden: Tensor, theta: float = 1e6) -> Tensor:
    """The step written out position by position: states [T, H] of tokens [T] and states [T, H], causal from 0."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * tensors[f"midlayer.{name}.weight"]

    def turned(x: Tensor, place: int) -> Tensor:
        out = x.clone()
        for i in range(W // 2):
            angle = torch.tensor(place * theta ** (-2 * i / W))
            a, b = x[i], x[i + W // 2]
            out[i], out[i + W // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    embed, keys, values, states = embedding().weight, [], [], []
    for t, token in enumerate(ids.tolist()):
        both = torch.cat([norm(embed[token], "input_layernorm"), norm(hidden[t], "hidden_norm")])
        q, k, v = (tensors[f"midlayer.self_attn.{p}_proj.weight"] @ both for p in "qkv")
        keys.append([turned(part, t) for part in k.view(KV, W)])
        values.append(v.view(KV, W))
        mixed = []
        for n, part in enumerate(q.view(HEADS, W)):
            group = n // (HEADS // KV)
            weights = torch.stack([turned(part, t) @ key[group] for key in keys]).div(W**0.5).softmax(0)
            mixed.append(sum(w * value[group] for w, value in zip(weights, values, strict=True)))
        x = hidden[t] + tensors["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = norm(x, "post_attention_layernorm")
        gate, up = (tensors[f"midlayer.mlp.{p}_proj.weight"] @ inner for p in ("gate", "up"))
        states.append(x + tensors["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up))
    return torch.stack(states)


def test_a_step_is_the_published_layer_written_out(head: EagleHead):
    ids, hidden = pairs(6)
    wanted = plain_step(eagle_tensors(), ids[0], hidden[0])
    assert torch.allclose(run(head, ids, hidden)[0], wanted, atol=1e-5)
    features = torch.randn(1, 6, 3 * H)
    assert torch.allclose(head.features(features), features @ eagle_tensors()["fc.weight"].T, atol=1e-5)
    normed = wanted / (wanted.square().mean(-1, keepdim=True) + 1e-6).sqrt() * eagle_tensors()["norm.weight"]
    assert torch.allclose(head.logits(wanted[None])[0], normed @ eagle_tensors()["lm_head.weight"].T, atol=1e-5)


def test_steps_through_the_cache_are_one_causal_step(head: EagleHead):
    ids, hidden = pairs(9)
    whole = run(head, ids, hidden)
    cache = HeadCache(capacity=2)  # grows on the way
    parts = [run(head, ids[:, a:b], hidden[:, a:b], cache, a) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert cache.length == 9
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


def test_a_branch_of_a_tree_is_its_path_alone_and_rollback_forgets_it(head: EagleHead):
    """Nodes 0, 1 under the root, 2 under 0, 3 under 1, 4 under 3; the tree stands behind 5 true pairs."""
    parents = [-1, -1, 0, 1, 3]
    ids, hidden = pairs(5)
    node_ids, node_hidden = pairs(5, seed=1)
    cache = HeadCache()
    run(head, ids, hidden, cache)
    paths = []
    for node in range(5):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    mask = torch.zeros(5, 10, dtype=torch.bool)
    mask[:, :5] = True
    for node, path in enumerate(paths):
        mask[node, [5 + n for n in path]] = True
    depths = torch.tensor([len(path) for path in paths])
    tree = head(node_ids, node_hidden, (4 + depths)[None], mask, cache)
    assert cache.length == 10

    for node, path in enumerate(paths):
        alone = run(head, torch.cat([ids, node_ids[:, path]], 1), torch.cat([hidden, node_hidden[:, path]], 1))
        assert torch.allclose(tree[0, node], alone[0, -1], atol=1e-5)

    more_ids, more_hidden = pairs(2, seed=2)
    cache.rollback(5)
    again = run(head, more_ids, more_hidden, cache, 5)
    wanted = run(head, torch.cat([ids, more_ids], 1), torch.cat([hidden, more_hidden], 1))[:, -2:]
    assert torch.allclose(again, wanted, atol=1e-5)


def test_casting_leaves_the_frequencies_alone_and_a_frozen_copy_shares_the_target(head: EagleHead):
    twin = frozen_copy(head)
    assert twin.shared is head.shared and twin.fc.weight is not head.fc.weight
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    head.to(torch.bfloat16)
    rotary: Any = head.shared.rotary
    assert rotary.inv_freq.dtype == torch.float32
    ids, hidden = pairs(4)
    low, full = run(head, ids, hidden.bfloat16()), run(twin, ids, hidden)
    assert low.dtype == torch.bfloat16 and torch.allclose(low.float(), full, atol=0.1)
    assert not any(name.startswith("shared") for name in head.state_dict())


def test_a_head_that_starts_from_its_target_says_what_the_target_says(tmp_path: Path):
    config = EagleConfig(H, H, V, D, HEADS, KV, W, FFN, (1, 5, 8))
    made = new_eagle_head(config, DraftVocab.from_ids(DRAFTED, V), embedding())
    norm, lm_head = torch.nn.LayerNorm(H), torch.nn.Linear(H, V, bias=False)
    start_from_target(made, norm, lm_head)
    features = torch.randn(1, 3, 3 * H)
    ids, _ = pairs(3)
    states = run(made, ids, made.features(features))
    high = features[..., -H:]
    wanted = high / (high.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert torch.allclose(made.logits(states), wanted @ lm_head.weight[DRAFTED].T, atol=1e-5)


# --- files ---


def test_what_was_saved_is_a_published_checkpoint_and_loads(head: EagleHead, folder: Path, tmp_path: Path):
    save_eagle_head(tmp_path / "again", head, TARGET, {"metrics": {"kl": 0.5}})
    tensors = load_file(tmp_path / "again" / WEIGHTS)
    published = eagle_tensors()
    assert set(tensors) == set(published)
    assert all(torch.equal(tensors[name], published[name]) for name in published)
    config = json.loads((tmp_path / "again" / CONFIG).read_text())
    assert config == eagle_json(torch_dtype="float32")
    again = load(tmp_path / "again", fingerprint=TARGET)
    assert again.config == head.config and again.feature_layers == (1, 5, 8)
    with pytest.raises(MoexpError, match="a head of target aaaaaaaaaaaa, but the target is bbbbbbbbbbbb"):
        load(tmp_path / "again", fingerprint="b" * 64)


def test_heads_are_read_as_others_write_them(tmp_path: Path):
    """In shards, without t2d, with an embedding, with biases, with scaled rotary positions, without layer ids."""
    tensors = eagle_tensors(dtype=torch.bfloat16)
    scaling = {"type": "linear", "factor": 2.0}
    config = eagle_json(rope_scaling=scaling, eagle_config=None, architectures=["LlamaForCausalLM"])
    for name in ("q", "k", "v", "o"):
        rows = tensors[f"midlayer.self_attn.{name}_proj.weight"].shape[0]
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = torch.ones(rows)
    tensors["embed_tokens.weight"] = torch.randn(V, H)
    del tensors["t2d"]
    names = sorted(tensors)
    folder = write_head(tmp_path / "head", {name: tensors[name] for name in names[:8]}, config)
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[8:]}, folder / "model-2.safetensors")
    placed = {name: f"model-{1 if number < 8 else 2}.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))

    head = load_eagle_head(folder, SPEC, embedding())
    assert head.fc.weight.dtype == torch.bfloat16 and head.config.attention_bias
    assert head.feature_layers == default_feature_layers(12) == (1, 5, 8)
    assert torch.equal(head.state_dict()["t2d"], eagle_tensors()["t2d"])
    assert head.embed_tokens is not None and torch.equal(
        head.embed_tokens.weight, tensors["embed_tokens.weight"].bfloat16()
    )
    assert head.config.rope["rope_type"] == "linear" and head.config.rope["rope_theta"] == 1e6
    ids, hidden = pairs(3)
    assert run(head, ids, hidden.bfloat16()).isfinite().all()
    assert not any(name.startswith("embed") for name in head.trainable())


def test_a_head_with_the_whole_vocabulary_needs_no_maps(tmp_path: Path):
    tensors = eagle_tensors() | {"lm_head.weight": torch.randn(V, H)}
    del tensors["d2t"], tensors["t2d"]
    head = load(write_head(tmp_path / "head", tensors, eagle_json(draft_vocab_size=V)))
    assert torch.equal(head.target_ids(torch.arange(V)), torch.arange(V))


def shifted(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: t for name, t in {**tensors, **named}.items() if t is not None}


def twice() -> Tensor:
    d2t = eagle_tensors()["d2t"]
    d2t[1] = d2t[0] - 1
    return d2t


TENSORS = eagle_tensors()
REFUSED: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "an EAGLE-1 head": (
        eagle_1_tensors(),
        eagle_json(draft_vocab_size=None, architectures=["LlamaForCausalLM"]),
        "an EAGLE-1 head: fc reads 2H",
    ),
    "an EAGLE-3 head that says EAGLE-1": (
        TENSORS,
        eagle_json(architectures=["LlamaForCausalLMEagle"]),
        "the config says EAGLE-1 .* EAGLE-3 head",
    ),
    "fc of EAGLE-1": (shifted(TENSORS, fc__weight=torch.randn(H, 2 * H)), eagle_json(), "fc reads 2H like EAGLE-1's"),
    "another model": ({"model.norm.weight": torch.ones(H)}, eagle_json(), "no EAGLE head: model.norm.weight"),
    "another width": (TENSORS, eagle_json(target_hidden_size=48), "a target of width 48, but this one's is 32"),
    "another vocabulary": (TENSORS, eagle_json(vocab_size=128), "a vocabulary of 128, but the target has 100 tokens"),
    "layers the target lacks": (
        TENSORS,
        eagle_json(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}),
        r"reads layers \[1, 46, 90\] of a target with 12",
    ),
    "two layers": (
        TENSORS,
        eagle_json(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5]}),
        r"reads layers \[1, 5\] of a target",
    ),
    "other head dimensions": (TENSORS, eagle_json(head_dim=16), r"self_attn.\w_proj.weight has shape"),
    "another feed-forward width": (TENSORS, eagle_json(intermediate_size=40), r"mlp.\w+_proj.weight has shape"),
    "narrow without an embedding": (
        shifted(TENSORS),
        eagle_json(hidden_size=24, target_hidden_size=32),
        "without an embedding",
    ),
    "a missing tensor": (shifted(TENSORS, norm__weight=None), eagle_json(), "tensor norm.weight missing"),
    "an unexpected tensor": (shifted(TENSORS, fc_norm=torch.ones(H)), eagle_json(), "tensor fc_norm not expected"),
    "no draft vocabulary in the config": (TENSORS, eagle_json(draft_vocab_size=None), "draft_vocab_size is None"),
    "lm_head of other size": (TENSORS, eagle_json(draft_vocab_size=D + 1), "lm_head has 24 rows, but .* is 25"),
    "no d2t": (shifted(TENSORS, d2t=None), eagle_json(), "a draft vocabulary of 24 tokens without a d2t map"),
    "short d2t": (shifted(TENSORS, d2t=TENSORS["d2t"][:-1].clone()), eagle_json(), r"d2t has shape \[23\]"),
    "t2d of another vocabulary": (
        shifted(TENSORS, t2d=torch.ones(V + 4, dtype=torch.bool)),
        eagle_json(),
        r"t2d has shape \[104\], but the target has 100 tokens",
    ),
    "d2t with ids for offsets": (shifted(TENSORS, d2t=torch.tensor(DRAFTED)), eagle_json(), "d2t leads to token 1"),
    "d2t twice": (shifted(TENSORS, d2t=twice()), eagle_json(), "d2t leads to a token twice"),
    "stale t2d": (shifted(TENSORS, t2d=~TENSORS["t2d"]), eagle_json(), "d2t and t2d disagree about 100 tokens"),
    "float d2t": (shifted(TENSORS, d2t=TENSORS["d2t"].float()), eagle_json(), "d2t is stored as"),
    "a normed residual": (TENSORS, eagle_json(norm_before_residual=True), "norm_before_residual"),
    "unknown positions": (TENSORS, eagle_json(rope_scaling={"rope_type": "odd"}), "rotary positions"),
    "a size that is no number": (TENSORS, eagle_json(hidden_size="32"), "hidden_size is '32'"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_a_head_that_does_not_fit_is_refused(which: str, tmp_path: Path):
    tensors, config, message = REFUSED[which]
    with pytest.raises(MoexpError, match=message):
        load(write_head(tmp_path / "head", tensors, config))


def test_pickled_damaged_and_absent_files_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(MoexpError, match="no readable config.json"):
        load(tmp_path / "nowhere")
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:-100])
    with pytest.raises(MoexpError, match="bytes where its header says"):
        load(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(MoexpError, match="shard model.safetensors is missing"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(MoexpError, match="pickled .pytorch_model.bin., and pickle can run code"):
        load(folder)


# --- the vocabulary ---


@given(st.lists(st.integers(0, 6), min_size=12, max_size=12), st.integers(2, 12))
def test_the_draft_vocabulary_is_the_most_frequent_tokens(counts: list[int], size: int):
    counts_V = torch.tensor(counts)
    made = pick_draft_vocab(counts_V, size, always=[11])
    ids = made.target_ids.tolist()
    assert ids == sorted(ids) and len(ids) == size and 11 in ids
    left = [token for token in range(12) if token not in ids]
    for token in set(ids) - {11}:
        assert all((counts[token], -token) > (counts[other], -other) for other in left)
    assert made.t2d.nonzero()[:, 0].tolist() == ids
    assert torch.equal(made.draft_ids[made.target_ids], torch.arange(size))
    assert int((made.draft_ids < 0).sum()) == 12 - size
    checked = checked_vocab(made.d2t, made.t2d, draft=size, vocab=12, where="here")
    assert torch.equal(checked.d2t, made.d2t) and torch.equal(checked.t2d, made.t2d)
    if sum(counts):
        assert coverage(made, counts_V) == pytest.approx(sum(counts[token] for token in ids) / sum(counts))


def test_counts_of_a_corpus():
    rows = torch.tensor([[1, 1, 3], [0, 1, 3]], dtype=torch.int32)
    assert token_counts(rows, 5).tolist() == [1, 3, 0, 2, 0]
    with pytest.raises(MoexpError, match="token id 3"):
        token_counts(rows, 3)
    for size in (0, 6):
        with pytest.raises(MoexpError, match=f"a draft vocabulary of {size} tokens"):
            pick_draft_vocab(torch.ones(5), size)
    with pytest.raises(MoexpError, match="token id 9 cannot be drafted"):
        pick_draft_vocab(torch.ones(5), 3, always=[9])


def test_maps_of_a_head(head: EagleHead):
    assert head.target_ids(torch.arange(D)).tolist() == DRAFTED
    assert head.draft_ids(torch.tensor([0, 1, 99])).tolist() == [0, -1, D - 1]
    assert default_feature_layers(94) == (1, 46, 90) and default_feature_layers(4) == (0, 1, 3)
