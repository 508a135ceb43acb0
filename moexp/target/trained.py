"""What is trained for a target, on disk: a folder with safetensors weights and a JSON header that names the target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moexp.base.atomic import new_folder, write_text
from moexp.base.errors import MoexpError


@dataclass(frozen=True)
class TrainedFiles:
    """The files of one kind.

    Attributes:
        what: "draft experts", "a predictor": in messages.
        weights, header: names of the two files.
        format: version of the files, which the header repeats.
        command: that writes such folders.
        missing: the message where there is no header; by default its file name.
        content: what is called damaged where the weights are.
    """

    what: str
    weights: str
    header: str
    format: str
    command: str
    missing: str = ""
    content: str = "weights"

    def save(self, folder: Path, tensors: Mapping[str, Tensor], target: str, details: Mapping[str, Any]) -> None:
        """Writes the folder atomically; see `write_into`."""
        with new_folder(folder) as temp:
            self.write_into(temp, tensors, target, details)

    def write_into(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: str,
        details: Mapping[str, Any],
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Writes both files into a folder, the header last: without it there is nothing.

        Args:
            target: the target's identity (`load.target_identity`).
            details: what else the header is to say: geometry, recipe, metrics, provenance.
            metadata: of the safetensors file.
        """
        plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(plain, folder / self.weights, metadata=metadata)
        header = {"format": self.format, "target": target, **details}
        write_text(folder / self.header, json.dumps(header, indent=2) + "\n")

    def read_header(self, folder: Path) -> dict[str, Any]:
        """The folder's header.

        Raises:
            MoexpError: there is none, or one of another format.
        """
        missing, valid = self.missing or f"no readable {self.header}", f"a folder written by `moexp {self.command}`"
        header = read_json(folder / self.header, missing=missing, valid=valid)
        if header.get("format") != self.format:
            what = f"unknown format {header.get('format')!r}"
            raise MoexpError(what, where=str(folder / self.header), valid=self.format)
        return header

    def header_for(self, folder: Path, target: str) -> dict[str, Any]:
        """The header of a folder that was trained for the target of this identity.

        Raises:
            MoexpError: as `read_header`, or trained for another target.
        """
        header = self.read_header(folder)
        self.check_target(header, target, folder)
        return header

    def check_target(self, header: Mapping[str, Any], target: str, folder: Path) -> None:
        """MoexpError unless the header names the target of this identity."""
        named = str(header.get("target"))
        if named != target:
            what = f"{self.what} of target {named[:12]}, but the target is {target[:12]}"
            raise MoexpError(what, where=str(folder), valid=f"{self.what} trained on this very target")

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """The weights; MoexpError where they are missing or damaged."""
        try:
            return load_file(folder / self.weights)
        except (OSError, SafetensorError) as error:
            raise self.damaged(folder, error) from error

    def load_into(self, module: nn.Module, folder: Path) -> None:
        """Loads the weights into a module; MoexpError where they are missing, damaged, or of other shapes."""
        try:
            module.load_state_dict(self.tensors(folder))
        except RuntimeError as error:
            raise self.damaged(folder, error) from error

    def damaged(self, folder: Path, error: Exception) -> MoexpError:
        """The error to raise where the weights cannot be used."""
        what = f"damaged {self.content}: {str(error).splitlines()[0]}"
        return MoexpError(what, where=str(folder / self.weights), valid="train again")


def read_json(file: Path, *, valid: str, missing: str = "") -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        MoexpError: there is none; it says `missing`, by default the file's name.
    """
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        what = missing or f"no readable {file.name}"
        raise MoexpError(what, where=str(file.parent), valid=valid) from error
    if not isinstance(value, dict):
        raise MoexpError(f"{file.name} is no JSON object", where=str(file.parent), valid=valid)
    return value
