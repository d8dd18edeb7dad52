"""The documentation site builds without a warning and fetches nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

ROOT = Path(__file__).parents[1]
FETCHING = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
FOREIGN = re.compile(r"(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: broken links and pages outside the navigation fail."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


class Fetched(HTMLParser):
    """Collects what a browser loads to show a page, without links that a reader may follow."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") == "canonical":
            return
        if address := given.get(FETCHING.get(tag, "")):
            self.addresses.add(address)


def test_pages_fetch_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 20
    for page in pages:
        addresses = Fetched(page).addresses
        assert any(address.endswith(".css") for address in addresses), page
        assert not [address for address in addresses if FOREIGN.match(address)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text()), sheet


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {slugify(heading, "-") for heading in headings}


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 8_000
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        text = (ROOT / name).read_text()
        for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", text):
            assert (ROOT / target).exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(ROOT / target), f"{name}: {target}#{anchor}"
