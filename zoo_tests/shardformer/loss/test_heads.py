"""Losses that a forward computes itself: shares of unequal micro-batches add up to the loss of the whole batch.

What breaks here first: the number of labels that a mean is over, a part without labels, labels that are not known.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.loss.heads import head_loss_of_kind
from shardformer.loss.perception import transducer
from shardformer.loss.terms import HeadLoss, zero_of
from shardformer.policies.registry import head_loss_of
from zoo_tests.campaigns.census.classes import head_classes
from zoo_tests.campaigns.census.trained import twin_of

_CLASSES = 5


class Head(nn.Module):
    """Logits of each position; the loss skips the first `skipped` labels, and is a sum over samples or a mean."""

    def __init__(self, skipped: int, is_sum: bool) -> None:
        super().__init__()
        self.skipped, self.is_sum = skipped, is_sum

    def forward(self, logits: Tensor, labels: Tensor, router_labels: Tensor | None = None) -> dict[str, Tensor]:
        length = labels.shape[1] - self.skipped
        losses = F.cross_entropy(
            logits[:, :length].flatten(0, 1), labels[:, self.skipped :].flatten(), reduction="none", ignore_index=-100
        )
        count = 1 if self.is_sum else (labels[:, self.skipped :] != -100).sum()
        return {"loss": losses.sum() / count, "logits": logits}


@pytest.mark.parametrize(
    ("kind", "skipped", "is_sum"), [("mean_of_labels", 0, False), ("mean_of_next_labels", 1, False), ("sum", 1, True)]
)
def test_shares_add_up(kind: str, skipped: int, is_sum: bool) -> None:
    head = Head(skipped, is_sum)
    loss = head_loss_of_kind("XForCausalLM", kind)(head)
    logits = torch.randn(5, 4, _CLASSES, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(_CLASSES, (5, 4))
    labels[0, 1:] = labels[2, :2] = labels[4] = -100  # the first and the last have nothing to predict
    expected = head(logits, labels)["loss"]
    (gradient,) = torch.autograd.grad(expected, logits)
    parts = [(0, 1), (1, 4), (4, 5)]
    shares = _shares(loss, head, logits, labels, parts)
    torch.testing.assert_close(sum(shares), expected)
    torch.testing.assert_close(torch.autograd.grad(sum(shares), logits)[0], gradient)


def _shares(loss: HeadLoss, head: Head, logits: Tensor, labels: Tensor, parts: list[tuple[int, int]]) -> list[Tensor]:
    batches = [{"labels": labels[begin:end]} for begin, end in parts]
    counts = sum(loss.counts(batch) for batch in batches)
    outputs = [head(logits[begin:end], labels[begin:end]) for begin, end in parts]
    return [loss.weighted_sum(each, batch, counts) for each, batch in zip(outputs, batches, strict=True)]


def test_a_transducer_divides_by_its_labels_that_are_not_blank() -> None:
    model = nn.Module()
    model.config = SimpleNamespace(blank_token_id=0)
    loss, labels, values = transducer(model), torch.tensor([[1, 2, 3], [1, 0, 0]]), torch.rand(2)
    batches = [{"labels": labels[:1]}, {"labels": labels[1:]}]
    outputs = [SimpleNamespace(loss=values[0] / 3), SimpleNamespace(loss=values[1])]
    counts = sum(map(loss.counts, batches))
    shares = [loss.weighted_sum(each, batch, counts) for each, batch in zip(outputs, batches, strict=True)]
    torch.testing.assert_close(sum(shares), values.sum() / 4)
    with pytest.raises(ValueError, match="all 2 samples of a part of the batch have no labels but blanks"):
        loss.weighted_sum(outputs[0], {"labels": labels * 0}, counts)


def test_other_labels_have_another_loss() -> None:
    loss = head_loss_of_kind("XForCausalLM", "mean_of_labels")(Head(0, False))
    labels = torch.zeros(2, 4, dtype=torch.long)
    assert loss.unread({"labels": labels}) is None and "labels" in loss.inputs({"labels": labels})
    assert loss.unread({"labels": labels, "router_labels": labels}) == "router_labels"


# Class -> what differs from its configuration, and a batch whose samples have other numbers of values that count.
_UNEVEN: dict[str, tuple[dict[str, Any], Any]] = {
    "BrosSpadeELForTokenClassification": ({}, lambda batch, _: _blank(batch, -100)),
    "DebertaV2ForSequenceClassification": ({"num_labels": 3}, lambda batch, _: {**batch, "labels": _chances(batch)}),
    "FalconForSequenceClassification": (
        {"num_labels": 3, "problem_type": "single_label_classification"},
        lambda batch, _: {**batch, "labels": _chances(batch)},
    ),
    "DPTForSemanticSegmentation": ({}, lambda batch, _: _blank(batch, 255)),
    "MobileNetV2ForSemanticSegmentation": ({}, lambda batch, _: _blank(batch, 255)),
    "UperNetForSemanticSegmentation": ({"loss_ignore_index": 9}, lambda batch, _: _blank(batch, 9)),
    "SegformerForSemanticSegmentation": ({"num_labels": 1}, lambda batch, _: _blank(batch, 255)),
    "MusicgenForCausalLM": ({}, lambda batch, config: _blank(batch, config.pad_token_id)),
    "ReformerForQuestionAnswering": ({}, lambda batch, _: {**batch, "start_positions": _beyond(batch)}),
    "Sapiens2ForPoseEstimation": ({}, lambda batch, _: {**batch, "label_weights": _weights(batch["labels"])}),
}


def _blank(batch: dict[str, Any], value: int) -> dict[str, Any]:
    labels = batch["labels"] % 2 if value == 255 else batch["labels"].clone()
    labels[0, 2:] = labels[2] = value
    return {**batch, "labels": labels}


def _beyond(batch: dict[str, Any]) -> Tensor:
    positions = batch["start_positions"].clone()
    positions[[0, 2]] = batch["input_ids"].shape[1] + 1
    return positions


def _chances(batch: dict[str, Any]) -> Tensor:
    return torch.rand(len(batch["labels"]), 3, dtype=torch.float64).softmax(-1)


def _weights(labels: Tensor) -> Tensor:
    weights = torch.rand_like(labels)
    weights[0, 1:] = weights[2] = 0
    return weights


@pytest.mark.parametrize("name", _UNEVEN)
def test_shares_of_what_a_forward_counts_add_up(name: str) -> None:
    """Of pixels, codes or weights; the third part has none that count."""
    [head] = [head for head in head_classes() if head.name == name]
    changes, uneven = _UNEVEN[name]
    twin = twin_of(head, torch.float64)
    config = copy.deepcopy(twin.config)
    for field, value in changes.items():
        setattr(config, field, value)
    model = replace(twin, config=config).build().eval()  # batch norms do not see the batch
    batch = uneven(twin.batch(model, 0, 5), config)
    loss = head_loss_of(model)
    parts = [{key: value[begin:end] for key, value in batch.items()} for begin, end in [(0, 2), (2, 3), (3, 5)]]
    counts = sum(loss.counts(part) for part in parts)
    with torch.no_grad():
        shares = [loss.weighted_sum(model(**loss.inputs(part)), part, counts) for part in parts]
        torch.testing.assert_close(sum(shares), model(**batch).loss, rtol=1e-6, atol=0.0, check_dtype=False)


def test_a_part_without_labels_has_a_loss_of_zero_in_16_bits_too() -> None:
    logits = torch.full((2, 3), 6e4, dtype=torch.float16, requires_grad=True)  # whose sum is infinite
    zero_of(logits).backward()
    assert zero_of(logits).item() == 0.0 and not logits.grad.any()
