"""Cutting a batch into micro-batches and merging their outputs.

What breaks here first: tensors without a sample dim, and parts of unequal size. Look in
`plugins/hybrid_parallel/data/microbatch.py` and `outputs.py`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import (
    DynamicCache,
    EncodecConfig,
    GemmaConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    PreTrainedConfig,
    T5Config,
)
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from booster.data.rows import is_empty, num_rows, rows_of
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.checks import check_parts
from plugins.hybrid_parallel.data.microbatch import (
    as_batch,
    packed_row,
    signature,
    split_batch,
    stand_in,
    to_device,
    without_rows,
)
from plugins.hybrid_parallel.step.outputs import merge_outputs
from shardformer.loss.terms import HeadLoss, LossTerm
from shardformer.loss.text import not_ignored
from zoo_tests.harness.documents import one_row
from zoo_tests.harness.ranks import distributed

_SHIFTED_LABELS = LossTerm(
    "labels", not_ignored, None, per_token=True, prepare=lambda x, _: F.pad(x, (0, 1), value=-100)[:, 1:]
)


@given(st.integers(1, 12), st.integers(1, 12))
def test_parts_differ_by_one_at_most_and_join_to_the_batch(rows: int, parts: int) -> None:
    batch = {"input_ids": torch.arange(rows * 3).view(rows, 3), "labels": torch.arange(rows)}
    microbatches = split_batch(batch, parts)
    sizes = [num_rows(microbatch) for microbatch in microbatches]
    assert len(sizes) == parts and max(sizes) - min(sizes) <= 1
    for key, value in batch.items():
        assert torch.equal(torch.cat([microbatch[key] for microbatch in microbatches]), value)


def test_what_has_no_sample_dim_goes_to_every_part() -> None:
    position_ids = torch.arange(7)[None]
    scale, size = torch.tensor(2.0), (1, 2, 3, 4)
    batch = {"input_ids": torch.zeros(4, 7), "position_ids": position_ids, "scale": scale, "output_attentions": False}
    batch |= {"size": size, "causal_mask": torch.ones(7, 7)}
    for microbatch in split_batch(batch, 2):
        assert microbatch["position_ids"] is position_ids and microbatch["scale"] is scale
        assert microbatch["output_attentions"] is False and microbatch["size"] is size
        assert microbatch["causal_mask"] is batch["causal_mask"]
        assert num_rows(microbatch) == 2


def test_samples_are_cut_where_they_lie() -> None:
    """Multimodal rotary positions are [3, batch, seq], also where the batch has three samples."""
    positions, names = torch.arange(3 * 3 * 5).view(3, 3, 5), ["a", "b", "c"]
    first, last = split_batch({"input_ids": torch.zeros(3, 5), "position_ids": positions, "names": names}, 2)
    assert torch.equal(first["position_ids"], positions[:, :2]) and torch.equal(last["position_ids"], positions[:, 2:])
    assert first["names"] == ["a", "b"] and last["names"] == ["c"]


def test_several_rows_of_a_sample_stay_together() -> None:
    labels = torch.arange(24).view(6, 4)  # two codebooks of each of three samples
    parts = split_batch({"input_ids": torch.zeros(3, 5), "labels": labels}, 2)
    assert [part["labels"].tolist() for part in parts] == [labels[:4].tolist(), labels[4:].tolist()]


def test_a_list_of_masked_patches_is_cut_with_their_rows() -> None:
    masked = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]])
    batch = {"pixel_values": torch.zeros(4, 2), "bool_masked_pos": masked, "labels": torch.arange(5)}
    assert [part["labels"].tolist() for part in split_batch(batch, 3, rows=4)] == [[0, 1, 2], [3], [4]]


def test_an_empty_share_has_no_micro_batches() -> None:
    assert split_batch({"input_ids": torch.zeros(0, 3)}, 0) == []


_NODES = {"nodes": torch.zeros(9, 5), "graph": torch.zeros(9)}  # of four graphs


@pytest.mark.parametrize(
    ("batch", "main", "expected"),
    [
        ({"position_ids": torch.zeros(1, 5), "input_ids": torch.zeros(3, 5)}, None, 3),
        ({"pixel_values": torch.zeros(9, 5), "input_ids": torch.zeros(3, 5)}, "input_ids", 3),
        ({"name": "a", "size": 7, "anything": torch.zeros(2, 5)}, None, 2),
        ({**_NODES, "x": torch.zeros(4, 5)}, "x", 4),
        ({**_NODES, "labels": torch.zeros(4, 5)}, None, 4),
        ({**_NODES, "x": torch.zeros(4, 5)}, None, None),
        ({"crops": torch.zeros(3, 5), "x": torch.zeros(1, 5)}, None, None),
        ({"x": torch.zeros(4, 5), "mask": torch.zeros(1, 5), "causal_mask": torch.zeros(5, 5)}, None, 4),
        ({"x": torch.zeros(2, 7), "position_ids": torch.zeros(3, 2, 7)}, None, 2),
        ({"x": torch.zeros(0, 5), "boxes": torch.zeros(0, 4)}, None, 0),
        ({"boxes": torch.zeros(0, 4), "x": torch.zeros(4, 5), "y": torch.zeros(4)}, "x", 4),
        ({"encoder_outputs": (torch.zeros(4, 5),), "decoder_input_ids": torch.zeros(4, 3)}, "input_ids", 4),
        ({"inputs": {"x": torch.zeros(4, 5)}}, None, 4),
        ({"images": [torch.zeros(3, 5, 5)] * 2, "targets": [{"boxes": torch.zeros(4, 4)}] * 2}, None, 2),
        ({"images": (torch.zeros(3, 5, 5),) * 2}, None, None),  # two images, or three samples of two tensors
        ({"flag": True}, None, None),
    ],
)
def test_rows_are_those_of_samples_and_not_of_their_parts(
    batch: dict[str, Any], main: str | None, expected: int | None
) -> None:
    assert rows_of(batch, main) == expected
    if expected is None:
        with pytest.raises(ConfigurationError, match="different numbers of rows .*main_input_name|has no tensor among"):
            num_rows(batch, main)


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


@pytest.mark.parametrize(
    "nested",
    [
        lambda x: (x,),
        lambda x: [x],
        lambda x: ((x, x), (x, x)),
        lambda x: {"x": x, "scale": 2.0, "mask": torch.ones(1, 2)},
        lambda x: defaultdict(list, x=x),
        lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
        lambda x: _Pair(x, None),
        lambda x: [{"boxes": each[None]} for each in x],
        lambda x: tuple({"boxes": each.repeat(index + 1, 1)} for index, each in enumerate(x)),
    ],
)
def test_nested_entries_are_split_moved_and_told_apart(nested: Callable[[torch.Tensor], Any]) -> None:
    """Of three samples; a part is what the nested entry of the part's samples alone would be."""
    x = torch.arange(6.0).view(3, 2)
    batch = {"input_ids": torch.zeros(3, 5), "nested": nested(x)}
    parts = split_batch(batch, 2)
    whole = tuple(nested(x)) if isinstance(nested(x), tuple) and isinstance(nested(x)[0], dict) else None
    expected = [whole[:2], whole[2:]] if whole else [nested(x[:2]), nested(x[2:])]
    for part, wanted in zip(parts, expected, strict=True):
        torch.testing.assert_close(part["nested"], wanted)
        assert type(part["nested"]) is type(nested(x))
    assert signature(parts[0]) != signature(parts[1])
    moved = to_device(batch, torch.device("meta"))["nested"]
    assert {each.device.type for each in tree_leaves(moved) if isinstance(each, torch.Tensor)} == {"meta"}
    assert is_empty(without_rows(batch)) and len(stand_in(without_rows(batch))["input_ids"]) == 1


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (torch.zeros(9, 5), "entry of the batch has 9 rows, and the batch 4 samples"),
        (torch.zeros(9), "has 9 rows"),
        ((torch.zeros(4, 5), torch.zeros(9, 5)), r"entry\[1\] of the batch has 9 rows"),
        ({"x": torch.zeros(2, 5)}, r"entry\.x of the batch has 2 rows"),
        ([torch.zeros(3, 5, 5)] * 3, r"entry\[0\] of the batch has 3 rows"),
        (DynamicCache([(torch.zeros(4, 1, 2, 3), torch.zeros(4, 1, 2, 3))]), "entry of the batch is a DynamicCache"),
    ],
)
def test_entries_of_parts_are_not_cut_in_the_middle(entry: Any, what: str) -> None:
    batch = {"input_ids": torch.zeros(4, 5), "entry": entry}
    assert split_batch(batch, 1)[0]["entry"] is entry
    with pytest.raises(ConfigurationError, match=f"{what}.*num_microbatches=1"):
        split_batch(batch, 2)


