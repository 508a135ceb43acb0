"""The report of a recipe: what REPORT.md and report.html say of hand-made records, and how the page behaves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.cli import main as cli
from moexp.config.recipe import load_recipe
from moexp.records import RequestRecord, StepRecord, read_records
from moexp.tables import write
from moexp.tables.core.table import View, view_text
from moexp.tables.draftexpert.labels import AR, FIXED, FULL
from moexp.web.build import rebuild_report, write_reports
from moexp.web.contents import list_files, read_sections
from moexp.web.markup import demoted, plain, render, tagged
from moexp.web.requests import COLUMNS, CYCLE_COLUMNS, explorer_data
from moexp.web.sources import find_runs, load_sources
from tests.test_report import PREFETCH, TOKENS, cycles, save

pytestmark = pytest.mark.e2e

RECIPE = load_recipe("tiny", ["bench.bootstrap_samples=20"])
HOSTILE = "<script>alert(1)</script>|*\"'&"
STORE = {
    "missed": 5, "prefetched": 2, "read_bytes": 9000, "stall_s": 0.25, "draft_stall_s": 0.125, "verify_stall_s": 0.125,
    "used": 1,
}  # fmt: skip
ECO_TARGET = {
    "name": "tiny", "num_experts": 8, "top_k": 2, "num_shared": 1, "layers": 3, "moe_layers": 2, "max_positions": 64,
    "expert_bytes": 3_000_000, "resident_bytes": 1_000_000, "gamma": 4,
}  # fmt: skip


def make_draftexpert(folder: Path, prompts: tuple[str, ...] = ("chat-01", "math-01")) -> Path:
    for platform, tag in (("local-disk", "measured"), ("paced-cg", "emulated")):
        for request, (tokens, workload) in enumerate(zip(TOKENS, ("chat", "math"), strict=True)):
            more = {"tag": tag, "prompts": list(prompts)}
            save(folder / platform, cycles(AR, request, tokens, 1, 0.1), workload, **more)
            save(folder / platform, cycles("top-1", request, tokens, 2, 0.4), workload, **more)
            save(folder / platform, cycles(FIXED, request, tokens, 4, 0.4, store=STORE), workload, **more)
            save(folder / platform, cycles(FULL, request, tokens, 4, 0.2, store=PREFETCH), workload, **more)
    target = {"name": "tiny", "top_k": 3, "num_experts": 8, "moe_layers": 2, "platforms": ["local-disk", "paced-cg"]}
    (folder / "target.json").write_text(json.dumps(target))
    (folder / "recipe.yaml").write_text("")
    return folder


def make_ecospec(folder: Path) -> Path:
    for part, batch in (("t0", None), ("gamma-2", None), ("batch-2", 2)):
        for request, tokens in enumerate(TOKENS):
            for name in (AR, "draft-expert", "draft-expert + EcoSpec"):
                save(
                    folder / "resident" / part, cycles(name, request, tokens, 1 if name == AR else 2, 0.4, batch=batch)
                )
    (folder / "ecospec_target.json").write_text(json.dumps(ECO_TARGET))
    (folder / "recipe.yaml").write_text("")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    draftexpert = make_draftexpert(folder / "draftexpert", (HOSTILE, "math-01"))
    return {"draftexpert": draftexpert, "ecospec": make_ecospec(folder / "ecospec")}


@pytest.fixture(scope="module")
def built(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`results/tiny` with the tables and figures of both papers, an audit, a simulation, and the two reports."""
    results = tmp_path_factory.mktemp("results")
    folder = results / "tiny"
    (folder / "simulation").mkdir(parents=True)
    (folder / "audit.md").write_text(
        "# Audit of `tiny`\n\n**claims (measured)**\n\n| claim | holds |\n|---|---|\n| a | yes |\n"
    )
    (folder / "simulation" / "h100.md").write_text(f"# A card (simulated)\n\n## Of {HOSTILE}\n\ntext\n")
    (folder / "eval.csv").write_text("method,logits_rows,differing_rows,tag\na,1200,0,measured\nb,300,0,measured\n")
    for paper in ("draftexpert", "ecospec"):
        write.rebuild(RECIPE, paper, out=runs[paper], results=results)
    write_reports(RECIPE, runs, results)
    return folder


# --- rows and cycles ---


