"""Make labels for images and sound: classes of pixels, depths, detection targets, transcripts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError

_TRANSCRIPTS = ("ForConditionalGeneration", "ForSpeechToText", "ForSpeechToSpeech")


def labels_without_text(
    kind: str, model: nn.Module, batch: Mapping[str, Tensor], rows: int, generator: torch.Generator
) -> dict[str, Any]:
    """Make labels for a batch of images or sound.

    Args:
        kind: the task of the head, as "ForDepthEstimation".

    Raises:
        ConfigurationError: there are no random labels for this kind of head.
    """
    classes = getattr(model.config, "num_labels", 2)
    if kind == "ForAudioFrameClassification":
        frames = model(**batch).logits.shape[1]
        marks = torch.randint(0, classes, (rows, frames), generator=generator)
        return {"labels": torch.nn.functional.one_hot(marks, classes)}
    if kind in ("ForCTC", "ForRNNT", "ForTDT"):
        return {"labels": torch.randint(1, model.config.vocab_size, (rows, 3), generator=generator)}
    if kind.startswith("ForImageClassification"):  # Perceiver's has a suffix
        return {"labels": torch.randint(0, classes, (rows,), generator=generator)}
    if kind in _TRANSCRIPTS:
        return {"labels": torch.randint(5, 90, (rows, 7), generator=generator)}
    if "pixel_values" not in batch:
        raise _refusal(kind, model, batch)
    sides = batch["pixel_values"].shape[-2:]
    if kind == "ForSemanticSegmentation":
        return {"labels": torch.randint(0, classes, (rows, *sides), generator=generator)}
    if kind == "ForDepthEstimation":
        return {"labels": torch.rand(rows, *sides, generator=generator)}
    if kind == "ForMaskedImageModeling":
        return masked_patches(model, rows, sides, generator)
    if _takes_targets(model):
        return {"labels": detection_targets(rows, classes, sides, generator, "Segmentation" in kind)}
    return {"labels": _like_output(model, batch, generator)}


def detection_targets(
    rows: int, classes: int, sides: tuple[int, int], generator: torch.Generator, has_masks: bool = False
) -> list[dict[str, Tensor]]:
    """Make DETR's targets: for each image one to three boxes, [boxes, 4] (centre, width, height in shares of 1).

    Args:
        sides: height and width of the images, in pixels.
        has_masks: whether each box also has a mask of pixels, [boxes, height, width].
    """
    targets = []
    for row in range(rows):
        boxes = 1 + (row * 2 + 1) % 3
        centres = 0.3 + 0.4 * torch.rand(boxes, 2, generator=generator)
        target = {
            "class_labels": torch.randint(0, classes, (boxes,), generator=generator),
            "boxes": torch.cat([centres, 0.2 + 0.3 * torch.rand(boxes, 2, generator=generator)], -1),
        }
        if has_masks:
            target["masks"] = torch.randint(0, 2, (boxes, *sides), generator=generator).float()
        targets.append(target)
    return targets


def masked_patches(
    model: nn.Module, rows: int, sides: tuple[int, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Make the masked patches of each image, [rows, patches], and the visual tokens of all masked ones, [masked]."""
    size = model.config.patch_size
    height, width = size if isinstance(size, tuple | list) else (size, size)
    patches = (sides[0] // height) * (sides[1] // width)
    order = torch.rand(rows, patches, generator=generator).argsort(-1)
    masked = order < torch.randint(2, patches // 2, (rows, 1), generator=generator)
    tokens = torch.randint(0, model.config.vocab_size, (int(masked.sum()),), generator=generator)
    return {"bool_masked_pos": masked, "labels": tokens}


def _takes_targets(model: nn.Module) -> bool:
    """Check whether the labels are a list of dicts, one for each image."""
    return "dict" in str(inspect.signature(model.forward).parameters["labels"].annotation)


def _like_output(model: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
    """Make labels of the shape of the output, as heat maps of key points are."""
    model.eval()  # batch norms do not see the batch
    with torch.no_grad():
        outputs = model(**batch)
    model.train()
    first = next(value for value in outputs.values() if isinstance(value, Tensor) and value.is_floating_point())
    return torch.rand(first.shape, generator=generator)


def _refusal(kind: str, model: nn.Module, batch: Mapping[str, Tensor]) -> ConfigurationError:
    return ConfigurationError(
        f"no labels can be made up for {type(model).__name__}, a head {kind} on {', '.join(batch)}; "
        "use --head with another head of the family, as ImageClassification"
    )
