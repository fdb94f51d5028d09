"""Make random batches for any head class: ragged text, images or sound, with labels or a loss of the outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softsign

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.verify.family_inputs import further_inputs, labels_without_text

_IGNORED = -100
_LABELS = frozenset(("labels", "start_positions", "next_sentence_label", "mc_labels"))
_OF_PAIRS = "return_loss"  # what asks CLIP, and models like it, for the loss of pairs of texts and images
_ONE_LABEL = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
    "ForXVector",
    "ForVisualReasoning",
    "ForImageAndTextRetrieval",
)


def takes_labels(model_class: type[nn.Module]) -> bool:
    """Check whether the class takes labels, or compares the samples' texts and images, and so has a loss of its own."""
    return bool((_LABELS | {_OF_PAIRS}) & set(inspect.signature(model_class.forward).parameters))


def takes_pairs(model_class: type[nn.Module]) -> bool:
    """Return whether the class compares texts with images, as CLIP does, where it is asked for a loss."""
    return {_OF_PAIRS, "pixel_values"} <= inspect.signature(model_class.forward).parameters.keys()


def kind_of(model: nn.Module) -> str:
    """Return the task of a head: "ForCausalLM", "ForImageClassification", …, or "other"."""
    name = type(model).__name__
    return "For" + name.rpartition("For")[2] if "For" in name else "other"


