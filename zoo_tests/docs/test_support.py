"""The support page: every "no" has a reason, and no "yes" has one.

What breaks here first: a family that gained a column and kept its excuse, or a new family with a gap that nobody
explains.
"""

from __future__ import annotations

from zoo_tests.harness.support import FEATURES, PAGE
from zoo_tests.harness.support_reasons import REASONS, SENTENCES


def _cells() -> dict[tuple[str, str], str]:
    """(family, column) -> cell of the committed page, without the column that counts heads."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if " | yes" in line]
    return {(row[0], column): cell for row in rows for column, cell in zip(FEATURES[:-1], row[1:-1], strict=True)}


def test_every_no_has_its_reason_and_no_yes_has_one() -> None:
    cells = _cells()
    assert len(cells) > 500
    wanted = {where: f"no ({SENTENCES.index(reason) + 1})" for where, reason in REASONS.items()}
    assert {where: cell for where, cell in cells.items() if cell != "yes"} == wanted


def test_reasons_stand_below_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for number, sentence in enumerate(SENTENCES, start=1):
        assert sentence.endswith(".")
        assert f"\n{number}. {sentence}\n" in text
