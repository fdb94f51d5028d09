"""Tables and links of README and docs agree with the code.

What fails here first is an option, a model class or a file that was added or renamed in the code alone.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest

from plugins.hybrid_parallel.config.options import OPTIONS
from shardformer.policies.plans.plan import declared_plans, proposed_plans
from shardformer.policies.registry import supported_classes
from zoo_tests.architecture.sources import files_of, tree_of
from zoo_tests.architecture.transformers_names import read_list
from zoo_tests.docs.pages import PAGES, REPOSITORY, anchors_of, links_of, rows_of, sentences_of


def test_every_option_is_in_the_table_with_its_default() -> None:
    documented = [(name.strip("`"), default.strip("`")) for name, default, _ in _option_rows()]
    assert documented == [(name, repr(option.default)) for name, option in OPTIONS.items()]


def test_every_option_is_explained() -> None:
    assert all(text.endswith(".") for _, _, text in _option_rows())


def test_every_supported_model_class_is_named() -> None:
    documented = {
        name for _, classes in rows_of(REPOSITORY / "docs" / "families.md", "Family") for name in _code(classes)
    }
    assert documented == {name.rpartition(".")[2] for name in supported_classes()}


def test_every_declared_plan_is_named() -> None:
    rows = rows_of(REPOSITORY / "docs" / "families.md", "Folder of transformers")
    said = {name.strip("`"): pipeline == "yes" for name, pipeline in rows}
    derived = {family for family, plan in proposed_plans().items() if plan.execution}
    assert said == {family: bool(plan.pipelined) or family in derived for family, plan in declared_plans().items()}


def test_the_readme_counts_what_the_pages_count() -> None:
    page = (REPOSITORY / "docs" / "results" / "coverage.md").read_text(encoding="utf-8")
    all_classes, exact = re.findall(r"\*\*(\d+)\*\*", page)[:2]
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert f"**{exact} of the {all_classes}** head classes" in readme
    assert f"{len(declared_plans())} families more" in readme


def test_the_readme_names_the_versions_that_the_suite_is_run_with() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    rows = rows_of(REPOSITORY / "README.md", "")
    assert rows == rows_of(REPOSITORY / "docs" / "support_policy.md", "")
    tested = {name: (usual, newest) for name, _, usual, newest in rows}
    assert {name: tested[name][0] for name in ("torch", "transformers")} == {
        name: pinned[name] for name in ("torch", "transformers")
    }
    assert tested["transformers"][1] == read_list()["transformers"]["releases"][-1]


def test_sentences_stay_short() -> None:
    by_hand = [page for page in PAGES if page.parent.name not in ("results", "reference") and page.stem != "changelog"]
    long = [f"{page.name}: {each}" for page in by_hand for each in sentences_of(page) if len(each.split()) > 30]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links_of(page):
        assert not target.startswith("/"), target
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors_of(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_goals_of_make_exist(page: Path) -> None:
    goals = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    used = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert used <= goals


def test_the_order_of_the_folders_is_that_of_the_code() -> None:
    written = runpy.run_path(str(REPOSITORY / "docs" / "figures" / "draw_folders.py"))["with_pictures"]
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert written(page) == page, "python docs/figures/draw_folders.py writes it anew"


def test_files_of_the_architecture_exist() -> None:
    for _, cell in rows_of(REPOSITORY / "docs" / "architecture.md", "Question"):
        first, *others = (REPOSITORY / name for name in _code(cell))
        for file in (first, *(other if other.parent != REPOSITORY else first.parent / other.name for other in others)):
            assert file.is_file(), file


@pytest.mark.parametrize("page", ["troubleshooting.md", "writing_a_policy.md"])
def test_quoted_messages_are_in_the_code(page: str) -> None:
    messages = [_code(row[0])[0] for row in rows_of(REPOSITORY / "docs" / page, "Message")]
    assert messages
    for message in messages:
        fragments = [re.escape(fragment) for fragment in message.split("…")]
        assert any(re.search(".*".join(fragments), text) for text in _strings_of_library()), message


def test_the_pictures_of_layouts_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs and draws what is kept in the repository, as far as the words in them go."""
    drawing = REPOSITORY / "docs" / "figures" / "draw_layouts.py"
    monkeypatch.setattr(sys, "argv", [str(drawing), str(tmp_path)])
    names = runpy.run_path(str(drawing), run_name="__main__")["STYLES"]
    for name in names:
        assert _words(tmp_path / name) == _words(drawing.with_name(name))
    assert len(names) == 4


def _option_rows() -> list[list[str]]:
    return rows_of(REPOSITORY / "docs" / "options.md", "Option")


@cache
def _strings_of_library() -> tuple[str, ...]:
    """Every string of the library's code, as one line each, with "…" for what is filled in."""
    nodes = [node for file in files_of("shardformer", "booster", "plugins") for node in ast.walk(tree_of(file))]
    filled = [
        "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    return (*filled, *(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)))


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _words(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg.read_text(encoding="utf-8"))