def test_every_request_and_cycle_is_there_as_often_as_in_the_records(runs: dict[str, Path]):
    data = explorer_data([source for paper, folder in runs.items() for source in load_sources(paper, folder)])
    requests = [
        r for f in runs.values() for file in f.rglob("requests.jsonl") for r in read_records(file, RequestRecord)
    ]
    steps = [s for f in runs.values() for file in f.rglob("steps.jsonl") for s in read_records(file, StepRecord)]
    assert len(data["rows"]) == len(data["cycles"]) == len(requests) == 16 + 18
    assert sum(map(len, data["cycles"])) == len(steps)
    keys = [key for key, *_ in data["cycle_columns"]]
    for name in ("drafted", "accepted", "emitted"):
        total = sum(cycle[keys.index(name)] for arm in data["cycles"] for cycle in arm)
        assert total == sum(getattr(step, name) for step in steps)
    read = sum(cycle[keys.index("read_bytes")] for arm in data["cycles"] for cycle in arm)
    assert read == sum(step.store["read_bytes"] for step in steps)
    assert all(len(row) == len(COLUMNS) for row in data["rows"])
    assert all(len(cycle) == len(CYCLE_COLUMNS) for arm in data["cycles"] for cycle in arm)
    assert sum(row[6] for row in data["rows"]) == sum(request.new_tokens for request in requests)


def test_a_row_holds_what_can_be_worked_out_by_hand(runs: dict[str, Path]):
    rows = [dict(zip((c.key for c in COLUMNS), row, strict=True)) for row in explorer(runs)["rows"]]
    full = next(row for row in rows if row["method"] == FIXED and row["platform"] == "paced-cg")
    assert full == {
        "method": FIXED, "request": HOSTILE, "workload": "chat", "platform": "paced-cg", "run": "", "tag": "emulated",
        "tokens": 8, "tokens_per_s": 10.0, "alpha": 4.0, "acceptance": 0.75, "bytes_per_token": 2250.0,
        "stall_share": 0.625, "paper": "DraftExpert",
    }  # fmt: skip
    ar = next(row for row in rows if row["method"] == AR)
    assert ar["acceptance"] is None and ar["alpha"] == 1
    assert {row["run"] for row in rows if row["paper"] == "EcoSpec"} == {"T = 0", "gamma = 2", "batch = 2"}
    assert all((row["bytes_per_token"] is None) == (row["run"] == "batch = 2") for row in rows)


def test_a_cycle_holds_its_record_in_milliseconds(runs: dict[str, Path]):
    data = explorer(runs)
    place = next(n for n, row in enumerate(data["rows"]) if row[0] == FIXED)
    cycle = dict(zip((c.key for c in CYCLE_COLUMNS), data["cycles"][place][0], strict=True))
    assert cycle == {
        "drafted": 4, "accepted": 3, "emitted": 4, "unique_draft": 10, "unique_verify": 12, "missed": 5,
        "prefetched": 2, "read_bytes": 9000, "stall_ms": 250, "draft_ms": 200, "draft_wait_ms": 125,
        "predict_ms": None, "verify_ms": 200, "verify_wait_ms": 125, "cycle_ms": 400,
    }  # fmt: skip
    ar = dict(zip((c.key for c in CYCLE_COLUMNS), data["cycles"][0][0], strict=True))
    assert ar["missed"] is None and ar["unique_draft"] is None  # not counted: not 0


def explorer(runs: dict[str, Path]) -> dict[str, Any]:
    return explorer_data([source for paper, folder in runs.items() for source in load_sources(paper, folder)])


# --- which runs, and what is wrong with them ---


def test_only_papers_with_records_are_reported(runs: dict[str, Path]):
    assert find_runs(RECIPE) == {}
    assert find_runs(RECIPE, out=runs["ecospec"]) == {"ecospec": runs["ecospec"]}
    assert find_runs(RECIPE, "draftexpert", runs["draftexpert"]) == {"draftexpert": runs["draftexpert"]}
    with pytest.raises(MoexpError, match="draftexpert, ecospec"):
        find_runs(RECIPE, "other")


@pytest.mark.parametrize("paper", [None, "ecospec"])
def test_a_folder_without_records_is_one_clear_error(paper: str | None, tmp_path: Path):
    with pytest.raises(MoexpError, match="nothing is measured.*moexp bench --recipe tiny"):
        rebuild_report(RECIPE, paper, out=tmp_path / "no", results=tmp_path)
    assert not (tmp_path / "tiny").exists()


def test_steps_that_do_not_add_up_are_an_error_and_a_torn_line_is_left_out(tmp_path: Path):
    steps = make_draftexpert(tmp_path / "run") / "local-disk" / "steps.jsonl"
    whole = explorer_data(load_sources("draftexpert", tmp_path / "run"))
    lines = steps.read_text()
    steps.write_text(lines + '{"request": 9, "cyc')
    assert explorer_data(load_sources("draftexpert", tmp_path / "run")) == whole
    steps.write_text("".join(lines.splitlines(keepends=True)[1:]))
    with pytest.raises(MoexpError, match="missing or doubled"):
        rebuild_report(RECIPE, out=tmp_path / "run", results=tmp_path)


