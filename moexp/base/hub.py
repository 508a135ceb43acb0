"""Rows of hub datasets, through `datasets`; whatever goes wrong on the way is one line for the user."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from moexp.base.errors import MoexpError

GRAMMAR = "hf:repo[:config][:split][#field]"
# With one part after the repository, these are splits (a slice may follow) and anything else is a config.
SPLIT = re.compile(r"(train|test|validation|val|dev)(\[.*\])?$")


def hub_rows(
    location: str, *, prefer: Sequence[str], streaming: bool, drop: Sequence[str] = ()
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, row) for each row of a dataset.

    Args:
        location: `repo[:config][:split]`.
        prefer: the splits to look for, in this order, where none is named.
        streaming: read rows over the network one by one, without downloading the data set.
        drop: columns to leave out, never decoded.

    Raises:
        MoexpError: a malformed location, or an unreadable dataset: offline, missing, gated, no such split.
    """
    repo, config, split = parse_location(location)
    where = f"hf:{location}"
    try:
        import datasets

        with _offline_if_unreachable():
            # Offline there is nothing to stream, but a copy in the cache may do.
            streaming = streaming and not datasets.config.HF_HUB_OFFLINE
            data = datasets.load_dataset(repo, config, split=split, streaming=streaming)
        if isinstance(data, Mapping):
            data = data[next((name for name in prefer if name in data), next(iter(data)))]
        if drop:
            data = data.remove_columns(list(drop))
        for row in data:
            yield where, row
    except Exception as error:
        # The libraries below raise dozens of types (network, authorisation, parsing); users need one line.
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise MoexpError(
            f"cannot read this dataset: {type(error).__name__}: {reason[:200].rstrip('.')}",
            where=where,
            valid="a dataset this machine can reach and your account may read, or a local .jsonl file",
        ) from error


def parse_location(location: str) -> tuple[str, str | None, str | None]:
    """`repo[:config][:split]` as (repo, config, split)."""
    repo, *parts = re.split(r":(?![^\[]*\])", location)  # not at the colon of a slice: train[:10%]
    if not repo or len(parts) > 2:
        raise MoexpError("malformed dataset name", where=f"hf:{location}", valid=GRAMMAR)
    if len(parts) == 1 and SPLIT.match(parts[0]):
        parts = ["", parts[0]]
    config, split = (*parts, "", "")[:2]
    return repo, config or None, split or None


@contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Without a network, the client's retries take half a minute and a dozen log lines: look first."""
    import datasets
    from huggingface_hub import constants

    saved = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not any(saved) and not reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = saved


def reachable(endpoint: str) -> bool:
    """Whether the hub at this address takes a connection, within five seconds."""
    if urllib.request.getproxies():
        return True  # a direct connection would prove nothing
    url = urlsplit(endpoint)
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True