def test_a_batch_is_a_mapping() -> None:
    assert as_batch({"a": 1}) == {"a": 1}
    with pytest.raises(ConfigurationError, match="a batch is a tuple; use a mapping"):
        as_batch((torch.zeros(2),))


def test_signature_tells_shapes_apart() -> None:
    one, other = {"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}
    assert signature(one) != signature(other) and signature(one) == signature({"x": torch.ones(2, 3)})


def test_merging_keeps_the_output_class() -> None:
    outputs = [SequenceClassifierOutput(logits=torch.full((rows, 2), float(rows))) for rows in (1, 2)]
    merged = merge_outputs(outputs)
    assert isinstance(merged, SequenceClassifierOutput)
    assert torch.equal(merged.logits, torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]))
    assert torch.equal(merge_outputs([torch.ones(1, 2), torch.ones(2, 2)]), torch.ones(3, 2))


def test_merging_goes_into_tuples_and_leaves_out_what_has_no_samples() -> None:
    outputs = [
        SequenceClassifierOutput(
            loss=torch.ones(()),
            logits=torch.ones(rows, 2),
            hidden_states=(torch.full((rows, 3), 5.0), torch.ones(rows)),
        )
        for rows in (1, 2)
    ]
    merged = merge_outputs(outputs)
    assert set(merged) == {"logits", "hidden_states"}
    assert torch.equal(merged.hidden_states[0], torch.full((3, 3), 5.0)) and merged.hidden_states[1].shape == (3,)


