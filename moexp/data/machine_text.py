"""Text that every machine has: documentation and comments of Python's standard library, half a million words."""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from moexp.base.errors import MoexpError

# Tests hold hardly any prose, and what is installed differs between machines.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled", "turtledemo"}
)
CHUNK_CHARS = 2000
MIN_COMMENT_WORDS = 12


def machine_texts(root: Path | None = None) -> Iterator[str]:
    """Chunks of about 2,000 characters from the sources in `root` (the standard library), always the same.

    Raises:
        MoexpError: the folder holds no Python sources (a stripped installation).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    # Ordered by hash, so that any prefix of the stream is a mixture of the library.
    ordered = sorted(_source_names(root), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    if not ordered:
        raise MoexpError(
            "no Python sources to read text from", where=str(root), valid="another corpus, e.g. a .txt file"
        )
    seen: set[str] = set()  # licence headers and inherited docstrings occur many times
    for name in ordered:
        pieces = [piece for piece in _prose(root / name) if piece not in seen]
        seen.update(pieces)
        yield from join_chunks(pieces)


def _source_names(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        yield from ((Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py"))


def join_chunks(pieces: Iterable[str]) -> Iterator[str]:
    """Pieces joined by blank lines to chunks of about `CHUNK_CHARS`."""
    chunk: list[str] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece)
        if size >= CHUNK_CHARS:
            yield "\n\n".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield "\n\n".join(chunk)


def _prose(path: Path) -> list[str]:
    """Docstrings and comment blocks of one source file, in the order of their lines."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences in strings are not our concern
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return []
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        return _topic_paragraphs(tree)
    texts: list[tuple[int, str]] = []
    string_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                texts.append((node.body[0].lineno, docstring.strip()))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            string_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    texts += _comment_blocks(source, string_lines)
    return [text for _, text in sorted(texts)]


def _comment_blocks(source: str, string_lines: set[int]) -> Iterator[tuple[int, str]]:
    """Runs of full-line comments long enough to be prose, outside of strings."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        stripped = line.strip()
        if stripped.startswith("#") and number not in string_lines:
            block.append(stripped.lstrip("#!").strip())
            continue
        text = "\n".join(block).strip()
        if len(text.split()) >= MIN_COMMENT_WORDS:
            yield number - len(block), text
        block = []


def _topic_paragraphs(tree: ast.Module) -> list[str]:
    """The language reference that `help()` shows: one dictionary of long texts."""
    texts = [
        value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for value in node.values
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]
    return [paragraph.strip("\n") for text in texts for paragraph in text.split("\n\n") if paragraph.strip()]
