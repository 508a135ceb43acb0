"""`report.html`: the whole report as one file that asks nothing of any server. Markdown is rendered by markdown-it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from moexp.base.errors import MoexpError
from moexp.tables.core.table import view_text
from moexp.tables.core.tags import EMULATED, MEASURED, PAPER, SIMULATED
from moexp.web.contents import Document, Picture, Section
from moexp.web.report import Report

TAGS = (MEASURED, EMULATED, SIMULATED, PAPER)
OPEN = {"table 2: decode throughput", "table 1: speedup over ar"}
"""How the tables begin that are not folded: those that the papers' claims rest on."""

SCROLL = '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>\n'
VIEW = r"^\*\*[^\n]+\*\*\n\n(?:\|[^\n]*\n?)+"
"""A table with its title, as `moexp.tables.core.table.view_text` writes it."""


def report_html(report: Report, folder: Path) -> str:
    """The page.

    Args:
        folder: where the figures lie.

    Raises:
        MoexpError: a figure cannot be read.
    """
    assets = files("moexp.web") / "assets"
    style, script, page = (
        (assets / name).read_text(encoding="utf-8") for name in ("report.css", "report.js", "page.html")
    )
    sections = [_section(section, folder) for section in report.sections]
    named = [("run", "What was run"), ("headline", "Headline")]
    named += [(section.anchor, section.title) for section in report.sections]
    named += [("requests", "Requests"), ("files", "Files"), ("provenance", "Provenance")]
    return Template(page).substitute(
        name=escape(report.name),
        style=style,
        script=script,
        links="\n".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in named),
        facts=_facts(report.facts),
        headline=_headline(report),
        sections="\n".join(sections),
        files="\n".join(f"<li>{_file(file)}</li>" for file in report.files),
        provenance="\n".join(render(line) for line in report.provenance) or "<p>No records.</p>",
        records=embedded_json(report.explorer),
    )


def embedded_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render(text: str, lowered: int = 0) -> str:
    """Markdown as HTML: HTML in it is shown as text, and links and images are not followed.

    Args:
        lowered: levels by which headings are lowered.
    """
    html = str(_parser(lowered).render(text)).strip()
    return html.replace(' style="text-align:right"', ' class="num"')  # quotes in texts are escaped: no text can match


def _parser(lowered: int) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.disable(["link", "image", "autolink", "reference"])

    def heading(
        renderer: RendererHTML, tokens: Sequence[Token], at: int, options: OptionsDict, env: dict[str, Any]
    ) -> str:
        tokens[at].tag = f"h{min(6, int(tokens[at].tag[1]) + lowered)}"
        return renderer.renderToken(tokens, at, options, env)

    parser.add_render_rule("heading_open", heading)
    parser.add_render_rule("heading_close", heading)
    parser.add_render_rule("text", lambda renderer, tokens, at, options, env: tagged(tokens[at].content))
    parser.add_render_rule("table_open", lambda *_: SCROLL)
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return parser


def tagged(text: str) -> str:
    """Escaped text, with what says where a number is from made visible as a badge."""
    if text.lower() in TAGS:
        return badge(text.lower())
    parts = re.split(rf"\(({'|'.join(TAGS)})\)", text)
    return "".join(badge(part) if place % 2 else escape(part) for place, part in enumerate(parts))


def badge(tag: str) -> str:
    kind = f" tag-{tag}" if tag in TAGS else ""
    return f'<span class="tag{kind}">{escape(tag)}</span>'


def _facts(pairs: Sequence[tuple[str, str]]) -> str:
    parser = _parser(0)
    lines = [f"<dt>{escape(name)}</dt><dd>{parser.renderInline(value)}</dd>" for name, value in pairs]
    return "\n".join(lines)


def _headline(report: Report) -> str:
    parts = [render(view_text(view)) for view in report.headline]
    parts += [render(report.gate)] if report.gate else []
    return "\n".join(parts) or "<p>Nothing is measured yet.</p>"


def _section(section: Section, folder: Path) -> str:
    parts = [f'<section id="{section.anchor}">', f"<h2>{escape(section.title)}</h2>"]
    if section.pictures:
        parts += ['<div class="pictures">', *(_picture(picture, folder) for picture in section.pictures), "</div>"]
    folded = len(section.documents) > 1
    parts += [_document(document, folded) for document in section.documents]
    return "\n".join([*parts, "</section>"])


def _document(document: Document, folded: bool) -> str:
    title = tagged(document.title.replace("`", ""))
    body = f'{_body(document.body)}\n<p class="files">Files: {_files(document.files)}</p>'
    if not folded:
        return body
    opened = " open" if any(document.title.lower().startswith(start) for start in OPEN) else ""
    return f'<details id="{document.anchor}"{opened}>\n<summary><h3>{title}</h3></summary>\n{body}\n</details>'


def _body(text: str) -> str:
    """A document's Markdown as HTML; tables that follow each other stand side by side where the page is wide enough."""
    parts, at = [], 0
    for run in re.finditer(rf"(?:{VIEW}\n*)+", text, re.MULTILINE):
        views = (f"<div>{render(view[0])}</div>" for view in re.finditer(VIEW, run[0], re.MULTILINE))
        parts += [render(text[at : run.start()], 2), f'<div class="views">{"".join(views)}</div>']
        at = run.end()
    return "\n".join([*parts, render(text[at:], 2)])


def _picture(picture: Picture, folder: Path) -> str:
    try:
        data = base64.b64encode((folder / picture.path).read_bytes()).decode("ascii")
    except OSError as error:
        raise MoexpError(f"cannot read: {error.strerror}", where=str(folder / picture.path)) from error
    title, tags = escape(picture.title), " ".join(map(badge, picture.tags))
    return (
        f'<figure><img alt="{title}; the file of its values is named below" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{title} {tags} {_files(picture.files)}</figcaption></figure>"
    )


def _files(names: Sequence[str]) -> str:
    return ", ".join(map(_file, names))


def _file(name: str) -> str:
    return f'<a href="{escape(quote(name))}">{escape(name)}</a>'
