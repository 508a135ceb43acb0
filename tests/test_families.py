"""Every family in the hub's own format: transformers' logits, and AR's bits from every method, wherever experts are.

`tests/family_files.py` lists the cases; `python -m tests.support_table` makes docs/families.md's table.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moexp.base.errors import MoexpError
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method
from moexp.runtime.engine.engine import VERIFY, Block, Engine
from moexp.runtime.store.opening import open_store
from moexp.runtime.store.transfer import StoreOptions
from moexp.runtime.verifiers.sampling import Sampling
from moexp.target.coding import dequantise_fp8, dequantise_mxfp4
from moexp.target.draft_expert import DraftExperts
from moexp.target.experts import ExpertIndex
from moexp.target.families import FAMILIES
from moexp.target.load import load_target
from tests.engines import logits_to, prompt
from tests.family_files import CASES, DTYPES, STORES, Case, edit_config, read_tensors, write_case, write_shards
from tests.support_table import BEGIN, END, PAGE, table

pytestmark = pytest.mark.e2e

BY_ID = {case.id: case for case in CASES}
METHODS = (
    Method("top-r", r=1, max_draft=6, policy="confidence", tau=0.4),
    Method("top-r", r=2, prefetch=True),
    Method("draft-expert", max_draft=7, prefetch=True),
    Method("target", max_draft=5),
)
PROMPT, NEW_TOKENS = 37, 16


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """`written(case)`: the published checkpoint and its plain copy, made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def write(case: Case) -> tuple[Path, Path]:
        if case.id not in made:
            made[case.id] = write_case(tmp_path_factory.mktemp(case.id), case)
        return made[case.id]

    return write


def engine_of(folder: Path, dtype: torch.dtype, store: str, **options: Any) -> Engine:
    target = load_target(folder, dtype=dtype)
    spec = target.spec
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        drafts = DraftExperts(spec.hidden_size, 16, spec.moe_layers)
        for parameter in drafts.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    opened = open_store(target.index, store, dtype=dtype, options=StoreOptions(poison=store != "resident"))
    drafts = drafts.to(dtype).requires_grad_(False)
    return Engine(target, opened, draft_experts=drafts, prefill_rows=32, **options)


def bits(engine: Engine, method: Method) -> tuple[torch.Tensor, list[int]]:
    rows: list[torch.Tensor] = []
    ids = prompt(PROMPT)
    _, record = decode_all(engine, ids, method, Sampling(), max_new_tokens=NEW_TOKENS, on_cycle=logits_to(rows))
    return torch.cat(rows), record.tokens


@pytest.fixture(scope="module")
def ar_bits(written):
    """AR's logits and tokens with all experts resident, by case."""
    known: dict[str, tuple[torch.Tensor, list[int]]] = {}

    def of(case: Case) -> tuple[torch.Tensor, list[int]]:
        if case.id not in known:
            with (engine := engine_of(written(case)[0], gate_dtype(case), "resident")).store:
                known[case.id] = bits(engine, Method())
        return known[case.id]

    return of


