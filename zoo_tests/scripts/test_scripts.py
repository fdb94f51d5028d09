"""Every script of real life prints the numbers of plain training, or one sentence says why not.

What breaks here first: whatever people do besides the loop of the README. `python -m zoo_tests.scripts --only NAME`
shows what each layout did.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo_tests.scripts.outcome import EXACT, REFUSED, WARNED, compare
from zoo_tests.scripts.port import LAYOUTS, NAMES

_ALL = tuple(LAYOUTS)
# Script -> the layouts that refuse it.
REFUSALS: dict[str, tuple[str, ...]] = {
    "pool_layers": ("pp2",),  # hidden states of several stages
    "two_tasks": ("pp2",),  # two losses of each micro-batch
    "log_gradients": _ALL,  # no rank has a gradient as plain torch has it
    "regularise": ("tp2", "pp2"),  # a sum over the parameters is one over a rank's share of them
}
# Script -> layout -> the sentence that is logged where numbers cannot be the plain ones.
WARNINGS: dict[str, dict[str, str]] = {
    # Masks that are drawn for a whole batch are other ones where replicas draw for their shares.
    "mask_tokens": {"dp2": "collate_fn draws random numbers from a torch.Generator of its own"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prints_the_plain_numbers(name: str, tmp_path: Path) -> None:
    refusing = REFUSALS.get(name, ())
    outcomes = compare(name, tmp_path)
    warnings = WARNINGS.get(name, {})
    expected = {layout: REFUSED if layout in refusing else EXACT for layout in LAYOUTS}
    expected |= dict.fromkeys(warnings, WARNED)
    assert {layout: outcome.kind for layout, outcome in outcomes.items()} == expected, outcomes
    assert all(sentence in outcomes[layout].detail for layout, sentence in warnings.items()), outcomes
