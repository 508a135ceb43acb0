"""The order of packages: who may import whom, and that nobody imports in a circle.

Every import counts, those inside functions too; what stands under `if TYPE_CHECKING:` does not run and does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

REPO = Path(__file__).parent.parent

ORDER = (
    "base", "records", "metrics", "papers", "config", "data", "target", "runtime", "learn", "tables.core", "sim",
    "tables", "bench", "audit", "plan", "web", "cli",
)  # fmt: skip
"""A module imports from its own package and from those before it."""


def module_files() -> dict[str, Path]:
    files = {}
    for file in sorted((REPO / "moexp").rglob("*.py")):
        parts = file.relative_to(REPO).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at any depth, but for those of type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from statements(child)


def imported(files: dict[str, Path]) -> dict[str, set[str]]:
    """Modules of the package that each one imports; a relative import, or one of a module that is not there, fails."""
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        graph[module] = set()
        for statement in statements(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                assert statement.level == 0 and statement.module, f"{file}:{statement.lineno}: a relative import"
                inner = [f"{statement.module}.{alias.name}" for alias in statement.names]
                names = [name if name in files else statement.module for name in inner]
            ours = {name for name in names if name.split(".")[0] == "moexp"}
            assert ours <= files.keys(), f"{file}:{statement.lineno}: {ours - files.keys()}"
            graph[module] |= ours - {module}
    return graph


def rank(module: str) -> int:
    """The place of a module in `ORDER`; -1 for the root package, which imports nothing."""
    inner = module.removeprefix("moexp").removeprefix(".")
    ranks = [(len(name), n) for n, name in enumerate(ORDER) if inner == name or inner.startswith(name + ".")]
    if not ranks:
        assert inner in ("", "__main__"), f"{module} is in no package of the order"
        return len(ORDER) if inner else -1
    return max(ranks)[1]


def test_packages_import_those_before_them():
    graph = imported(module_files())
    against = {f"{m} -> {other}" for m, others in graph.items() for other in others if rank(other) > rank(m)}
    assert not against, sorted(against)


def test_there_is_no_circle():
    try:
        TopologicalSorter(imported(module_files())).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from error


def test_the_graph_has_imports_inside_functions_and_leaves_type_checking_out():
    source = (
        "if TYPE_CHECKING:\n    import moexp.sim\ndef f():\n    from moexp.base import errors\n"
        "try:\n    import json\nexcept ImportError:\n    pass"
    )
    names = [s.names[0].name for s in statements(ast.parse(source))]
    assert names == ["errors", "json"]


def test_every_package_says_what_it_is_for():
    for module, file in module_files().items():
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{module} has no docstring"
