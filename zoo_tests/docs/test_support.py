"""The support page: every "no" has a reason, and no "yes" has one.

What breaks here first: a family that gained a column and kept its excuse, or a new family with a gap that nobody
explains.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zoo_tests.harness.support import PAGE, SupportMatrix, cells_of
from zoo_tests.harness.support_reasons import REASONS, SENTENCES


def test_every_no_has_its_reason_and_no_yes_has_one() -> None:
    cells = cells_of(PAGE.read_text(encoding="utf-8"))
    assert len(cells) > 500
    wanted = {where: f"no ({SENTENCES.index(reason) + 1})" for where, reason in REASONS.items()}
    assert {where: cell for where, cell in cells.items() if cell != "yes"} == wanted


def test_reasons_stand_below_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for number, sentence in enumerate(SENTENCES, start=1):
        assert sentence.endswith(".")
        assert f"\n{number}. {sentence}\n" in text


@pytest.mark.parametrize(("proved", "agrees"), [("fused norms", True), ("split-gather", False)])
def test_a_sample_may_prove_less_than_the_page_says_and_not_more(proved: str, agrees: bool) -> None:
    matrix = SupportMatrix(write=False, is_worker=False)
    matrix.proved["deberta_v2"].add(proved)
    options = SimpleNamespace(sample=True, keyword="", markexpr="", ignore=None, collectonly=False)
    config = SimpleNamespace(option=options, args=["zoo_tests"], pluginmanager=pytest.PytestPluginManager())
    config.pluginmanager.register(SimpleNamespace(write_line=lambda text: None), "terminalreporter")
    session = SimpleNamespace(config=config, shouldstop=False, exitstatus=0)
    matrix.pytest_sessionfinish(session)
    assert (session.exitstatus == 0) is agrees
