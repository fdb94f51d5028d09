"""Losses that are sums of several means: parts of a batch with other counts for each add up to transformers' own.

What breaks here first: a release of transformers that adds a part to one of these losses. Look in
`shardformer/loss/text.py`.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from plugins.hybrid_parallel.loss.choice import own_loss_reason
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from shardformer.policies.registry import head_loss_of
from zoo_tests.zoo.labels import IGNORED

_CLASSES = {
    "LxmertForPreTraining": ("lxmert", ("labels", "matched_label", "ans")),
    "HiggsAudioV2ForConditionalGeneration": ("higgs_audio_v2", ("audio_labels",)),
}


def _tiny(name: str) -> TinyModel:
    module = "transformers.models.{0}.modeling_{0}".format(_CLASSES[name][0])
    config = getattr(importlib.import_module(module), name).config_class()
    return TinyModel(module, name, small_config(config, TwinSizes(kv_heads=4, is_faithful=False)), torch.float64)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [*((name, ()) for name in _CLASSES), ("LxmertForPreTraining", ("ans", "labels"))],
)
def test_parts_add_up_to_the_whole(name: str, left_out: tuple[str, ...]) -> None:
    tiny = _tiny(name)
    model = tiny.build()
    batch = {key: value for key, value in tiny.batch(model, 0, 6).items() if key not in left_out}
    for at, key in enumerate(each for each in _CLASSES[name][1] if each in batch):
        ignored = torch.rand(batch[key].shape, generator=torch.Generator().manual_seed(at)) < 0.3
        ignored[0] = True
        batch[key] = batch[key].masked_fill(ignored, IGNORED)
    try:
        expected = model(**batch).loss
    except RuntimeError as error:  # Higgs Audio in 5.17 puts 8 code books where its configuration has others
        pytest.skip(f"{name} does not train plainly: {error}")
    loss = head_loss_of(model)
    assert own_loss_reason(model, loss, batch) is None and loss.applies_to(batch)
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 1), slice(1, 3), slice(3, 6))]
    counts = [loss.counts(part) for part in parts]
    assert len({tuple(each.tolist()) for each in counts}) == 3
    shares = [loss.weighted_sum(model(**loss.inputs(part)), part, sum(counts)) for part in parts]
    torch.testing.assert_close(sum(shares).double(), expected.double(), rtol=1e-6, atol=0.0)


def test_what_else_such_a_head_adds_is_left_to_the_model() -> None:
    model = _tiny("LxmertForPreTraining").build()
    batch = {"labels": torch.ones(1, 3), "obj_labels": {"obj": ()}}
    assert own_loss_reason(model, head_loss_of(model), batch) == "its loss reads obj_labels"
    assert not head_loss_of(model).applies_to({"input_ids": torch.ones(1, 3)})