def test_outputs_of_other_lengths_are_not_merged() -> None:
    outputs = [{"logits": torch.ones(1, length, 4)} for length in (2, 3)]
    with pytest.raises(ConfigurationError, match=r"logits of micro-batches have shapes .*use num_microbatches=1, or"):
        merge_outputs(outputs)
    by_layer = [{"states": torch.ones(3, 2, 4)}] * 2
    with pytest.raises(ConfigurationError, match=r"states of micro-batches have shapes .*use num_microbatches=1, or"):
        merge_outputs(by_layer, rows=[2, 2])
    assert merge_outputs(by_layer, rows=[3, 3])["states"].shape == (6, 2, 4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_a_row_is_cut_between_documents_into_parts_of_equal_cost(lengths: list[int], data: st.DataObject) -> None:
    parts, documents = data.draw(st.integers(1, len(lengths))), [[1] * length for length in lengths]
    batch = one_row(documents) | {"num_items_in_batch": 5}
    row = packed_row(batch, HeadLoss(_SHIFTED_LABELS))
    assert row.num_documents == len(documents)
    cuts = row.cuts(parts, hidden_size=1)
    microbatches = split_batch(batch, parts, cuts)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([each[name] for each in microbatches], 1), batch[name])
    assert all(each["position_ids"][0, 0] == 0 and each["num_items_in_batch"] == 5 for each in microbatches)
    costs = [length * (length + 12) for length in lengths]

    def largest(borders: Sequence[int]) -> int:
        return max(sum(costs[start:end]) for start, end in itertools.pairwise(borders))

    ways = itertools.combinations(range(1, len(costs)), parts - 1)
    found = [row.borders.index(cut) for cut in cuts]
    assert largest(found) == min(largest((0, *way, len(costs))) for way in ways)


