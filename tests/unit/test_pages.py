"""Pages link to what is there and name files that are there; the performance log keeps its form."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from benchmarks.figures import CODE, ROOT

LOG = ROOT / "docs" / "performance"
PAGES = (
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "ingot").rglob("*.md")),
    ROOT / "recipes" / "README.md",
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
SOURCE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.py)`")
PRESENT = [page for page in PAGES if page.parent != LOG and page.name != "CHANGELOG.md"]  # not history
PARENTS = (ROOT, ROOT / "ingot", ROOT / "tests")  # of the paths that pages name
LOGS = [page for page in sorted(LOG.glob("*.md")) if page.name not in ("README.md", "story.md")]
LONGEST = 200  # characters of an entry


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """Relative links of a page to a file or a heading that is not there."""
    found = []
    for link in LINK.findall(CODE.sub("", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("link", ["no-such-page.md", "README.md#no-such-heading", "#no-such-heading"])
def test_a_broken_link_is_found(link: str) -> None:
    text = f"See [it]({link}) and [the log](docs/performance/README.md#how-an-entry-is-written)."
    assert broken(ROOT / "README.md", text) == [link]


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_that_a_page_names_are_there(page: Path) -> None:
    named = SOURCE.findall(page.read_text(encoding="utf-8"))
    parents = (page.parent, *PARENTS)
    assert [path for path in named if not any((parent / path).is_file() for parent in parents)] == []


@pytest.mark.parametrize("page", LOGS, ids=lambda page: page.name)
def test_entries_are_lines_of_four_cells_in_order(page: Path) -> None:
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert rows[0] == "| date | change | predicted | measured |"
    entries = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
    assert {len(entry) for entry in entries} == {4}
    assert [row for row in rows if len(row) > LONGEST] == []
    assert [entry for entry in entries if not entry[1] or not entry[2] + entry[3]] == []
    days = [date.fromisoformat(entry[0]) for entry in entries]
    assert days == sorted(days)


def test_the_log_names_all_its_pages() -> None:
    links = set(LINK.findall((LOG / "README.md").read_text(encoding="utf-8")))
    assert [page.name for page in LOG.glob("*.md") if page.name not in {"README.md", *links}] == []
