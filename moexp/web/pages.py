"""`REPORT.md` and `report.html`, rendered from the templates in `assets`; the page asks nothing of any server."""

from __future__ import annotations

import base64
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from jinja2 import Environment, FunctionLoader, StrictUndefined

from moexp.base.errors import MoexpError
from moexp.tables.core.table import view_text
from moexp.web import markup
from moexp.web.contents import REPORT_HTML, REPORT_MD, Document

if TYPE_CHECKING:
    from moexp.web.build import Report

OPEN = ("table 2: decode throughput", "table 1: speedup over ar")
"""How the tables begin that are not folded: those that the papers' claims rest on."""


def render_reports(report: Report, folder: Path) -> dict[str, str]:
    """Both reports by file name.

    Args:
        folder: where the figures lie.

    Raises:
        MoexpError: a figure cannot be read.
    """
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=lambda name: name == REPORT_HTML,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals |= {"asset": _asset, "page": REPORT_HTML}
    environment.filters |= {
        "plain": markup.plain, "code": markup.code, "link": markup.link, "demoted": markup.demoted, "quoted": quote,
        "html": markup.render, "inline_html": markup.render_inline, "document_html": markup.render_document,
        "tagged": markup.tagged, "badge": markup.badge, "view_text": view_text, "is_open": _is_open,
        "png": lambda path: _base64(folder / path),
    }  # fmt: skip
    return {name: environment.get_template(name).render(report=report) for name in (REPORT_MD, REPORT_HTML)}


def _asset(name: str) -> str:
    return (files("moexp.web") / "assets" / name).read_text(encoding="utf-8")


def _is_open(document: Document) -> bool:
    return document.title.lower().startswith(OPEN)


def _base64(path: Path) -> str:
    try:
        return base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise MoexpError(f"cannot read: {error.strerror}", where=str(path)) from error
