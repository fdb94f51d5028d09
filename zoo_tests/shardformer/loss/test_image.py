"""Losses of image heads: those of micro-batches add up to transformers' own, or the cut is refused.

What breaks here first: a release of transformers that counts masked pixels or patches in another way. Look in
`shardformer/losses`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardformer.policies.registry import head_loss_of
from zoo_tests.harness.reference import inputs_of
from zoo_tests.zoo import FAMILIES, Batch

ROWS = 7


def _model_and_batch(family: str, head: str) -> tuple[nn.Module, Batch]:
    return FAMILIES[family].build(head).eval(), FAMILIES[family].batch(head, 0, ROWS)


def _loss_in_parts(model: nn.Module, batch: Batch, rows: tuple[int, ...]) -> Tensor:
    """The loss of a batch in parts of these sizes."""
    loss = head_loss_of(model)
    pieces = {key: value.split(rows) for key, value in batch.items()}
    parts = [{key: pieces[key][index] for key in pieces} for index in range(len(rows))]
    counts = sum(loss.counts(part) for part in parts)
    return sum(loss.weighted_sum(model(**loss.inputs(part)), part, counts) for part in parts)


@pytest.mark.parametrize(
    ("family", "head"), [("vit", "image"), ("swin", "masked_image"), ("beit", "masked_image"), ("beit", "segmentation")]
)
def test_parts_add_up_to_the_whole(family: str, head: str) -> None:
    """Each part has another number of masked patches or labelled pixels, the second none at all."""
    model, batch = _model_and_batch(family, head)
    expected = model(**inputs_of(FAMILIES[family].heads[head], batch)).loss
    torch.testing.assert_close(_loss_in_parts(model, batch, (1, 1, 5)), expected, rtol=1e-12, atol=0.0)


def test_a_list_of_masked_patches_is_taken_whole_only() -> None:
    model, batch = _model_and_batch("beit", "masked_image")
    batch["labels"] = batch["labels"][batch["bool_masked_pos"]]
    loss = head_loss_of(model)
    counts = loss.counts(batch)
    assert counts.tolist() == [batch["bool_masked_pos"].sum()]
    found = loss.weighted_sum(model(**loss.inputs(batch)), batch, counts)
    torch.testing.assert_close(found, model(**batch).loss, rtol=1e-12, atol=0.0)
    part = {**batch, "bool_masked_pos": batch["bool_masked_pos"][:3]}
    with pytest.raises(ValueError, match="give one for each of them, or labels of shape \\[rows, patches\\]"):
        loss.counts(part)