def gate_dtype(case: Case) -> torch.dtype:
    """What the case's checkpoint is decoded in: its own type; quantised ones in bf16, as they are published for."""
    return DTYPES.get(case.precision, torch.bfloat16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_files_are_as_on_the_hub(written, case):
    published, _ = written(case)
    weight_map = json.loads((published / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    assert case.expert.format(1, 2) in weight_map
    dtypes = {tensor.dtype for name, tensor in read_tensors(published).items() if ".experts." in name}
    quantised = {"fp8": {torch.float8_e4m3fn, torch.float32}, "mxfp4": {torch.uint8, torch.bfloat16}}
    assert dtypes == (quantised.get(case.precision) or {DTYPES[case.precision]})


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_logits_are_transformers_own(written, case, store):
    """In fp32; a disk serves plain bf16 experts as they are, so there the bits of a resident store are the measure."""
    published, plain = written(case)
    if case.precision == "bf16" and store == "disk":
        with (engine := engine_of(published, torch.bfloat16, store)).store:
            logits, tokens = bits(engine, Method())
        with (engine := engine_of(published, torch.bfloat16, "resident")).store:
            expected, expected_tokens = bits(engine, Method())
        assert torch.equal(logits, expected) and tokens == expected_tokens
        return
    ids = prompt(90)
    whole = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        expected = whole(torch.tensor([ids])).logits[0, 70:]
    with (engine := engine_of(published, torch.float32, store)).store:
        engine.start(len(ids) + 8)
        engine.prefill(ids[:70])
        spans = ((70, 71), (71, 76), (76, 84), (84, 90))
        found = torch.cat([engine.run(Block(ids[begin:end]), VERIFY).logits_BV for begin, end in spans])
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_method_has_ars_bits(written, ar_bits, case, store):
    """Shared + top-r and the draft expert included, in families without shared experts too."""
    logits, tokens = ar_bits(case)
    with (engine := engine_of(written(case)[0], gate_dtype(case), store)).store:
        for method in (Method(), *METHODS):
            found, emitted = bits(engine, method)
            assert emitted == tokens
            assert torch.equal(found, logits)
        counters = engine.store.counters
    assert counters.demanded == counters.hit + counters.late + counters.missed
    assert counters.prefetched == counters.used + counters.wasted


def test_every_family_is_tested():
    assert {case.family for case in CASES} == set(FAMILIES)


# --- quantised experts ---


@pytest.mark.parametrize("name", ["deepseek_v3-fp8", "gpt_oss-mxfp4"])
def test_a_disk_reads_the_published_bytes(written, name):
    """Counters count what is read: whole pages of the quantised tensors, not the matrices they become."""
    index = ExpertIndex.from_checkpoint(written(BY_ID[name])[0])
    key = index.keys[0]
    at = index.locations[key]
    published = sum(span.length for span in at.ranges)
    assert published == sum(part.nbytes for part in at.parts.values()) < 0.6 * index.expert_bytes
    with open_store(index, "disk") as store:
        store.begin_cycle()
        ticket = store.request([key], "ar")
        list(store.arrivals(ticket))
        store.release(ticket)
        assert published <= store.counters.read_bytes <= published + len(at.ranges) * 2 * 4096


def test_every_store_serves_the_same_weights(written):
    for case in CASES:
        if not case.quantised:
            continue
        index = ExpertIndex.from_checkpoint(written(case)[0])
        for dtype in (torch.bfloat16, torch.float32):
            with open_store(index, "resident", dtype=dtype) as whole, open_store(index, "disk", dtype=dtype) as disk:
                for key in index.keys[:5]:
                    expected, found = one_expert(whole, key), one_expert(disk, key)
                    assert len(expected) == len(found) == (4 if index.biased else 2)
                    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def one_expert(store, key):
    store.begin_cycle()
    ticket = store.request([key], "ar")
    tensors = [tensor.clone() for _, weights in store.arrivals(ticket) for tensor in weights.tensors]
    store.release(ticket)
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_fp4_value_and_scale(dtype):
    """Both halves of all bytes, under the scales that bf16 can hold the result of."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(8, 1, 1)
    scales = torch.tensor([4, 60, 100, 120, 126, 127, 128, 250], dtype=torch.uint8)[:, None].repeat(1, 16)
    into = torch.empty(8, 512, dtype=dtype)
    dequantise_mxfp4(blocks, scales, into)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()
    assert torch.equal(into, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_fp8_value(dtype):
    """All bytes but the two that are no numbers, each under a scale of its own block, to the bit."""
    finite = [byte for byte in range(256) if byte & 127 != 127]
    weight = torch.tensor(finite, dtype=torch.uint8).repeat(5, 2).view(torch.float8_e4m3fn)
    scales = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) * 0.01
    into = torch.empty(weight.shape, dtype=dtype)
    dequantise_fp8(weight, scales, into, (2, 128))
    each = scales.repeat_interleave(2, 0).repeat_interleave(128, 1)[:5, : weight.shape[1]]
    assert torch.equal(into, (weight.float() * each).to(dtype))


def test_an_fp8_weight_that_is_no_number_is_refused():
    weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    weight[2, 1] = float("nan")
    with pytest.raises(MoexpError, match="not a number"):
        dequantise_fp8(weight, torch.ones(1, 1), torch.empty(4, 4), (128, 128))


# --- what is refused ---


@pytest.fixture
def copy(written, tmp_path):
    def of(name: str) -> Path:
        return Path(shutil.copytree(written(BY_ID[name])[0], tmp_path / name))

    return of


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_other_quantisations_are_one_clear_error(copy, method):
    folder = copy("qwen3_moe-bf16")
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(MoexpError, match=rf"quantised as {method}.*valid: bf16, fp16, fp32, fp8 .*mxfp4"):
        load_target(folder)


def test_packed_integers_without_a_word_in_the_config_are_refused(copy):
    folder = copy("olmoe-bf16")
    tensors = read_tensors(folder)
    name = "model.layers.0.mlp.experts.0.up_proj."
    tensors[name + "qweight"] = torch.zeros(8, 8, dtype=torch.int32)
    del tensors[name + "weight"]
    write_shards(folder, tensors)
    with pytest.raises(MoexpError, match="quantised as packed integers"):
        load_target(folder)


@pytest.mark.parametrize(("name", "method"), [("olmoe-bf16", "mxfp4"), ("gpt_oss-bf16", "fp8")])
def test_a_quantisation_that_no_checkpoint_of_the_family_has_is_refused(copy, name, method):
    folder = copy(name)
    edit_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(MoexpError, match=f"quantised as {method} "):
        load_target(folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek_v3-fp8", "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"),
        ("deepseek_v3-fp8", "model.layers.1.self_attn.o_proj.weight_scale_inv"),
        ("gpt_oss-mxfp4", "model.layers.2.mlp.experts.down_proj_scales"),
        ("gpt_oss-mxfp4", "model.layers.2.mlp.experts.gate_up_proj_bias"),
    ],
)
def test_a_missing_scale_or_bias_is_named(copy, name, tensor):
    folder = copy(name)
    tensors = read_tensors(folder)
    del tensors[tensor]
    write_shards(folder, tensors)
    with pytest.raises(MoexpError, match=re.escape(tensor) + " is missing"):
        load_target(folder)


def test_scales_that_do_not_fit_are_refused(copy):
    folder = copy("deepseek_v3-fp8")
    tensors = read_tensors(folder)
    name = "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv"
    tensors[name] = tensors[name][:1]
    write_shards(folder, tensors)
    with pytest.raises(MoexpError, match="layer 1, expert 0: shapes .* do not fit together as fp8"):
        load_target(folder)


def test_experts_in_another_type_than_the_config_says_are_refused(copy):
    folder = copy("qwen3_moe-fp8")
    tensors = read_tensors(folder)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    write_shards(folder, tensors)
    with pytest.raises(MoexpError, match="layer 0, expert 0: gate is stored as BF16 .*valid: F8_E4M3"):
        load_target(folder)


# --- the table of families ---


def test_the_page_of_families_has_the_table():
    text = PAGE.read_text()
    block = text[text.index(BEGIN) + len(BEGIN) : text.index(END, text.index(BEGIN))]
    passing = {(case.id, store) for case in CASES for store in STORES}
    assert block.strip() == table(passing), "run `python -m tests.support_table --write`"