def test_a_row_stays_whole_where_a_part_would_lose_something() -> None:
    loss, row = HeadLoss(_SHIFTED_LABELS), one_row([[1, 2], [3, 4, 5]])
    assert packed_row(row, loss).borders == (0, 2, 5)
    assert packed_row(row | {"labels": row["input_ids"]}, loss) is None, "a label crosses the border"
    assert packed_row(row | {"labels": row["input_ids"]}, HeadLoss(replace(_SHIFTED_LABELS, prepare=None))) is not None
    assert packed_row(row | {"pixel_values": torch.zeros(1, 3)}, loss) is None, "it belongs to no token"
    assert packed_row(row | {"attention_mask": torch.ones(1, 5)}, loss) is None, "documents see each other"
    assert packed_row(row | {"use_cache": True}, loss) is None
    assert packed_row({name: value.expand(2, -1) for name, value in row.items()}, loss) is None
    assert packed_row(row, HeadLoss(replace(_SHIFTED_LABELS, per_token=False))) is None


def test_outputs_of_parts_of_a_row_join_along_its_tokens() -> None:
    logits = torch.arange(10.0).view(1, 5, 2)
    parts = [SequenceClassifierOutput(logits=part, hidden_states=(part,)) for part in logits.split([3, 2], 1)]
    merged = merge_outputs(parts, [3, 2])
    assert torch.equal(merged.logits, logits) and torch.equal(merged.hidden_states[0], logits)
    scores = [SequenceClassifierOutput(attentions=(torch.zeros(1, size, size, size),)) for size in (3, 2)]
    with pytest.raises(ConfigurationError, match="attentions of micro-batches have shapes"):
        merge_outputs(scores, [3, 2])


