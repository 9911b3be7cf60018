"""The files around the code: links lead somewhere, the index is complete, the version stands once."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "docs", ROOT / "examples", ROOT / ".github")
PAGES = sorted(
    {page for folder in FOLDERS for page in folder.glob("*.md")} | set((ROOT / "examples").rglob("*.md"))
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(page.read_text()) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_pages_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead


def test_every_page_of_docs_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in index]


def test_version_and_licence_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {project['version']}\n" in citation
    assert f"license: {project['license']}\n" in citation
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "torchspec" / "py.typed").is_file()
