"""Make a batch of the right shapes for a model, and what packing changes in the cost of its attention."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.planner.op_recorder import Operator
from shardformer.peft import model_inside

# Heads with one label per sample; all other text heads have one per token.
_ONE_LABEL = ("SequenceClassification", "ImageClassification", "AudioClassification", "MultipleChoice")


def batch_of(model: nn.Module, rows: int, length: int, device: str = "cpu") -> dict[str, Tensor]:
    """Make a batch of zeros: `rows` samples of `length` tokens, or `rows` images, with labels, on `device`."""
    model = model_inside(model)
    name, config = type(model).__name__, model.config
    positions = _positions(config)
    if positions is not None and length > positions:
        raise ConfigurationError(
            f"samples of {length} tokens are longer than the {positions} positions of {name}; use {positions} or fewer"
        )
    takes = inspect.signature(model.forward).parameters
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    per_sample = torch.zeros(rows, dtype=torch.long, device=device)
    batch: dict[str, Any] = {}
    if "input_ids" in takes:
        batch["input_ids"] = ids.unsqueeze(1).expand(rows, 2, length) if "MultipleChoice" in name else ids
    elif "pixel_values" in takes:
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
        sides = size if isinstance(size, tuple | list) else (size, size)
        dtype = next(model.parameters()).dtype
        batch["pixel_values"] = torch.zeros(rows, channels, *sides, dtype=dtype, device=device)
    else:
        raise ConfigurationError(
            f"{name} reads neither text nor images, and the planner knows no other batch; plan a model of its family "
            "that does"
        )
    if "start_positions" in takes:
        return {**batch, "start_positions": per_sample, "end_positions": per_sample}
    if "labels" not in takes:
        raise ConfigurationError(f"{name} has no loss to train with; give a head with --head, as one ForCausalLM")
    return {**batch, "labels": per_sample if any(head in name for head in _ONE_LABEL) else ids}


def _positions(config: Any) -> int | None:
    """Return the number of positions of a model; None if its configuration does not give one."""
    text = config.get_text_config()
    found = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    return next((count for count in found if isinstance(count, int) and count > 0), None)


@dataclass(frozen=True)
class Packing:
    """Rows of several documents each.

    Attributes:
        document: mean number of tokens of a document, weighted by tokens; a row is one sample.
        length: tokens of a row.
        is_varlen: whether attention computes the pairs of tokens of one document alone, as flash-attn does. All other
            kernels compute all pairs of a row under a mask.
    """

    document: float
    length: int
    is_varlen: bool

    @property
    def share(self) -> float:
        """Part of the pairs of tokens of a row that are of one document."""
        return min(1.0, self.document / self.length)

    def executed(self, operator: Operator) -> Operator:
        """Return an operator with the FLOPs that a device computes for packed rows."""
        if operator.kind != "attention":
            return operator
        # A kernel that gets a mask does not know that half of it is empty.
        factor = self.share if self.is_varlen else 2.0 if operator.is_causal else 1.0
        return replace(operator, flops=operator.flops * factor)

    def useful(self, operator: Operator) -> float:
        """Return the FLOPs of an operator between tokens of one document."""
        return operator.flops * (self.share if operator.kind == "attention" else 1.0)

    def mask_bytes(self, rows: int, itemsize: int) -> tuple[int, int]:
        """Return the bytes of the mask of a micro-batch, and those that each attention layer saves of it.

        The mask is boolean, [rows, 1, length, length]; torch saves it in the dtype of the scores with every layer.
        """
        pairs = 0 if self.is_varlen else rows * self.length**2
        return pairs, pairs * itemsize
