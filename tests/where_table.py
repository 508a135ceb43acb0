"""`docs/where.md`: where each equation, algorithm, table and figure of the two papers is, made from docstrings.

A docstring names what it implements on a line of its own: `Paper: DraftExpert eq. 6; EcoSpec Algorithm 1.`
`python -m tests.where_table --write` makes the page anew.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "where.md"
PAPERS = ("DraftExpert", "EcoSpec")
KINDS = ("eq.", "Algorithm", "Table", "Figure", "section")
ITEM = re.compile(rf"({'|'.join(PAPERS)}) ({'|'.join(map(re.escape, KINDS))}) (\d+|[A-Z]?[.\d]+)")

LATER = ("audit", "bench")
"""Packages whose modules come after those that implement an item: they check or measure it."""

Item = tuple[str, str, str]
"""Paper, kind, number."""

HEAD = """# Where each equation, algorithm, table and figure is

Made from docstrings by `python -m tests.where_table --write`; a test keeps it so.
"""


def items_of(docstring: str, where: str) -> list[Item]:
    """What a docstring's `Paper:` line names.

    Raises:
        AssertionError: a line that cannot be read.
    """
    items: list[Item] = []
    for text in re.findall(r"^\s*Paper: (.*)$", docstring, re.MULTILINE):
        assert text.endswith("."), f"{where}: no full stop after `Paper: {text}`"
        for part in text[:-1].split("; "):
            match = ITEM.fullmatch(part)
            assert match, f"{where}: not an item of a paper: {part!r}"
            items.append((match[1], match[2], match[3]))
    return items


def definitions(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """(`module:name`, docstring) of the module and of everything defined in it."""
    yield module, ast.get_docstring(tree) or ""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                yield f"{module}:{name}", ast.get_docstring(child) or ""
                yield from below(child, f"{name}.")

    yield from below(tree, "")


def tagged() -> dict[Item, list[str]]:
    """Item -> where it is, over the whole package."""
    locations: dict[Item, list[str]] = {}
    files = sorted((REPO / "moexp").rglob("*.py"))
    for file in sorted(files, key=lambda file: file.parts[len(REPO.parts) + 1] in LATER):
        parts = file.relative_to(REPO).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for location, docstring in definitions(ast.parse(file.read_text(encoding="utf-8")), module):
            for item in items_of(docstring, location):
                locations.setdefault(item, []).append(location)
    return locations


def order(item: Item) -> tuple[int, int, list[tuple[int, str]]]:
    """Papers and kinds in their own order, numbers by value, appendices after them."""
    paper, kind, number = item
    parts = [(int(part), "") if part.isdigit() else (1000, part) for part in number.split(".") if part]
    return PAPERS.index(paper), KINDS.index(kind), parts


def page(locations: dict[Item, list[str]]) -> str:
    """The Markdown page."""
    lines = [HEAD]
    for paper in PAPERS:
        lines += [f"## {paper}", "", "| item | module:name |", "|---|---|"]
        for item in sorted((item for item in locations if item[0] == paper), key=order):
            lines.append(f"| {item[1]} {item[2]} | {', '.join(f'`{location}`' for location in locations[item])} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    text = page(tagged())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    print(text, end="")
