"""Losses of detectors: those of parts of a batch add up to transformers' own, for images with and without boxes.

What breaks here first: a release of transformers that divides a part of the loss by another number. Look in
`shardformer/loss/perception.py`.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from plugins.hybrid_parallel.loss.choice import own_loss_reason
from plugins.hybrid_parallel.verify.tiny_model import TinyModel, TwinSizes, small_config
from shardformer.loss.terms import count_own_targets
from shardformer.policies.registry import head_loss_of

ROWS = (1, 2, 3)  # of the parts


def _tiny(family: str, name: str) -> TinyModel:
    module = f"transformers.models.{family}.modeling_{family}"
    config = getattr(importlib.import_module(module), name).config_class()
    # DETR's weights of classes are fp32, whatever the dtype of the model.
    return TinyModel(module, name, small_config(config, TwinSizes(kv_heads=4, is_faithful=False)), torch.float32)


def _config_of_masks(kind: str) -> transformers.PreTrainedConfig:
    swin = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[1] * 4, num_heads=[2] * 4, window_size=2, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    heads = {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 6}
    if kind.startswith("MaskFormer"):
        attention = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
        detr = transformers.DetrConfig(d_model=32, encoder_ffn_dim=56, decoder_ffn_dim=56, **heads, **attention)
        sizes = {"fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 3}
        return transformers.MaskFormerConfig(backbone_config=swin, decoder_config=detr, **sizes)
    if kind.startswith("Eomt"):
        sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_blocks": 2, "image_size": 64}
        return transformers.EomtConfig(**sizes, num_queries=6, num_upscale_blocks=1, train_num_points=32, num_labels=3)
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 56}
    sizes |= {"dim_feedforward": 56, "num_attention_heads": 4, "train_num_points": 32, "num_labels": 3}
    return transformers.Mask2FormerConfig(backbone_config=swin, **heads, **sizes)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("family", "name"),
    [("yolos", "YolosForObjectDetection"), ("detr", "DetrForSegmentation"), ("lw_detr", "LwDetrForObjectDetection")],
)
def test_parts_add_up_to_the_whole(family: str, name: str) -> None:
    tiny = _tiny(family, name)
    model = tiny.build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # would see the part, not the whole
            module.eval()
    batch = tiny.batch(model, 0, sum(ROWS))
    targets = batch["labels"]
    targets[0] = {key: value[:0] for key, value in targets[0].items()}  # the first part has no box at all
    assert len({len(target["class_labels"]) for target in targets}) > 2
    _check_parts(model, batch)


def _check_parts(model: nn.Module, batch: dict[str, Any]) -> None:
    """Check that the losses and gradients of parts of a batch add up to those of the whole."""
    expected = model(**batch).loss
    expected.backward()
    gradients = _gradients(model)
    loss, ends = head_loss_of(model), torch.tensor(ROWS).cumsum(0).tolist()
    cuts = list(zip([0, *ends], ends, strict=False))
    parts = [{key: value[start:end] for key, value in batch.items()} for start, end in cuts]
    counts = sum(loss.counts(part) for part in parts)
    total = sum(loss.weighted_sum(model(**loss.inputs(part)), part, counts) for part in parts)
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
    found = _gradients(model)
    assert found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("kind", ["MaskFormerForInstance", "Mask2FormerForUniversal", "EomtForUniversal"])
def test_masks_of_parts_add_up_to_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes are weighted means over queries, and masks are divided by how many there are."""
    points, rand = torch.rand(997, 2), torch.rand

    def same_points(*sizes: Any, **options: Any) -> torch.Tensor:
        """Draw [masks, points, 2] alike for each mask; anything else as torch does."""
        return points[: sizes[1]].repeat(sizes[0], 1, 1) if len(sizes) == 3 else rand(*sizes, **options)

    monkeypatch.setattr(torch, "rand", same_points)
    model = getattr(transformers, f"{kind}Segmentation")(_config_of_masks(kind))
    count_own_targets(model)
    counts = [2, 1, 3, 0, 7, 2]  # of 6 queries
    batch = {
        "pixel_values": torch.randn(6, 3, 64, 64),
        "class_labels": [torch.arange(count) % 3 for count in counts],
        "mask_labels": [torch.randint(2, (count, 64, 64)).float() for count in counts],
    }
    _check_parts(model, batch)


@pytest.mark.parametrize(
    ("family", "name"),
    [("lw_detr", "LwDetrForObjectDetection"), ("deformable_detr", "DeformableDetrForObjectDetection")],
)
def test_no_loss_waits_for_other_ranks(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sums the boxes of all ranks of a job; those without the last stage compute no loss."""
    tiny = _tiny(family, name)
    model = tiny.build()
    batch = tiny.batch(model, 0, 2)
    expected = model(**batch).loss
    plain, known = model.loss_function, head_loss_of(model)

    def wait(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", wait)
    monkeypatch.setattr("transformers.loss.loss_for_object_detection.reduce", wait)
    monkeypatch.setattr("accelerate.PartialState._shared_state", {"num_processes": 2})
    with pytest.raises(TimeoutError):
        model(**batch)
    count_own_targets(model)
    assert own_loss_reason(model, known, batch) is None
    torch.testing.assert_close(model(**batch).loss, expected)
    assert pickle.loads(pickle.dumps(model.loss_function)).function is plain


def test_a_loss_with_parts_that_do_not_add_up_is_the_models_own() -> None:
    """D-FINE's distillation divides by how many queries match, which a part of the batch does not tell."""
    assert head_loss_of(_tiny("d_fine", "DFineForObjectDetection").build()) is None
