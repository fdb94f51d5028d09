"""The documentation site is built without a warning, opens without a net, and its landing page says what its pages say.

What fails here first is a page that the navigation lacks, a link or a name of the reference that leads nowhere.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from zoo_tests.docs.pages import REPOSITORY, rows_of

_LANDING = REPOSITORY / "docs" / "index.md"
_NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\d)")
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*\shref=[\"']?(?:https?:)?//"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`: a warning ends the build."""
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    logging.getLogger("mkdocs").setLevel(logging.INFO)
    build(config)
    return folder


@pytest.mark.slow
def test_every_page_is_built_and_found_by_the_search(site: Path) -> None:
    pages = {page.relative_to(REPOSITORY / "docs").with_suffix(".html") for page in (REPOSITORY / "docs").rglob("*.md")}
    assert all((site / page).is_file() for page in pages)
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8").removeprefix("var __index = ")
    found = {Path(entry["location"].partition("#")[0]) for entry in json.loads(index)["docs"]}
    assert found >= pages


@pytest.mark.slow
def test_nothing_is_loaded_from_the_net(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not _LOADED.search(text), f"{page.name}: {_LOADED.search(text)}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


@pytest.mark.slow
def test_the_reference_has_every_option_with_its_default(site: Path) -> None:
    from plugins.hybrid_parallel.config.options import OPTIONS

    page = re.sub(r"<[^>]+>", "", (site / "reference" / "hybrid_parallel.html").read_text(encoding="utf-8"))
    for name, option in OPTIONS.items():
        default = re.escape(json.dumps(option.default) if isinstance(option.default, str) else repr(option.default))
        computed = r"2\.0 ?\*\* ?16" if name == "initial_scale" else default
        assert re.search(rf"\b{name}: [^=]*= {computed}[,\n]", page.replace("&quot;", '"').replace("&#34;", '"')), name


def test_figures_of_the_landing_page_are_those_of_the_pages_it_names() -> None:
    rows = rows_of(_LANDING, "What")
    assert rows
    for what, measured, compared, link in rows:
        page = _LANDING.parent / re.search(r"\((.*?)\)", link)[1]
        text = page.read_text(encoding="utf-8")
        for number in _NUMBER.findall(measured + ("" if "last place" in compared else " " + compared)):
            assert any(_rounds_to(found, number) for found in _NUMBER.findall(text)), f"{what}: {number}"


def _rounds_to(found: str, number: str) -> bool:
    decimals = len(number.partition(".")[2])
    return found == number or ("e" not in found + number and f"{float(found.replace(',', '')):.{decimals}f}" == number)
