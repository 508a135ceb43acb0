"""A checkpoint on the hub, or a local folder: the files moexp reads, and no code."""

from __future__ import annotations

from pathlib import Path

from ..errors import MoexpError

PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer*", "*.model"]


def hub_folder(path: str, revision: str | None = None) -> Path:
    """The local folder of a checkpoint: `path` itself if it is one, else a snapshot of that hub id.

    Only weights (safetensors), configuration and tokenizer files are fetched.

    Raises:
        MoexpError: no such folder, and the hub does not answer, does not know the id, or refuses it.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise MoexpError(
            f"cannot have {path}: {str(error).splitlines()[0]}",
            where="target.path",
            valid="a local checkpoint folder, or a hub id that can be reached (gated ones need a token)",
        ) from error
