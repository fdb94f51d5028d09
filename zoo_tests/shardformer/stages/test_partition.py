"""Which layers a stage holds: by count, by cost, by hand.

What breaks here first: layer counts that no number of stages divides. Look in `shardformer/stages/stage.py` and
`shardformer/stages/layout.py`.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from shardformer import PipelineStageManager
from shardformer.policies.registry import policy_for
from shardformer.stages.layout import balanced_split
from shardformer.stages.stage import StagePartitioner


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


# ----- by cost -----

COSTS = st.lists(st.integers(1, 20), min_size=1, max_size=9)


def _largest(counts: list[int], costs: list[int], first: float, last: float) -> float:
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    stages = [float(sum(costs[begin:end])) for begin, end in pairwise(ends)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@given(COSTS, st.integers(1, 9), st.floats(0, 30), st.floats(0, 30))
def test_no_other_split_has_a_cheaper_costliest_stage(costs: list[int], stages: int, first: float, last: float) -> None:
    stages = min(stages, len(costs))
    found = balanced_split(costs, stages, first, last)
    assert len(found) == stages and sum(found) == len(costs) and min(found) >= 1
    cuts = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), stages - 1))
    every = ([end - begin for begin, end in pairwise(ends)] for ends in cuts)
    assert _largest(found, costs, first, last) == pytest.approx(min(_largest(one, costs, first, last) for one in every))


def test_no_stage_begins_with_a_layer_that_a_batch_may_skip() -> None:
    assert balanced_split([1, 1, 1, 9], 2) == [3, 1]
    assert balanced_split([1, 1, 1, 9], 2, never_first=[3]) == [2, 2]
    assert balanced_split([1] * 6, 3, never_first=[0, 1, 3, 5]) == [2, 2, 2]
    with pytest.raises(ValueError, match="may begin a stage, 3 of 6; use a pp_size of at most 3"):
        balanced_split([1] * 6, 4, never_first=[1, 3, 5])
    text = transformers.MllamaTextConfig(
        num_hidden_layers=4, cross_attention_layers=[3], hidden_size=32, num_attention_heads=4
    )
    with torch.device("meta"):
        model = transformers.MllamaForCausalLM(text)
    policy = policy_for(model)
    policy.set_model(model)
    for layers, counts in ((None, [2, 2]), ((2, 2), [2, 2])):
        manager = PipelineStageManager(0, 2, layers)
        cut = StagePartitioner(model, policy.base_path, policy.stages, manager)
        assert [len(held) for held in cut.ranges] == counts
    with pytest.raises(ValueError, match="begins a stage with layer 3, which a batch may skip"):
        StagePartitioner(model, policy.base_path, policy.stages, PipelineStageManager(0, 2, (3, 1)))


@pytest.mark.parametrize(
    ("config", "head", "num_stages", "counts"),
    [
        (transformers.BertConfig(), "BertForMaskedLM", 2, [8, 4]),  # the decoder over 30,522 words
        (transformers.BertConfig(), "BertForSequenceClassification", 2, [6, 6]),
        (transformers.BertConfig(), "BertModel", 4, [3, 3, 3, 3]),
        (transformers.GPT2Config(), "GPT2LMHeadModel", 2, [9, 3]),  # tied to the embedding, which takes no time
        (transformers.GPT2Config(vocab_size=1000, n_layer=5), "GPT2LMHeadModel", 2, [3, 2]),
        (transformers.T5Config(num_layers=4), "T5ForConditionalGeneration", 2, [6, 2]),
        (transformers.ViTConfig(), "ViTForImageClassification", 3, [4, 4, 4]),
    ],
)
def test_the_head_counts(config: transformers.PreTrainedConfig, head: str, num_stages: int, counts: list[int]) -> None:
    with torch.device("meta"):
        model = getattr(transformers, head)(config)
    policy = policy_for(model)
    policy.set_model(model)
    cut = StagePartitioner(model, policy.base_path, policy.stages, PipelineStageManager(0, num_stages))
    assert [len(held) for held in cut.ranges] == counts
