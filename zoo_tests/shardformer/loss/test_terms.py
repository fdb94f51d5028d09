"""The counts and factors of a loss, on a GPU: nothing is copied from the host, which would wait for the forward pass.

What breaks here first: a number that becomes a tensor on the host. Look in `shardformer/loss/terms.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from shardformer.loss.terms import HeadLoss
from shardformer.loss.text import causal_lm, sequence_classification
from zoo_tests.cuda_trace.recorder import recorded_on_meta


class _Head(nn.Module):
    config = SimpleNamespace(num_labels=1, problem_type=None, is_encoder_decoder=False)


def _batch(**more: Any) -> dict[str, Any]:
    ids = torch.ones(2, 6, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids, **more}


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (causal_lm(_Head()), {}),
        (causal_lm(_Head()), {"num_items_in_batch": 7}),
        (sequence_classification(_Head()), {}),
    ],
    ids=["labels", "given divisor", "regression"],
)
def test_counts_and_factors_are_made_on_the_device(head: HeadLoss, more: dict[str, Any]) -> None:
    head.reads_keywords = True
    with recorded_on_meta() as counts:
        batch = _batch(**more)
        counted = head.counts(batch)
        factors = [term.factor(batch, count) for term, count in zip(head.terms, counted, strict=True)]
    assert counted.is_meta and all(factor.is_meta for factor in factors)
    assert not counts.copies and not counts.syncs


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification", "single_label_classification"])
def test_a_given_divisor_is_read_as_transformers_does(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(num_labels=3, problem_type=kind)
    logits = torch.randn(4, 3, generator=generator)
    classes = torch.tensor([2, -100, 0, 1])
    batch = {"labels": classes if kind.startswith("single") else logits.sigmoid().roll(1, 0), "num_items_in_batch": 7}
    expected = ForSequenceClassificationLoss(**batch, pooled_logits=logits, config=config)
    head = sequence_classification(SimpleNamespace(config=config))
    head.reads_keywords = True
    [term], [count] = head.terms, head.counts(batch)
    assert head.unread(batch) is None
    found = term.total(SimpleNamespace(logits=logits), term.labels_of(batch)) * term.factor(batch, count)
    torch.testing.assert_close(found.float(), expected)
