"""What a results folder holds, as sections of a report: documents (Markdown) with their figures. Imports no torch.

Known documents come first and in their own order; whatever else is there (audits, simulations, other folders) follows
by name, so that a new kind of result is in the report as soon as it is in the folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from moexp.base.errors import MoexpError
from moexp.papers import PAPERS
from moexp.tables.core.table import read_rows
from moexp.web.sources import PAPER_NAMES

REPORT_MD, REPORT_HTML = "REPORT.md", "report.html"

TITLES = {
    "audit": "Audit",
    "target": "Target",
    "draft_experts": "Draft experts",
    "predictor": "Expert predictor",
    "tune": "Tuning",
}
"""Documents beside the papers' folders, by file name, in the order of the report; the first stands above the papers."""


@dataclass(frozen=True)
class Document:
    """One Markdown file.

    Attributes:
        title: its first heading.
        body: the rest; headings below the first keep their levels.
        files: of the same name, relative to the results folder, itself among them.
    """

    title: str
    body: str
    files: list[str]

    @property
    def anchor(self) -> str:
        return "d-" + anchor_of(Path(self.files[0]).with_suffix("").as_posix())


@dataclass(frozen=True)
class Picture:
    """One figure. `tags` are those of its values, `files` the image and what it shows."""

    title: str
    path: str
    tags: list[str]
    files: list[str]


@dataclass(frozen=True)
class Section:
    """A paper's folder, another folder, or one document beside them."""

    title: str
    documents: list[Document] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return "s-" + anchor_of(self.title)


def read_sections(folder: Path) -> list[Section]:
    """The sections of a results folder; none where nothing is there.

    Raises:
        MoexpError: a file that cannot be read as text.
    """
    files = list_files(folder)
    folders = dict.fromkeys(file.split("/")[0] for file in files if "/" in file)
    order = list(TITLES)
    loose = {Path(file).stem for file in files if "/" not in file and file.endswith((".md", ".png"))}
    singles = sorted(loose, key=lambda name: (order.index(name) if name in order else len(order), name))
    first = singles[:1] if singles[:1] == order[:1] else []
    sections = [_single(folder, files, name) for name in first]
    for name in sorted(folders, key=lambda name: PAPERS.index(name) if name in PAPERS else len(PAPERS)):
        title = PAPER_NAMES.get(name) or _words(name)
        sections.append(_section(folder, title, [file for file in files if file.startswith(f"{name}/")]))
    sections += [_single(folder, files, name) for name in singles if name not in first]
    return [section for section in sections if section.documents or section.pictures]


def list_files(folder: Path) -> list[str]:
    """All files of a results folder but the reports themselves, relative to it, numbers in names by their value."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    shown = [name for name in names if name not in (REPORT_MD, REPORT_HTML) and "/." not in f"/{name}"]
    return sorted(shown, key=_by_number)


def anchor_of(text: str) -> str:
    """An identifier for links within a page."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _single(folder: Path, files: list[str], name: str) -> Section:
    """The section of one document beside the folders."""
    own = [file for file in files if "/" not in file and Path(file).stem == name]
    return _section(folder, TITLES.get(name, _words(name)), own)


def _section(folder: Path, title: str, files: list[str]) -> Section:
    documents = [_document(folder, file, files) for file in files if file.endswith(".md")]
    return Section(title, documents, [_picture(folder, file, files) for file in files if file.endswith(".png")])


def _document(folder: Path, file: str, files: list[str]) -> Document:
    try:
        text = (folder / file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MoexpError(f"not readable as text: {error}", where=str(folder / file)) from error
    heading = re.match(r"\s*# +(.+)\n", text)
    title = heading[1].strip() if heading else _words(Path(file).stem)
    return Document(title, text[heading.end() if heading else 0 :].strip(), _beside(file, files))


def _picture(folder: Path, file: str, files: list[str]) -> Picture:
    rows = read_rows((folder / file).with_suffix(".csv"))
    tags = sorted({row["tag"] for row in rows if row.get("tag")})
    return Picture(_words(Path(file).stem), file, tags, _beside(file, files))


def _beside(file: str, files: list[str]) -> list[str]:
    stem = Path(file).with_suffix("")
    return [file, *(other for other in files if other != file and Path(other).with_suffix("") == stem)]


def _words(name: str) -> str:
    text = re.sub(r"[_-]+", " ", name).strip()
    return text[:1].upper() + text[1:]


def _by_number(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
