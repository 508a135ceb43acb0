"""A repaired model as a small difference from the dense model it was carved from.

Three parts rebuild it: where each neuron went, a ternary update of experts and attention (signs where they changed
most, one scale a neuron), and the routers, which the dense model does not have, in eight bits a weight. Norms are
stored as they are; embeddings and the first FFN are the dense model's. Everything is elementwise arithmetic in fp32, so
every machine gets the same bits.

Shapes: R neurons (rows), H hidden size, L MoE layers, E routed experts, n own neurons and m spares of an expert.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import Glm4MoeForCausalLM, LlamaForCausalLM

from moexp.base.atomic import write_bytes
from moexp.base.errors import MoexpError
from moexp.target.carve import Geometry, LayerPlan, carve_as_planned

FORMAT = "moexp-delta-1"
TRITS = 5  # ternary digits in a byte: 3**5 = 243
SAMPLE = 1 << 16  # elements from which a tensor's threshold is read

Kind = Literal["ternary", "int8", "plain", "dense"]


def kind_of(name: str) -> Kind:
    """How the parameter or buffer of this name is stored; `dense` is not stored at all."""
    if ".mlp.experts." in name or ".mlp.shared_experts." in name or (".self_attn." in name and name.endswith("weight")):
        return "ternary"
    if name.endswith(".mlp.gate.weight"):
        return "int8"
    if "norm" in name or name.endswith("e_score_correction_bias"):
        return "plain"
    return "dense"


@dataclass(frozen=True)
class Coded:
    """A tensor of small integers by neuron, int8 [R, H], and what one unit of a row is worth, fp16 [R]."""

    codes_RH: Tensor
    scale_R: Tensor

    def decode(self, like: Tensor, name: str) -> Tensor:
        """The fp32 tensor these codes stand for, in the shape of `like`."""
        rows_RH = self.codes_RH.float() * self.scale_R.float()[:, None]
        if "down_proj" in name:
            return rows_RH.view(*like.shape[:-2], like.shape[-1], like.shape[-2]).transpose(-1, -2)
        return rows_RH.view(like.shape)


def encode(name: str, difference: Tensor, density: float) -> Coded:
    """The nearest codes for a difference: ternary keeps the `density` largest entries of the tensor."""
    if "down_proj" in name:
        difference = difference.transpose(-1, -2)
    rows_RH = difference.reshape(-1, difference.shape[-1])
    size_RH = rows_RH.abs()
    if kind_of(name) == "int8":
        scale_R = (size_RH.amax(1) / 127.0).half()
        unit_R = scale_R.float().clamp_min(1e-12)
        return Coded((rows_RH / unit_R[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale_R)
    sample = size_RH.flatten()[:: max(1, size_RH.numel() // SAMPLE)]
    threshold = sample.kthvalue(max(1, round(len(sample) * (1.0 - density)))).values
    largest_RH = size_RH > threshold
    scale_R = ((size_RH * largest_RH).sum(1) / largest_RH.sum(1).clamp_min(1)).half()
    return Coded((rows_RH.sign() * largest_RH).to(torch.int8), scale_R)


def as_delivered(name: str, latent: Tensor, base: Tensor, density: float) -> Tensor:
    """What is left of `latent` after a round trip through the delta: what training must make good."""
    return base + encode(name, latent - base, density).decode(latent, name)


def stored(model: Glm4MoeForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a delta holds, by name."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if kind_of(name) != "dense":
            yield name, tensor.detach()


def save_delta(
    file: Path,
    model: Glm4MoeForCausalLM,
    dense: LlamaForCausalLM,
    plans: list[LayerPlan],
    geometry: Geometry,
    density: float,
    details: dict[str, object],
) -> None:
    """Writes what distinguishes the repaired `model` (fp32) from `dense`."""
    base = carve_as_planned(dense, plans, geometry)
    bases = dict(stored(base))
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored(model):
        kind = kind_of(name)
        if kind == "plain":
            tensors[name] = tensor.float() if name.endswith("bias") else tensor.bfloat16()
        else:
            coded = encode(name, tensor.float() - bases[name], density)
            tensors[f"{name}.scale"] = coded.scale_R
            codes = coded.codes_RH.numpy()
            packed = _pack_trits(codes) if kind == "ternary" else codes.tobytes()
            squeezed = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)  # digits have no order to find, only odds
            blob = squeezed.compress(packed) + squeezed.flush()
            tensors[f"{name}.codes"] = torch.from_numpy(np.frombuffer(blob, dtype=np.uint8).copy())
    for part in ("shared_S", "own_En", "spare_Em"):
        tensors[f"plan.{part}"] = torch.stack([getattr(plan, part) for plan in plans]).to(torch.int16)
    header = {
        "format": FORMAT,
        "dense": weights_hash(dense),
        "geometry": json.dumps(asdict(geometry)),
        "details": json.dumps(details),
    }
    write_bytes(file, save(tensors, metadata=header))


def find_delta(name: str) -> Path:
    """A delta by path, or one shipped with the package by name.

    Raises:
        MoexpError: there is neither.
    """
    folder = Path(str(resources.files("moexp.target") / "deltas"))
    for file in (folder / f"{name}.safetensors", Path(name)):
        if file.is_file():
            return file
    shipped = ", ".join(sorted(file.stem for file in folder.glob("*.safetensors"))) or "none is shipped"
    raise MoexpError(f"no delta {name!r}", where="target.delta", valid=f"a file, or one of: {shipped}")


@dataclass
class Rebuilt:
    """A model rebuilt from a delta.

    Attributes:
        model: repaired, in fp32.
        plans: where each layer's neurons went.
        bases: the carved weights that the delta's codes were added to, by parameter (routers: zero).
        details: what the delta was saved with.
    """

    model: Glm4MoeForCausalLM
    plans: list[LayerPlan]
    bases: dict[str, Tensor]
    details: dict[str, object]


def coded_bases(carved: Glm4MoeForCausalLM) -> dict[str, Tensor]:
    """What codes are added to, of a model as it was carved: its weights; zero for the routers, which it has not."""
    kinds = {name: (kind_of(name), tensor) for name, tensor in stored(carved)}
    return {
        name: tensor.clone() if kind == "ternary" else torch.zeros_like(tensor)
        for name, (kind, tensor) in kinds.items()
        if kind in ("ternary", "int8")
    }


def apply_delta(file: Path, dense: LlamaForCausalLM, geometry: Geometry) -> Rebuilt:
    """The repaired model that a delta stands for.

    Raises:
        MoexpError: not a delta, cut short, of another dense model or of another geometry.
    """
    try:
        with safe_open(file, "pt") as saved:
            header = saved.metadata() or {}
            if header.get("format") != FORMAT:
                raise MoexpError("not a delta of a carved model", where=str(file), valid=FORMAT)
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise MoexpError(f"cannot be read: {error}", where=str(file), valid="a whole .safetensors file") from error
    own = Geometry(**json.loads(header["geometry"]))
    shape = ("shared_neurons", "routed_experts", "top_k", "expert_width")
    if any(getattr(own, field) != getattr(geometry, field) for field in shape):
        valid = ", ".join(f"{field}: {getattr(own, field)}" for field in shape)
        raise MoexpError("the delta has another geometry", where="target.carve", valid=valid)
    if header["dense"] != weights_hash(dense):
        raise MoexpError("the delta belongs to another dense model", where="target.delta", valid=header["dense"])
    planned = [tensors[f"plan.{part}"].long() for part in ("shared_S", "own_En", "spare_Em")]
    plans = [LayerPlan(*parts) for parts in zip(*planned, strict=True)]
    model = carve_as_planned(dense, plans, geometry)
    bases = coded_bases(model)
    with torch.no_grad():
        for name, tensor in stored(model):
            if kind_of(name) == "plain":
                tensor.copy_(tensors[name])
            else:
                tensor.add_(_unpacked(name, tensor, tensors, file).decode(tensor, name))
    return Rebuilt(model, plans, bases, json.loads(header["details"]))


def weights_hash(model: torch.nn.Module) -> str:
    """A short hash of a model's parameters, names and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(tensor.detach().bfloat16().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _unpacked(name: str, like: Tensor, tensors: dict[str, Tensor], file: Path) -> Coded:
    columns = like.shape[-2] if "down_proj" in name else like.shape[-1]
    try:
        blob = zlib.decompress(tensors[f"{name}.codes"].numpy().tobytes())
        scale_R = tensors[f"{name}.scale"]
        flat = _unpack_trits(blob, like.numel()) if kind_of(name) == "ternary" else np.frombuffer(blob, np.int8)
        codes_RH = torch.from_numpy(flat.copy()).view(len(scale_R), columns)
    except (KeyError, ValueError, RuntimeError, zlib.error) as error:
        raise MoexpError(f"damaged at {name}: {error}", where=str(file), valid="the file as it was saved") from error
    return Coded(codes_RH, scale_R)


def _pack_trits(codes: np.ndarray) -> bytes:
    digits = np.zeros(-(-codes.size // TRITS) * TRITS, dtype=np.uint8)
    digits[: codes.size] = codes.ravel() + 1
    groups = digits.reshape(-1, TRITS)
    packed = np.zeros(len(groups), dtype=np.uint8)
    for digit in range(TRITS):
        packed = packed * 3 + groups[:, digit]
    return packed.astype(np.uint8).tobytes()


def _unpack_trits(packed: bytes, count: int) -> np.ndarray:
    table = np.array([[value // 3**digit % 3 for digit in reversed(range(TRITS))] for value in range(3**TRITS)])
    return (table.astype(np.int8) - 1)[np.frombuffer(packed, np.uint8)].ravel()[:count]