def test_the_command_reports_all_papers_and_can_be_narrowed(runs: dict[str, Path], tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(write, "draw_figures", lambda *_: [])
    changes = ["--recipe", "tiny", "--set", "bench.bootstrap_samples=20"]
    both = tmp_path / "both"
    for folder in runs.values():
        shutil.copytree(folder, both, dirs_exist_ok=True)
    shown = CliRunner().invoke(cli.app, ["report", *changes, "--out", str(both)], catch_exceptions=False).stdout
    assert {"draftexpert", "ecospec"} <= {path.name for path in Path("results/tiny").iterdir()}
    assert shown.splitlines()[-2:] == ["results/tiny/REPORT.md", "results/tiny/report.html"]
    shutil.rmtree("results")
    CliRunner().invoke(cli.app, ["report", *changes, "--paper", "ecospec", "--out", str(both)], catch_exceptions=False)
    assert [path.name for path in sorted(Path("results/tiny").iterdir())] == ["REPORT.md", "ecospec", "report.html"]


def test_reproduce_ends_with_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rich.console import Console

    from moexp.cli.reproduce import Reproduction

    monkeypatch.chdir(tmp_path)
    reproduction = Reproduction(RECIPE, Console(quiet=True))
    name, run = reproduction.stages()[-1]
    assert name == "report" and run() is None
    reports = reproduction.reports
    assert reports == [Path("results/tiny/REPORT.md"), Path("results/tiny/report.html")]
    assert "No records." in reports[0].read_text() and all(path.exists() for path in reports)


# --- the files ---


def test_the_same_records_give_the_same_bytes(built: Path, runs: dict[str, Path]):
    before = [(built / name).read_bytes() for name in ("REPORT.md", "report.html")]
    files = write_reports(RECIPE, runs, built.parent)
    assert [file.read_bytes() for file in files] == before


def test_every_link_of_the_markdown_report_leads_to_a_file(built: Path):
    text = (built / "REPORT.md").read_text()
    links = [unquote(link) for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert links and all((built / link).is_file() for link in links)
    images = [unquote(link) for link in re.findall(r"^!\[[^\]]*\]\(([^)]+)\)", text, re.MULTILINE)]
    assert images == [file for file in list_files(built) if file.endswith(".png")]
    assert set(list_files(built)) <= set(links)


def test_the_markdown_report_has_its_parts_in_order_and_the_tables_word_for_word(built: Path):
    text = (built / "REPORT.md").read_text()
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert heads == [
        "What was run", "Headline figures", "Audit", "DraftExpert", "EcoSpec", "Simulation", "Files", "Provenance",
    ]  # fmt: skip
    table = (built / "draftexpert" / "table_2.md").read_text()
    assert table.split("\n", 1)[1].strip() in text and "### Table 2: Decode throughput" in text
    assert "- **Commit**: 0123456789ab (dirty)" in text.replace("\\", "") and "- **Seed**: 7" in text
    assert re.search(r"\| speedup over AR, truncation and prefetch +\| +2\.00 \(2\.00\.\.2\.00\)", text)
    assert "0 of 1,500 logits rows of 2 methods" in text
    assert text.index("Table 9:") < text.index("Table 10:")


def test_a_documents_headings_go_down_and_its_name_comes_from_the_first(built: Path):
    (simulation,) = [section for section in read_sections(built) if section.title == "Simulation"]
    (document,) = simulation.documents
    assert document.title == "A card (simulated)" and document.files == ["simulation/h100.md"]
    assert demoted("## a\n#b\n# c", 2) == "#### a\n#b\n### c"


def test_hostile_names_stay_text(built: Path, runs: dict[str, Path]):
    page, text = ((built / name).read_text() for name in ("report.html", "REPORT.md"))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert json.loads(page_of(page).records)["rows"] == json.loads(json.dumps(explorer(runs)["rows"]))
    assert "\\u003cscript" in page_of(page).records and "<" not in page_of(page).records
    assert render(plain(HOSTILE)) == "<p>&lt;script&gt;alert(1)&lt;/script&gt;|*&quot;&#x27;&amp;</p>"
    assert "<script" not in render(f"| {HOSTILE} |\n|---|\n| [a](javascript:b) ![c](http://d) <http://e> |")
    assert "<a" not in render("[a](http://b)") and "<img" not in render("![c](http://d)")
    assert tagged("<b> (measured)") == '&lt;b&gt; <span class="tag tag-measured">measured</span>'
    assert "<script>alert" not in text.replace("#### Of " + HOSTILE, "")
    table = render(view_text(View("", [HOSTILE], [[HOSTILE]])))
    assert table.count("&lt;script&gt;") == 2 and "<script" not in table


# --- the page ---


class Page(HTMLParser):
    """Elements with their attributes, in order, and the embedded records."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.records = ""
        self.texts: dict[str, str] = {"style": "", "script": ""}
        self.inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script" and self.elements[-1][1].get("type") == "application/json":
            self.records += data
        elif self.inside in self.texts:
            self.texts[self.inside] += data

    def all(self, tag: str) -> Iterator[dict[str, str]]:
        return (attributes for name, attributes in self.elements if name == tag)


def page_of(html: str) -> Page:
    page = Page()
    page.feed(html)
    return page


def test_the_page_asks_nothing_of_any_server(built: Path):
    html = (built / "report.html").read_text()
    page = page_of(html)
    addresses = [value for _, found in page.elements for name, value in found.items() if name in ("src", "href")]
    assert addresses and not [a for a in addresses if re.match(r"(?i)\s*([a-z]+:)?//|https?:", a)]
    assert "@import" not in page.texts["style"] and "url(" not in page.texts["style"]
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|innerHTML|eval)\b", page.texts["script"])
    images = [image["src"] for image in page.all("img")]
    assert len(images) == len([file for file in list_files(built) if file.endswith(".png")]) > 0
    assert all(image.startswith("data:image/png;base64,") for image in images)
    assert all(image.get("alt") for image in page.all("img"))


def test_links_and_labels_of_the_page_lead_somewhere(built: Path):
    page = page_of((built / "report.html").read_text())
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        place = link["href"]
        assert (place[1:] in ids) if place.startswith("#") else (built / unquote(place)).is_file()
    labelled = {label["for"] for label in page.all("label")}
    controls = {found["id"] for tag in ("input", "select") for found in page.all(tag)}
    assert labelled == controls and len(controls) == 6
    assert all(
        found.get("tabindex") == "0" and found.get("aria-label")
        for found in page.all("div")
        if "scroll" in found.get("class", "")
    )
    assert {"lang": "en"} in list(page.all("html"))


def test_the_report_imports_no_torch():
    script = (
        "import sys, moexp.web.build, moexp.web.pages; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent).returncode == 0


# --- in a browser ---

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
PROBE = """<script>
const root = document.documentElement;
for (const details of document.querySelectorAll("details")) details.open = true;
parent.postMessage([root.scrollWidth - root.clientWidth, innerWidth].join(), "*");
console.error("the probe was heard");
</script>"""
FRAME = """<html><script>addEventListener("message", (heard) => document.documentElement.dataset.heard = heard.data)
</script><iframe src="probed.html#open=0.20" width="{width}" height="900" style="border: 0"></iframe></html>"""
"""A window has a least width; a frame has none."""


def browse(page: Path, folder: Path, state: str = "") -> tuple[Page, list[str]]:
    """The page as it stands once its script has run, and what was written to the console."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1600,1000", "--virtual-time-budget=3000",
        "--enable-logging=stderr", "--dump-dom", f"{page.as_uri()}#{state}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return page_of(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
def test_a_link_filters_sorts_and_opens_without_errors(built: Path, runs: dict[str, Path], tmp_path: Path):
    data = explorer(runs)
    keys = [column.key for column in COLUMNS]
    wanted = [n for n, row in enumerate(data["rows"]) if row[keys.index("method")] == "draft-expert"]
    state = f"method=draft-expert&sort=-tokens&open={wanted[0]}"
    page, console = browse(built / "report.html", tmp_path, state)
    assert console == []
    shown = [int(row["data-row"]) for row in page.all("tr") if "data-row" in row]
    assert sorted(shown) == wanted and 0 < len(wanted) < len(data["rows"])
    assert [head["aria-sort"] for head in page.all("th") if head.get("aria-sort", "none") != "none"] == ["descending"]
    assert [found["aria-expanded"] for found in page.all("button") if "aria-expanded" in found].count("true") == 1
    drawn = [found for found in page.all("svg") if found.get("class") == "timeline"]
    assert len(drawn) == 1 and f"{len(data['cycles'][wanted[0]])} cycles" in drawn[0]["aria-label"]


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_never_scrolls_sideways(built: Path, tmp_path: Path, width: int):
    (tmp_path / "probed.html").write_text((built / "report.html").read_text().replace("</body>", PROBE + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    found, console = browse(tmp_path / "frame.html", tmp_path)
    (root,) = found.all("html")
    assert root["data-heard"] == f"0,{width}"
    assert len(console) == 1 and "the probe was heard" in console[0]
