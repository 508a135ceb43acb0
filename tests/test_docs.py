"""README and docs: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from moexp.cli import main as cli
from moexp.tables.write import TABLES
from tests import where_table
from tests.trees import random_tree
from tests.where_table import PAGE, REPO

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), *sorted((REPO / "recipes").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)\)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_the_readme_is_one_screen_and_links_every_page():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for page in (REPO / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in text, page.name


def test_every_command_stands_in_the_docs_with_its_example():
    text = (REPO / "docs" / "commands.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| `([^`]+)` \|$", text, re.MULTILINE))
    assert rows == {name: each.epilog.removeprefix("Example: ") for name, each in commands.items()}


def test_the_selector_of_the_docs_selects():
    (code,) = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "parts.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    tree = random_tree(9, np.random.default_rng(0))
    chosen = names["select"](names["Breadth"](), tree, 4).nodes
    assert chosen[0] == 0 and len(chosen) == 4 and [tree.depths_N[node] for node in chosen] == sorted(tree.depths_N)[:4]


def test_where_is_what_the_docstrings_say():
    assert PAGE.read_text(encoding="utf-8") == where_table.page(where_table.tagged()), (
        "run: python -m tests.where_table --write"
    )


def test_every_table_and_equation_of_the_methods_is_found():
    items = where_table.tagged()
    paper_names = {"draftexpert": "DraftExpert", "ecospec": "EcoSpec"}
    wanted = {(paper_names[paper], "Table", str(n)) for paper, numbers in TABLES.items() for n in numbers}
    wanted |= {("DraftExpert", "eq.", str(n)) for n in range(2, 15)} | {
        ("EcoSpec", "eq.", str(n)) for n in range(2, 11)
    }
    wanted |= {(paper, "Algorithm", "1") for paper in where_table.PAPERS}
    assert not wanted - items.keys()


def test_a_line_that_names_no_item_is_an_error():
    assert where_table.items_of("What it does.\n\nPaper: DraftExpert eq. 6; EcoSpec Algorithm 1.", "m") == [
        ("DraftExpert", "eq.", "6"),
        ("EcoSpec", "Algorithm", "1"),
    ]
    with pytest.raises(AssertionError, match="not an item"):
        where_table.items_of("Paper: equation 6.", "m")
    with pytest.raises(AssertionError, match="no full stop"):
        where_table.items_of("Paper: EcoSpec eq. 6", "m")
