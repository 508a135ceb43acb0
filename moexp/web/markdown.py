"""`REPORT.md`: the whole report as one Markdown file, with relative links to everything else in its folder. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

from moexp.tables.core.table import view_text
from moexp.web.contents import REPORT_HTML, Document, Picture, Section
from moexp.web.facts import code, plain
from moexp.web.report import Report


def report_markdown(report: Report) -> str:
    """The file's text."""
    parts = [
        f"# Results of `{report.name}`",
        f"Every number is tagged measured, emulated, simulated or paper. {link(REPORT_HTML)} holds the same with a "
        "table of every request and its cycles.",
        "## What was run",
        "\n".join(f"- **{name}**: {value}" for name, value in report.facts),
    ]
    if report.headline or report.gate:
        parts += ["## Headline figures", *map(view_text, report.headline)]
        parts += [report.gate] if report.gate else []
    for section in report.sections:
        parts += _section(section)
    parts += ["## Files", "\n".join(f"- {link(file)}" for file in report.files) or "None."]
    parts += ["## Provenance", *(report.provenance or ["No records."])]
    return "\n\n".join(parts) + "\n"


def link(file: str) -> str:
    """A link to a file of the results folder."""
    return f"[{code(file)}]({quote(file)})"


def demoted(body: str, levels: int) -> str:
    """A document's text with its headings `levels` lower."""
    return re.sub(r"^(#{1,4}) ", lambda found: "#" * min(6, len(found[1]) + levels) + " ", body, flags=re.MULTILINE)


def _section(section: Section) -> list[str]:
    parts = [f"## {plain(section.title)}", *(part for picture in section.pictures for part in _picture(picture))]
    return parts + [part for document in section.documents for part in _document(document)]


def _picture(picture: Picture) -> Iterable[str]:
    yield f"![{plain(picture.title)}]({quote(picture.path)})"
    tags = f" ({', '.join(map(plain, picture.tags))})" if picture.tags else ""
    yield f"{plain(picture.title)}{tags}: {', '.join(map(link, picture.files))}"


def _document(document: Document) -> Iterable[str]:
    yield f"### {document.title}"
    yield f"Files: {', '.join(map(link, document.files))}"
    if document.body:
        yield demoted(document.body, 2)
