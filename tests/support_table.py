"""The table of what is supported, made from the tests that pass.

`python -m tests.support_table` runs `tests/test_families.py` and prints the table; `--write` puts it into
docs/families.md.
A cell is filled where both the logits test and the bitwise test of that family, precision and store have passed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path

from tests.family_files import CASES, STORES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- support table -->", "<!-- end -->"
NEEDED = ("test_logits_are_transformers_own", "test_every_method_has_ars_bits")
_NODE = re.compile(r"::(\w+)\[(?P<case>[\w]+-[\w]+)-(?P<store>\w+)\]$")


def table(passing: Collection[tuple[str, str]]) -> str:
    """Markdown; `passing` holds (case, store) of those that passed."""
    lines = [
        f"| family | checkpoints | precision | {' | '.join(f'experts {store}' for store in STORES)} |",
        "|---|---|---|" + "---|" * len(STORES),
    ]
    for case in CASES:
        cells = ["exact" if (case.id, store) in passing else "-" for store in STORES]
        lines.append(f"| `{case.family}` | {case.models} | {case.precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


class Outcomes:
    """A pytest plugin: which (case, store) each needed test has passed for."""

    def __init__(self) -> None:
        self.passed: dict[str, set[tuple[str, str]]] = {name: set() for name in NEEDED}

    def pytest_runtest_logreport(self, report: object) -> None:
        match = _NODE.search(report.nodeid)  # type: ignore[attr-defined]
        if match and match[1] in self.passed and report.when == "call" and report.passed:  # type: ignore[attr-defined]
            self.passed[match[1]].add((match["case"], match["store"]))

    def both(self) -> set[tuple[str, str]]:
        return set.intersection(*self.passed.values())


def main() -> int:
    import pytest

    outcomes = Outcomes()
    tests = Path(__file__).with_name("test_families.py")
    pytest.main(["-q", "-p", "no:xdist", "-k", " or ".join(NEEDED), str(tests)], plugins=[outcomes])
    made = table(outcomes.both())
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text()
        start = text.index(BEGIN) + len(BEGIN)
        PAGE.write_text(f"{text[:start]}\n{made}\n{text[text.index(END, start) :]}")
    print(made)
    return int(len(outcomes.both()) < len(CASES) * len(STORES))


if __name__ == "__main__":
    sys.exit(main())
