"""Make family-specific inputs: those of single heads besides text, images and the usual labels.

`family_inputs.json` names them: "family/argument" or "Class/argument" -> name and arguments of a function below, whose
result replaces an input of the same name; null leaves the input out, so that the model's default is meant.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError

_BOXES = (1, 3, 2, 1, 1, 2, 3, 3)  # of images; no halves of 6, 7 or 8 of these have as many for each image
_TRANSCRIPTS = ("ForConditionalGeneration", "ForSpeechToText", "ForSpeechToSpeech")


def labels_without_text(
    kind: str, model: nn.Module, batch: Mapping[str, Tensor], rows: int, generator: torch.Generator
) -> dict[str, Any]:
    """Make labels for a batch of images or sound; `kind`: the task of the head, as "ForDepthEstimation"."""
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
    if "dict" in str(inspect.signature(model.forward).parameters["labels"].annotation):  # one for each image
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
        boxes = _BOXES[row % len(_BOXES)]
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


def further_inputs(
    family: str, model: nn.Module, batch: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Any]:
    """Return a model's inputs by `family` (its folder in transformers), which replace others; None: without."""
    takes = inspect.signature(model.forward).parameters
    given, found = _Given(model, batch, generator), {}
    for name, how in json.loads(_TABLE.read_text(encoding="utf-8")).items():
        owner, _, argument = name.rpartition("/")
        if argument in takes and (owner == family or type(model).__name__.startswith(owner)):
            found[argument] = None if how is None else _MAKERS[how[0]](given, *how[1:])
    return found


_TABLE = Path(__file__).with_suffix(".json")


class _Given(NamedTuple):
    """What a maker knows: the model, the inputs made so far, and the source of random numbers."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    generator: torch.Generator

    def sizes(self, shape: tuple[int, ...]) -> list[int]:
        """Return a shape in which -1 stands for the size of the batch in that dimension."""
        known = next(iter(self.batch.values())).shape
        return [known[index] if size == -1 else size for index, size in enumerate(shape)]

    @property
    def rows(self) -> int:
        return self.sizes((-1,))[0]

    @property
    def text(self) -> Tensor:
        return self.batch["input_ids"]


def _integers(given: _Given, high: int, *shape: int) -> Tensor:
    """Draw random integers below `high`."""
    return torch.randint(0, high, given.sizes(shape), generator=given.generator)


def _sequences(given: _Given, high: int, count: int, length: int) -> Tensor:
    """Draw `count` sequences of random integers below `high` for each row, [rows * count, length]."""
    return _integers(given, high, -1, count, length).flatten(0, 1)


def _noise(given: _Given, *shape: int) -> Tensor:
    """Draw standard normal numbers; each -1 in `shape` stands for the number of rows of the batch."""
    return torch.randn(*[given.rows if size == -1 else size for size in shape], generator=given.generator)


def _per_token(given: _Given, *width: int) -> Tensor:
    """Draw standard normal numbers for each token of the text, [rows, tokens, *width]."""
    return torch.randn(*given.text.shape, *width, generator=given.generator)


def _images(given: _Given, count: int | None = None, size: int = 16) -> Tensor:
    """Draw an image for each row, or `count` of them."""
    return _noise(given, -1, *(() if count is None else (count,)), 3, size, size)


def _boxes(given: _Given, is_ordered: bool = False, in_shares: bool = False) -> Tensor:
    """Draw a box for each token, [rows, tokens, 4]: in pixels below 60, or in shares of 60."""
    boxes = _integers(given, 60, -1, -1, 4)
    boxes = boxes.sort(-1).values if is_ordered else boxes
    return boxes / 60 if in_shares else boxes


def _kept(given: _Given, count: int | None = None) -> Tensor:
    """Draw positions of tokens that are not padding, [rows, count]; [rows] without a count."""
    weights = given.batch["attention_mask"].float()
    drawn = torch.multinomial(weights, count or 1, replacement=True, generator=given.generator)
    return drawn if count else drawn[:, 0]


def _first_marked(given: _Given) -> Tensor:
    marks = torch.zeros_like(given.text)
    marks[..., 0] = 1
    return marks


def _placeholders(given: _Given, count: int, token: int) -> Tensor:
    """Put `count` placeholders of an image, or of sound, into each text, from the second token on."""
    tokens = given.text.clone()
    tokens[:, 1 : 1 + count] = token
    return tokens


def _marked_placeholders(given: _Given, count: int) -> Tensor:
    marks = torch.zeros_like(given.text)
    marks[:, 1 : 1 + count] = 1
    return marks


def _frames(given: _Given) -> Tensor:
    """Put the mark of speech and three frames of sound into each text."""
    tokens = given.text.clamp(min=8)
    tokens[:, 4] = given.model.config.audio_bos_token_id
    tokens[:, 5:8] = given.model.config.audio_latent_token_id
    return tokens


def _first_or_none(given: _Given) -> Tensor:
    """Link each token to the first one, and the first to nothing, which is the index behind the last token."""
    mask = given.batch["attention_mask"]
    first = mask.argmax(1, keepdim=True)
    return first.expand(mask.shape).scatter(1, first, mask.shape[1])


def _phrases(given: _Given) -> Tensor:
    """Make texts of two phrases between the marks that Grounding DINO looks for: [CLS] a b . c . [SEP]."""
    texts = torch.tensor([101, 0, 0, 1012, 0, 1012, 102]).repeat(given.rows, 1)
    texts[:, [1, 2, 4]] = torch.randint(5, 95, (given.rows, 3), generator=given.generator)
    return texts


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "boxes": _boxes,
    "chances": lambda given, *shape: _noise(given, *shape).sigmoid(),
    "filled": lambda given, value, *shape: torch.full(given.sizes(shape), value),
    "first_marked": _first_marked,
    "first_or_none": _first_or_none,
    "frames": _frames,
    "images": _images,
    "integers": _integers,
    "integers_from": lambda given, low, high, *shape: low + _integers(given, high - low, *shape),
    "kept": _kept,
    "marked_placeholders": _marked_placeholders,
    "marks": lambda given, *shape: torch.ones_like(_integers(given, 2, *shape)).bool(),
    "noise": _noise,
    "not_padding": lambda given: given.batch["attention_mask"].bool(),
    "ones": lambda given, *shape: torch.ones_like(_integers(given, 2, *shape)),
    "ones_of_sequences": lambda given, count, length: torch.ones_like(_sequences(given, 2, count, length)),
    "per_token": _per_token,
    "phrases": _phrases,
    "placeholders": _placeholders,
    "sequences": _sequences,
    "shares": lambda given, *shape: _noise(given, *shape).softmax(-1),
    # Pictures of sound, [rows, bands, frames for each token * tokens].
    "sound_of_text": lambda given, bands, frames: _noise(given, -1, bands, frames * given.text.shape[1]),
    "spans": lambda given: _noise(given, 3, -1).sigmoid().sort(0, descending=True).values,
    "targets": lambda given: detection_targets(given.rows, 2, (64, 64), given.generator),
    "text": lambda given: given.text,
    "text_then_ignored": lambda given, count: torch.nn.functional.pad(given.text, (0, count), value=-100),
}
