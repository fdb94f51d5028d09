"""DynamicLossScale: halves, grows, and survives a save.

What breaks here first: the count of good steps. Look in `plugins/hybrid_parallel/loss_scale.py`.
"""

from __future__ import annotations

from plugins.hybrid_parallel.loss_scale import DynamicLossScale, LossScale


def test_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = DynamicLossScale(8.0, growth_interval=3)
    seen = []
    for overflowed in (False, False, True, False, False, False, False):
        scale.update(overflowed)
        seen.append(scale.value)
    assert seen == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0], "an overflow starts the count of good steps anew"


def test_stays_between_one_and_infinity() -> None:
    low, high = DynamicLossScale(2.0, 1), DynamicLossScale(2.0**1023, 1)
    for _ in range(3):
        low.update(True)
        high.update(False)
    assert (low.value, high.value) == (1.0, 2.0**1023)


def test_state_includes_the_count_of_good_steps() -> None:
    scale, other = DynamicLossScale(16.0, 2), DynamicLossScale(1.0, 2)
    scale.update(False)
    other.load_state_dict(scale.state_dict())
    other.update(False)
    assert other.value == 32.0


def test_without_scaling_there_is_no_state() -> None:
    scale = LossScale()
    scale.update(True)
    scale.load_state_dict(DynamicLossScale(4.0, 2).state_dict())
    assert (scale.value, scale.state_dict(), scale.watches_overflow) == (1.0, {}, False)
    dynamic = DynamicLossScale(4.0, 2)
    dynamic.load_state_dict({})  # of a run without scaling
    assert dynamic.value == 4.0
