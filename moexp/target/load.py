"""Load a target without its routed experts: transformers builds the model, an expert store serves the rest.

The model is built on `meta`, so that nothing of the size of the checkpoint is ever allocated; then everything but
the routed experts is read from the shards. The experts stay on `meta`: touching them by mistake raises at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

from moexp.base.errors import MoexpError
from moexp.target.coding import fp8_block
from moexp.target.experts import ExpertIndex
from moexp.target.families import Family, family_of
from moexp.target.pack_format import is_packed, read_index, read_manifest
from moexp.target.shards import checkpoint_files, list_tensors, read_header, read_tensors
from moexp.target.spec import MoESpec
from moexp.target.tokenizer import load_tokenizer

SAMPLE_BYTES = 1 << 16
PADDED_FROM = "moexp_padded_from"  # config key of a padded checkpoint: the fingerprint of its source
VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "use_cache")


@dataclass
class Target:
    """A frozen MoE language model whose routed experts are served by a store.

    Attributes:
        folder: the checkpoint.
        model: transformers' causal language model; its routed experts are on `meta`.
        spec: geometry.
        family: names of its parts.
        tokenizer: of the checkpoint.
        index: where each routed expert's bytes are.
        fingerprint: hex sha256 of what the checkpoint holds, wherever it lies.
    """

    folder: Path
    model: PreTrainedModel
    spec: MoESpec
    family: Family
    tokenizer: PreTrainedTokenizerBase
    index: ExpertIndex
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        """Type that the target computes in."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where everything but the routed experts is."""
        embedding: Any = self.model.get_input_embeddings()
        return embedding.weight.device

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: those of the generation config, else of the tokenizer."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        if ids is None:
            ids = self.tokenizer.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset([ids] if isinstance(ids, int) else ids)


def load_target(folder: Path | str, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Target:
    """Load a checkpoint folder, all but its routed experts.

    Args:
        folder: a Hugging Face checkpoint of a supported family.
        dtype: to compute in; by default the checkpoint's. What transformers keeps in fp32 (routers) stays so.
        device: where to.

    Raises:
        MoexpError: no such checkpoint, an unsupported family, or shards that are missing, cut, or lack a tensor.
    """
    folder = Path(folder)
    config = read_config(folder)
    family = family_of(config.model_type)
    spec = MoESpec.from_config(config)
    index = read_index(folder)
    _check_geometry(index, spec, folder)
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        attention = "eager" if family.sinks else "sdpa"
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    _load_weights(model, folder, index, dtype, device)
    _rebuild_buffers(model, config, device)
    model.eval().requires_grad_(False)
    return Target(
        folder=folder,
        model=model,
        spec=spec,
        family=family,
        tokenizer=load_tokenizer(folder),
        index=index,
        fingerprint=checkpoint_fingerprint(folder),
    )


def read_config(folder: Path) -> Any:
    """The folder's transformers config.

    Raises:
        MoexpError: there is none, it is unreadable, or transformers does not know its model type.
    """
    if not (folder / "config.json").is_file():
        raise MoexpError("no config.json", where=str(folder), valid="a Hugging Face checkpoint folder")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise MoexpError(f"unreadable config: {str(error).splitlines()[0]}", where=str(folder)) from error


def checkpoint_fingerprint(folder: Path | str) -> str:
    """Hex sha256 over the config, every tensor's name, type and shape, and samples of every shard's content.

    Cheap (192 KiB are read a shard), and the same wherever the folder lies and however it is called.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    for key in VOLATILE_CONFIG_KEYS:
        config.pop(key, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in checkpoint_files(folder):
        header = read_header(file)
        digest.update(json.dumps(header, sort_keys=True).encode())
        size = file.stat().st_size
        with file.open("rb") as stream:
            for at in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                stream.seek(at)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def target_identity(folder: Path | str) -> str:
    """Which function a checkpoint computes: the fingerprint of the checkpoint it was padded from, or its own.

    Draft experts belong to a function: those trained on a target serve its padded copies too.
    """
    padded_from = json.loads((Path(folder) / "config.json").read_text()).get(PADDED_FROM)
    return str(padded_from) if padded_from else checkpoint_fingerprint(folder)


def drafters_identity(folder: Path | str) -> str:
    """Which function the drafters of a checkpoint were trained for: that of the source, where it is a quantised pack
    (drafts need not be exact).
    """
    return read_manifest(Path(folder)).identity if is_packed(folder) else target_identity(folder)


def _check_geometry(index: ExpertIndex, spec: MoESpec, folder: Path) -> None:
    """The expert tensors must be those that the config promises."""
    expected = {(layer, expert) for layer in spec.moe_layers for expert in range(spec.num_experts)}
    missing = sorted(expected - set(index.keys))
    if missing:
        layer, expert = missing[0]
        raise MoexpError(f"expert {expert} of layer {layer} is missing, and {len(missing) - 1} more", where=str(folder))


def _load_weights(model: PreTrainedModel, folder: Path, index: ExpertIndex, dtype: torch.dtype, device: str) -> None:
    """Read everything but the routed experts, and check that nothing is left on `meta` that should not be."""
    wanted = {name for name in model.state_dict() if ".mlp.experts." not in name}
    keep_fp32 = _fp32_pattern(model, dtype)
    stored = list_tensors(folder)
    entries = {_renamed(name, model): entry for name, entry in stored.items() if name not in index.tensor_names}
    # Checkpoints carry layers that the model does not run (multi-token prediction): leave them out.
    names = [name for name in entries if name in wanted]
    quantised = getattr(model.config, "quantization_config", None) or {}
    state = read_tensors(
        entries,
        names,
        lambda name: torch.float32 if keep_fp32(name) else dtype,
        device=device,
        fp8_block=fp8_block(quantised),
    )
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, tensor in model.state_dict().items() if tensor.is_meta and ".mlp.experts." not in name]
    if absent:
        raise MoexpError(
            f"tensor {absent[0]} is missing, and {len(absent) - 1} more", where=str(folder), valid="a whole checkpoint"
        )


def _renamed(name: str, model: PreTrainedModel) -> str:
    """A checkpoint's name of a tensor as transformers' model has it."""
    for stored, used in family_of(model.config.model_type).renames:
        name = name.replace(stored, used)
    return name


def _fp32_pattern(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Predicate on parameter names: transformers keeps it in fp32 though the model is of type `dtype`."""
    names = [*(model._keep_in_fp32_modules_strict or [])]
    if dtype == torch.float16:
        names += model._keep_in_fp32_modules or []
    if not names:
        return lambda name: False
    pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}(\.|$)" for name in names))
    return lambda name: pattern.search(name) is not None


def _rebuild_buffers(model: PreTrainedModel, config: Any, device: str) -> None:
    """Buffers that no checkpoint holds (rotary frequencies): build their modules again, off `meta`."""
    for name, module in list(model.named_modules()):
        if module._non_persistent_buffers_set and "experts" not in name:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=config).to(device))
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not left, left
