"""Cutting a batch into micro-batches and merging their outputs.

What breaks here first: tensors without a sample dim, and parts of unequal size. Look in
`plugins/hybrid_parallel/data/microbatch.py` and `outputs.py`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import SequenceClassifierOutput

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import as_batch, num_rows, signature, split_batch, to_device
from plugins.hybrid_parallel.pipeline.outputs import merge_outputs


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
    scale = torch.tensor(2.0)
    batch = {"input_ids": torch.zeros(4, 7), "position_ids": position_ids, "scale": scale, "output_attentions": False}
    for microbatch in split_batch(batch, 2):
        assert microbatch["position_ids"] is position_ids and microbatch["scale"] is scale
        assert microbatch["output_attentions"] is False
        assert num_rows(microbatch) == 2


def test_samples_are_cut_where_they_lie() -> None:
    """Multimodal rotary positions are [3, batch, seq], also where the batch has three samples."""
    positions, names = torch.arange(3 * 3 * 5).view(3, 3, 5), ["a", "b", "c"]
    first, last = split_batch({"input_ids": torch.zeros(3, 5), "position_ids": positions, "names": names}, 2)
    assert torch.equal(first["position_ids"], positions[:, :2]) and torch.equal(last["position_ids"], positions[:, 2:])
    assert first["names"] == ["a", "b"] and last["names"] == ["c"]


def test_an_empty_share_has_no_micro_batches() -> None:
    assert split_batch({"input_ids": torch.zeros(0, 3)}, 0) == []


def test_rows_are_those_of_the_main_input() -> None:
    assert num_rows({"position_ids": torch.zeros(1, 5), "input_ids": torch.zeros(3, 5)}) == 3
    assert num_rows({"anything": torch.zeros(2, 5)}) == 2
    with pytest.raises(ConfigurationError, match="the batch has no tensor among"):
        num_rows({"flag": True})


def test_a_batch_is_a_mapping() -> None:
    assert as_batch({"a": 1}) == {"a": 1}
    with pytest.raises(ConfigurationError, match="a batch is a tuple; use a mapping"):
        as_batch((torch.zeros(2),))


def test_signature_tells_shapes_apart() -> None:
    one, other = {"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}
    assert signature(one) != signature(other) and signature(one) == signature({"x": torch.ones(2, 3)})


def test_only_floating_point_inputs_are_cast() -> None:
    batch = {"ids": torch.ones(1, dtype=torch.long), "pixels": torch.ones(1), "flag": True}
    moved = to_device(batch, torch.device("cpu"), torch.bfloat16)
    assert (moved["ids"].dtype, moved["pixels"].dtype, moved["flag"]) == (torch.long, torch.bfloat16, True)


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