def _patches(images: list[int]) -> dict[str, torch.Tensor]:
    """A batch of samples with so many images of 2x2 or 2x4 patches, merged by four, whose patches are numbered."""
    grids = [[1, 2, 2 + 2 * (index % 2)] for index in range(sum(images))]
    tokens = [grid[1] * grid[2] // 4 for grid in grids]
    first = [sum(images[:row]) for row in range(len(images))]
    own = [sum(tokens[start : start + count]) for start, count in zip(first, images, strict=True)]
    types = torch.tensor([[1] * count + [0] * (8 - count) for count in own])
    grid = torch.tensor(grids).reshape(-1, 3)
    return {
        "input_ids": torch.arange(len(images))[:, None].expand(-1, 8),
        "image_grid_thw": grid,
        "pixel_values": torch.arange(int(grid.prod(-1).sum()))[:, None],
        "mm_token_type_ids": types,
    }


def test_patches_of_images_go_with_their_samples() -> None:
    batch = _patches([2, 0, 1, 3, 1])
    parts = split_batch(batch, 3)  # of 2, 2 and 1 samples
    assert [len(part["image_grid_thw"]) for part in parts] == [2, 4, 1]
    assert all(len(part["pixel_values"]) == part["image_grid_thw"].prod(-1).sum() for part in parts)
    assert torch.equal(torch.cat([part["pixel_values"] for part in parts]), batch["pixel_values"])


def test_a_part_without_images_has_no_entries_of_them() -> None:
    parts = split_batch(_patches([0, 0, 2, 1]), 2)
    assert not {"pixel_values", "image_grid_thw"} & parts[0].keys() and len(parts[1]["image_grid_thw"]) == 3


_TOKENS = {"pixel_values": 9, "input_features": 8}


@pytest.mark.parametrize(
    ("rows", "media", "expected"),
    [
        ([[1, 1, 1], [9, 1, 9]], {"pixel_values": torch.zeros(2, 3, 4, 4)}, [0, 2]),  # two in a sample
        ([[9, 1, 9], [9, 9, 9]], {"pixel_values": torch.zeros(2, 3, 4, 4)}, None),  # neither equal shares nor spans
        # Of other sizes, [height, width] or frames: by size, or as many as there are spans.
        (
            [[9, 9, 9], [9, 1, 1]],
            {"pixel_values": torch.zeros(2, 1), "image_sizes": torch.tensor([[1, 3], [1, 1]])},
            [1, 1],
        ),
        (
            [[8, 1, 8], [8, 8, 1]],
            {
                "input_features": torch.zeros(3, 5, 2),
                "input_features_mask": torch.tensor([[1] * 5, [1, 0, 0, 0, 0], [1] * 5]),
            },
            [2, 1],
        ),
        # Each sample has a row of images.
        (
            [[1, 1], [9, 9]],
            {"pixel_values": torch.zeros(2, 2, 3, 4, 4), "pixel_attention_mask": torch.ones(2, 2, 4, 4)},
            [1, 1],
        ),
    ],
)
def test_images_and_sounds_go_where_their_tokens_are(
    rows: list[list[int]], media: dict[str, torch.Tensor], expected: list[int] | None
) -> None:
    batch = {"input_ids": torch.tensor(rows), **media}
    if expected is None:
        with pytest.raises(ConfigurationError, match="pixel_values has 2 entries for 2 samples.*num_microbatches=1"):
            split_batch(batch, len(rows), tokens=_TOKENS)
        return
    for name in media:
        parts = split_batch(batch, len(rows), tokens=_TOKENS)
        assert [len(part.get(name, ())) for part in parts] == expected


def test_a_placeholder_of_texts_has_no_images() -> None:
    batch = {"input_ids": torch.zeros(0, 3), "pixel_values": torch.zeros(0, 4)}
    assert set(stand_in(batch, _TOKENS)) == {"input_ids"} and set(stand_in(batch)) == set(batch)
    assert stand_in({"input_ids": torch.zeros(0, 0)})["input_ids"].shape == (1, 1)  # padded to no width


def test_images_that_are_numbered_over_a_batch_are_not_cut() -> None:
    model, batch = nn.Module(), _patches([1, 1])
    model.config = PreTrainedConfig()
    model.config.model_type = "hunyuan_vl"
    check_parts(model, {"input_ids": batch["input_ids"]}, 2)
    check_parts(model, batch, 1)
    with pytest.raises(ConfigurationError, match="numbers the images of a whole batch.*2 micro-batches.*use num_micro"):
        check_parts(model, batch, 2)


def test_a_part_that_would_lose_its_causal_mask_is_not_cut() -> None:
    """Gemma for PaliGemma: `sdpa` gets no mask for rows without padding, and then attends to later tokens."""
    model, mask = nn.Module(), torch.tensor([[1, 1], [1, 0]])
    model.config = GemmaConfig(use_bidirectional_attention=True, attn_implementation="sdpa")
    check_parts(model, {"attention_mask": mask, "token_type_ids": mask}, 2)
    check_parts(model, {"attention_mask": torch.ones(2, 2)}, 2)
    with pytest.raises(ConfigurationError, match="attends to later tokens.*2 parts.*give token_type_ids"):
        check_parts(model, {"attention_mask": mask}, 2)
    texts = {"text_encoder": T5Config().to_dict(), "audio_encoder": EncodecConfig().to_dict()}
    model.config = MusicgenConfig(**texts, decoder=MusicgenDecoderConfig().to_dict())  # of two texts
    check_parts(model, {"attention_mask": mask}, 2)


@distributed(2)
def test_a_replica_that_would_lose_its_causal_mask_is_refused_on_all() -> None:
    model, rank = nn.Module(), dist.get_rank()
    model.config = GemmaConfig(use_bidirectional_attention=True, attn_implementation="sdpa")
    full, padded = torch.ones(2, 2), torch.tensor([[1, 1], [1, 0]])
    check_parts(model, {"attention_mask": padded if rank else padded[:0]}, 1 - rank, dist.group.WORLD)
    with pytest.raises(ConfigurationError, match="which some of 2 parts of this one would be"):
        check_parts(model, {"attention_mask": padded if rank else full}, 1, dist.group.WORLD)


def test_patches_without_their_samples_are_refused() -> None:
    batch = _patches([1, 1, 1])
    del batch["mm_token_type_ids"]
    assert [len(part["image_grid_thw"]) for part in split_batch(batch, 3)] == [1, 1, 1]
    batch["input_ids"] = batch["input_ids"][:2]
    with pytest.raises(ConfigurationError, match="image_grid_thw has 3 entries for 2 samples.*num_microbatches=1"):
        split_batch(batch, 2)
    assert split_batch(batch, 1)[0]["pixel_values"] is not None
