"""Texts of a report: escaped for Markdown, and Markdown as HTML by markdown-it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from markupsafe import Markup

from moexp.tables.core.tags import EMULATED, MEASURED, PAPER, SIMULATED

TAGS = (MEASURED, EMULATED, SIMULATED, PAPER)

SCROLL = '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>\n'
VIEW = r"^\*\*[^\n]+\*\*\n\n(?:\|[^\n]*\n?)+"
"""A table with its title, as `moexp.tables.core.table.view_text` writes it."""


# --- Markdown ---


def plain(text: str) -> str:
    """Text whose characters have no meaning in Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#&~" else c for c in " ".join(text.split()))


def code(text: str) -> str:
    """Text as Markdown code; a backtick in it would end it."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def link(file: str) -> str:
    """A Markdown link to a file of the results folder."""
    return f"[{code(file)}]({quote(file)})"


def demoted(body: str, levels: int = 2) -> str:
    """A document's text with its headings `levels` lower."""
    return re.sub(r"^(#{1,4}) ", lambda match: "#" * min(6, len(match[1]) + levels) + " ", body, flags=re.MULTILINE)


# --- HTML ---


def render(text: str, lowered: int = 0) -> Markup:
    """Markdown as HTML: HTML in it is shown as text, and links and images are not followed.

    Args:
        lowered: levels by which headings are lowered.
    """
    html = str(_parser(lowered).render(text)).strip()
    return Markup(html.replace(' style="text-align:right"', ' class="num"'))  # quotes in texts are escaped


def render_inline(text: str) -> Markup:
    """A line of Markdown as HTML."""
    return Markup(_parser(0).renderInline(text))


def render_document(text: str) -> Markup:
    """A document's Markdown as HTML; tables that follow each other stand side by side where the page is wide enough."""
    parts, end = [], 0
    for run in re.finditer(rf"(?:{VIEW}\n*)+", text, re.MULTILINE):
        views = (f"<div>{render(view[0])}</div>" for view in re.finditer(VIEW, run[0], re.MULTILINE))
        parts += [render(text[end : run.start()], 2), f'<div class="views">{"".join(views)}</div>']
        end = run.end()
    return Markup("\n".join([*parts, render(text[end:], 2)]))


def _parser(lowered: int) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.disable(["link", "image", "autolink", "reference"])

    def heading(
        renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: dict[str, Any]
    ) -> str:
        tokens[index].tag = f"h{min(6, int(tokens[index].tag[1]) + lowered)}"
        return renderer.renderToken(tokens, index, options, env)

    parser.add_render_rule("heading_open", heading)
    parser.add_render_rule("heading_close", heading)
    parser.add_render_rule("text", lambda renderer, tokens, index, options, env: tagged(tokens[index].content))
    parser.add_render_rule("table_open", lambda *_: SCROLL)
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return parser


def tagged(text: str) -> Markup:
    """Escaped text, with what says where a number is from shown as a badge."""
    if text.lower() in TAGS:
        return badge(text.lower())
    parts = re.split(rf"\(({'|'.join(TAGS)})\)", text)
    return Markup("".join(badge(part) if index % 2 else escape(part) for index, part in enumerate(parts)))


def badge(tag: str) -> Markup:
    """A tag as the page shows it."""
    kind = f" tag-{tag}" if tag in TAGS else ""
    return Markup(f'<span class="tag{kind}">{escape(tag)}</span>')
