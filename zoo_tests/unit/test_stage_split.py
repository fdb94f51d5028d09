"""PipelineStageManager: which layers a stage holds.

What breaks here first: layer counts that no number of stages divides. Look in `shardformer/stage.py`.
"""

from __future__ import annotations

import pytest

from shardformer import PipelineStageManager


def _counts(num_stages: int, num_layers: int) -> list[int]:
    return [len(layers) for layers in PipelineStageManager(0, num_stages).split(num_layers)]


def test_every_layer_is_held_once_in_order_and_stages_are_balanced() -> None:
    for num_stages in range(1, 9):
        for num_layers in range(num_stages, 33):
            ranges = PipelineStageManager(0, num_stages).split(num_layers)
            assert [layer for held in ranges for layer in held] == list(range(num_layers))
            counts = [len(held) for held in ranges]
            assert min(counts) >= 1 and max(counts) - min(counts) <= 1, (num_stages, num_layers)


def test_surplus_layers_go_to_the_middle_and_of_two_stages_to_the_first() -> None:
    assert _counts(4, 6) == [1, 2, 2, 1]
    assert _counts(2, 5) == [3, 2]


def test_explicit_split() -> None:
    assert PipelineStageManager(1, 3, (1, 4, 2)).split(7) == [range(0, 1), range(1, 5), range(5, 7)]


@pytest.mark.parametrize("split", [(3, 3), (1, 2, 3), (7, 0, 0), (4, 4, -1)])
def test_a_split_that_does_not_fit_names_one_that_does(split: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"layers_per_stage=.* does not split 7 layers over 3 stages; use .*\[2, 3, 2\]"
    ):
        PipelineStageManager(0, 3, split).split(7)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="pp_size=4 is larger than the model's 3 layers; use a pp_size of at most 3"):
        PipelineStageManager(0, 4).split(3)


def test_first_and_last() -> None:
    assert [PipelineStageManager(stage, 3).is_first for stage in range(3)] == [True, False, False]
    assert [PipelineStageManager(stage, 3).is_last for stage in range(3)] == [False, False, True]
