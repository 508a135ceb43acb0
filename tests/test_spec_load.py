"""The tiny target, the geometry read from configs, and loading a checkpoint without its experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moexp.base.errors import MoexpError
from moexp.target.families import FAMILIES
from moexp.target.load import checkpoint_fingerprint, load_target
from moexp.target.spec import MoESpec
from moexp.target.tiny import TinyTarget, build_tiny_target, byte_tokenizer

EVERY_FAMILY = sorted(FAMILIES)


@pytest.fixture
def copy(tiny_folder, tmp_path):
    return Path(shutil.copytree(tiny_folder(), tmp_path / "copy"))


@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_spec_tells_the_geometry_of_every_family(tiny_folder, model_type):
    spec = MoESpec.from_config(AutoConfig.from_pretrained(tiny_folder(model_type=model_type)))
    assert (spec.hidden_size, spec.num_layers, spec.num_experts, spec.top_k) == (64, 4, 16, 4)
    assert (spec.expert_width, spec.vocab_size, spec.max_positions) == (32, 256, 4096)
    none_shared = FAMILIES[model_type].num_shared is None
    assert none_shared == (model_type in {"gpt_oss", "mixtral", "olmoe", "qwen3_moe"})
    assert spec.num_shared == (0 if none_shared else 1)
    assert spec.moe_layers == ((0, 1, 2, 3) if none_shared else (1, 2, 3))
    assert spec.experts_per_token == 4 * len(spec.moe_layers)


def test_spec_knows_sparse_steps_and_dense_layers():
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3])
    assert MoESpec.from_config(config).moe_layers == (1, 5, 7)


def test_an_unsupported_family_is_refused_with_those_that_are():
    with pytest.raises(MoexpError, match="'llama'.*" + ", ".join(sorted(FAMILIES))):
        MoESpec.from_config(AutoConfig.for_model("llama"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_loaded_weights_are_those_of_from_pretrained_and_experts_stay_on_meta(tiny_folder, model_type, dtype):
    folder = tiny_folder(model_type=model_type)
    loaded = load_target(folder, dtype=dtype).model
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    state = loaded.state_dict()
    for name, expected in whole.state_dict().items():
        if ".mlp.experts." in name:
            assert state[name].is_meta, name
        else:
            assert state[name].dtype == expected.dtype, name
            assert torch.equal(state[name], expected), name
    buffers = dict(loaded.named_buffers())
    for name, expected in whole.named_buffers():
        assert torch.equal(buffers[name], expected), name
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_sharded_checkpoint_loads_the_same(tiny_folder):
    whole = load_target(tiny_folder()).model.state_dict()
    folder = tiny_folder(max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    for name, tensor in load_target(folder).model.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor, whole[name]), name


def test_dtype_is_the_checkpoints_unless_told_otherwise(tiny_folder):
    folder = tiny_folder(dtype=torch.bfloat16)
    assert load_target(folder).dtype == torch.bfloat16
    assert load_target(folder, dtype=torch.float32).dtype == torch.float32


def test_tied_embeddings_are_tied(tmp_path):
    folder = build_tiny_target(tmp_path, TinyTarget())
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    _edit_config(folder, tie_word_embeddings=True)
    model = load_target(folder).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_stop_ids_are_the_end_of_turn(tiny_folder):
    target = load_target(tiny_folder())
    assert target.stop_ids == {target.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_no_checkpoint_is_one_clear_error(tmp_path):
    with pytest.raises(MoexpError, match="no config.json"):
        load_target(tmp_path)


def test_an_unknown_model_type_is_one_clear_error(copy):
    _edit_config(copy, model_type="nonesuch")
    with pytest.raises(MoexpError, match="unreadable config"):
        load_target(copy)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.2.self_attn.o_proj.weight", "o_proj.weight is missing"),
        ("model.layers.2.mlp.experts.7.up_proj.weight", "experts.7.up_proj.weight is missing"),
    ],
)
def test_a_missing_tensor_is_named(copy, tensor, message):
    tensors = load_file(copy / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(MoexpError, match=message):
        load_target(copy)


def test_experts_fewer_than_the_config_says_are_an_error(copy):
    _edit_config(copy, n_routed_experts=20)
    with pytest.raises(MoexpError, match="expert 16 of layer 1 is missing, and 11 more"):
        load_target(copy)


def test_a_truncated_shard_is_named(copy):
    shard = copy / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(MoexpError, match="model.safetensors"):
        load_target(copy)


def test_layers_that_the_model_does_not_run_are_left_out(copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(4, 4)  # multi-token prediction, as hub checkpoints have it
    save_file(tensors, copy / "model.safetensors")
    load_target(copy)


def test_fingerprint_is_of_the_content_alone(tiny_folder, copy):
    original = checkpoint_fingerprint(tiny_folder())
    assert checkpoint_fingerprint(copy) == original
    _edit_config(copy, transformers_version="0.0")
    assert checkpoint_fingerprint(copy) == original
    _edit_config(copy, routed_scaling_factor=2.5)
    assert checkpoint_fingerprint(copy) != original


def test_fingerprint_sees_other_weights(tiny_folder):
    assert checkpoint_fingerprint(tiny_folder()) != checkpoint_fingerprint(tiny_folder(seed=1))


def test_tiny_target_is_reproducible(tiny_folder, tmp_path):
    assert checkpoint_fingerprint(build_tiny_target(tmp_path, TinyTarget())) == checkpoint_fingerprint(tiny_folder())


def test_tiny_target_leaves_torchs_random_state_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build_tiny_target(tmp_path, TinyTarget())
    assert torch.equal(torch.rand(1), expected)


@given(st.text())
def test_byte_tokenizer_is_reversible(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < 256 for token in ids)


def test_chat_template_asks_for_an_answer():
    tokenizer = byte_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text).input_ids.count(tokenizer.eos_token_id) == 1


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(MoexpError, match="vocabulary of 200"):
        byte_tokenizer(200)


def _edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