def batch_for(model: nn.Module, step: int, rows: int = 6, has_labels: bool = True) -> dict[str, Any]:
    """Make a batch of ragged text (padded on either side), images or sound, with different data at every step.

    Sequence lengths also differ between steps.

    Raises:
        ConfigurationError: there are no random inputs or labels for this kind of model.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    batch = _main_input(model, step, rows, generator)
    if model.config.is_encoder_decoder and kind_of(model) == "ForSequenceClassification":  # reads at the last EOS
        ends = batch["attention_mask"].sum(1) - 1
        batch["input_ids"][torch.arange(rows), ends] = model.config.eos_token_id
    modules = type(model).__module__.split(".")  # transformers.models.FAMILY.modeling_FAMILY
    further = further_inputs(modules[2] if len(modules) > 2 else "", model, batch, generator)
    if not has_labels:
        further = {name: value for name, value in further.items() if name not in _LABELS}
    elif "labels" not in further and _OF_PAIRS not in batch:
        seen = batch if "input_ids" in batch and "input_ids" in further else batch | further
        batch = _labels(model, seen, rows, generator) | batch
    return {name: value for name, value in (batch | further).items() if value is not None}


def ragged_text(shape: tuple[int, ...], length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Make tokens and mask of shape [*shape, length]; padding alternates between the right and the left side."""
    tokens = torch.randint(5, 95, (*shape, length), generator=generator).flatten(0, -2)
    kept = torch.randint(length // 2, length + 1, (len(tokens),), generator=generator)
    kept[0] = length
    position = torch.arange(length)
    mask = torch.stack(
        [position >= length - count if row % 2 else position < count for row, count in enumerate(kept.tolist())]
    ).long()
    return {"input_ids": (tokens * mask).view(*shape, length), "attention_mask": mask.view(*shape, length)}


def _main_input(model: nn.Module, step: int, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    takes = inspect.signature(model.forward).parameters
    if "inputs" in takes and "pixel_values" not in takes and "input_ids" not in takes:  # Perceiver's
        return {"inputs": torch.randn(rows, 2, 27, 16, 16, generator=generator)}
    if "input_ids" in takes:
        shape = (rows, 3) if kind_of(model) == "ForMultipleChoice" else (rows,)
        text = ragged_text(shape, max(11 - 2 * step, 5), generator)
        has_tower = takes_pairs(type(model)) and hasattr(model.config, "vision_config")
        pair = _images(model.config.vision_config, rows, generator) | {_OF_PAIRS: True} if has_tower else {}
        return {name: value for name, value in text.items() if name in takes} | pair
    if "pixel_values" in takes:
        return _images(model.config, rows, generator)
    if "pixel_values_videos" in takes:
        return {"pixel_values_videos": torch.randn(rows, 4, 3, 16, 16, generator=generator)}
    if "flattened_patches" in takes:  # of an image of any size, each with its row and column
        places = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).expand(rows, 9, 2)
        return {"flattened_patches": torch.cat([places, torch.randn(rows, 9, 32, generator=generator)], -1)}
    if "input_values" in takes or "input_features" in takes:
        name = "input_values" if "input_values" in takes else "input_features"
        return {name: torch.randn(rows, 500, generator=generator)}
    raise ConfigurationError(
        f"no batch can be made up for {type(model).__name__}, which takes {', '.join(list(takes)[:4])}; "
        "use a class that takes input_ids, pixel_values, input_values or input_features"
    )


def _images(config: Any, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    size, channels = getattr(config, "image_size", 16), getattr(config, "num_channels", 3)
    sides = size if isinstance(size, tuple | list) else (size, size)
    return {"pixel_values": torch.randn(rows, channels, *sides, generator=generator)}


def _labels(model: nn.Module, batch: Mapping[str, Tensor], rows: int, generator: torch.Generator) -> dict[str, Any]:
    kind, classes = kind_of(model), getattr(model.config, "num_labels", 2)
    if kind in ("ForQuestionAnswering", "ForQuestionAnsweringSimple"):
        positions = torch.randint(0, batch["input_ids"].shape[1], (2, rows), generator=generator)
        return {"start_positions": positions[0], "end_positions": positions[1]}
    if kind in _ONE_LABEL and classes == 1:  # regression
        return {"labels": torch.randn(rows, generator=generator)}
    if kind in _ONE_LABEL:
        return {"labels": torch.randint(0, classes, (rows,), generator=generator)}
    if kind == "ForNextSentencePrediction":
        return {"labels": torch.randint(0, 2, (rows,), generator=generator)}
    if kind == "ForMultipleChoice":
        return {"labels": torch.randint(0, 3, (rows,), generator=generator)}
    if "input_ids" not in batch:
        return labels_without_text(kind, model, batch, rows, generator)
    mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
    if kind == "ForTokenClassification":
        labels = torch.randint(0, classes, mask.shape, generator=generator)
        return {"labels": labels.masked_fill(mask == 0, _IGNORED)}
    if kind == "ForPreTraining" and "next_sentence_label" in inspect.signature(model.forward).parameters:
        pairs = {"next_sentence_label": torch.randint(0, 2, (rows,), generator=generator)}
        return pairs | {"labels": batch["input_ids"].masked_fill(mask == 0, _IGNORED)}
    labels = batch["input_ids"].masked_fill(mask == 0, _IGNORED)
    labels[1, 1:4] = _IGNORED
    return {"labels": labels}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return an entry of a batch on the CPU, with its floating-point tensors in a dtype."""
    if isinstance(value, list | tuple):
        return type(value)(cast(part, dtype) for part in value)
    if isinstance(value, Mapping):
        return {key: cast(part, dtype) for key, part in value.items()}
    if isinstance(value, Tensor):
        return value.to("cpu", dtype if value.is_floating_point() else None)
    return value


def rows_of(batch: Mapping[str, Any]) -> int:
    """Return the number of samples of a user's batch."""
    rows = next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
    if rows == 0:
        raise ConfigurationError("the batch holds no samples; give a mapping with tensors [samples, ...]")
    return rows


def distance_from_wave(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return the sum over samples of the squared distance of each differentiable output from a wave, and their number.

    The distance is a mean over the elements of an output. Squares alone would not do: those of an output behind a
    norm add up to a constant, whose gradient is rounding. Outputs are squashed to -1 … 1, because some are masked with
    large numbers.

    Args:
        batch: its inputs, with samples in the first dimension of the first tensor.
    """
    rows = next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())
    found = [output for output in _differentiable(outputs) if output.dim() and len(output) % rows == 0]
    if not found:
        raise ConfigurationError("none of the outputs has a gradient, so that no criterion can train the model")
    return sum((_distance(output.reshape(rows, -1)) for output in found), start=found[0].new_zeros(())), rows


def _distance(output: Tensor) -> Tensor:
    wave = torch.arange(output.shape[1], device=output.device).to(output.dtype).cos()
    return (softsign(output) - wave).square().mean(1).sum()


def _differentiable(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        yield from (each for item in value.values() for each in _differentiable(item))
    elif isinstance(value, tuple | list):
        yield from (each for item in value for each in _differentiable(item))
