"""A checkpoint on the hub, or a local folder: the files moexp reads, and no code."""

from __future__ import annotations

import errno
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.base.hub import reachable

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt"]
"""Weights, configuration, tokenizer (SentencePiece and tiktoken files end in `.model`)."""
LEFT_OUT = ["*/*", "consolidated*"]
"""Folders with the same weights in formats of their authors (`original/`, `metal/`), and the like beside the shards."""


def hub_folder(path: str, revision: str | None = None, *, key: str = "target.path") -> Path:
    """The local folder of a checkpoint: `path` itself if it is one, else a snapshot of that hub id.

    A snapshot is fetched once, into the cache of huggingface_hub, and goes on where it was interrupted. Without a
    network, or with HF_HUB_OFFLINE=1, the cache must hold all of it.

    Args:
        path: a local folder, or a hub id.
        revision: branch, tag or commit on the hub; None: its main branch.
        key: of the recipe, that names it.

    Raises:
        MoexpError: no such folder; or the hub cannot be reached, does not know the id or the revision, or refuses
            them; or what it has there are no safetensors weights.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if revision is not None:
            raise MoexpError(f"{path} is a folder, which has no revisions", where="target.revision", valid="null")
        return local
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise MoexpError(f"no folder {path}", where=key, valid="a checkpoint folder, or a hub id: owner/name")
    from huggingface_hub import constants, snapshot_download  # late: it takes long to import

    offline = constants.HF_HUB_OFFLINE
    # The client's own attempts on a dead network take long.
    cached_only = offline or not reachable(constants.ENDPOINT)
    try:
        folder = Path(
            snapshot_download(
                path,
                revision=revision,
                allow_patterns=PATTERNS,
                ignore_patterns=LEFT_OUT,
                local_files_only=cached_only,
            )
        )
    except Exception as error:
        # Errors of the network reach us in types of several libraries; users need one line whichever it is.
        unreachable = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} cannot be reached"
        what, valid = _explain(error, path, revision, f"{constants.ENDPOINT}/{path}", unreachable)
        where = "target.revision" if type(error).__name__ == "RevisionNotFoundError" else key
        raise MoexpError(what, where=where, valid=valid) from error
    if not any(folder.glob("*.safetensors")):
        valid = "a checkpoint in safetensors; pickled weights are never read"
        raise MoexpError(f"{path} has no safetensors weights", where=key, valid=valid)
    return folder


def _explain(error: Exception, path: str, revision: str | None, page: str, unreachable: str) -> tuple[str, str]:
    """What keeps a checkpoint away, and what would be valid."""
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    token = "a token that may read it (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        valid = f"ask for it at {page}, then {token}; or a local folder"
        return f"{path} is gated, and this account has no access", valid
    if isinstance(error, errors.RepositoryNotFoundError):
        valid = f"owner/name as in {page.removesuffix(path)}, {token}, or a local folder"
        return f"the hub has no model {path}, or it is private", valid
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{path} has no revision {revision}", f"a branch, tag or commit of {page}, or null for its main branch"
    if isinstance(error, errors.DisabledRepoError):
        return f"{path} was disabled on the hub", "another id, or a local folder"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        what = f"{path}{at} is not (wholly) in the local cache, and {unreachable}"
        return what, "a network to fetch it once, or a local folder"
    if isinstance(error, errors.HFValidationError):
        return f"{path!r} is neither a folder nor a hub id", "a checkpoint folder, or owner/name"
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub answers {error.response.status_code} for {path}{at}", "try again later, or a local folder"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        valid = "a larger disk at HF_HOME (`moexp plan` says how large), or a folder"
        return f"no space left to fetch {path}", valid
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    what = f"cannot fetch {path}{at}: {type(error).__name__}: {reason[:200].rstrip('.')}"
    return what, "a hub id that can be reached, or a local folder"
