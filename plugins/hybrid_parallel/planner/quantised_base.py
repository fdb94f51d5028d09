"""Bytes of a frozen base whose linear layers bitsandbytes will quantise, computed without its values.

A plan needs no weights, and quantised layers have no form without them. The planned model has plain layers instead, of
which this module says how many bytes they will have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from booster.errors import ConfigurationError

KINDS = ("nf4", "nf4-double", "int8")
_BLOCK, _NESTED_BLOCK = 64, 256  # values that share a scale, and scales that share one (bitsandbytes' defaults)
_CODES, _NESTED_CODES = 16 * 4, 256 * 4  # bytes of the tables of values, fp32


@dataclass(frozen=True)
class QuantisedBase:
    """How the linear layers of a frozen base are stored.

    Attributes:
        kind: "nf4", "nf4-double" (scales in 8 bit too) or "int8".
        skipped: parts of the paths of modules that stay as they are; None for the head and what is tied, as in
            transformers.
    """

    kind: str
    skipped: tuple[str, ...] | None = None

    def names(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the weights of a whole model, without peft's wrapper, that are quantised."""
        skipped = self._skipped(model)
        found = {
            f"{path}.weight": module.weight
            for path, module in model.named_modules()
            if type(module).__name__ in ("Linear", "Conv1D") and not _is_skipped(path, skipped) and "lora_" not in path
        }
        if trained := next((name for name, weight in found.items() if weight.requires_grad), None):
            raise ConfigurationError(
                f"{trained} is to be quantised to {self.kind}, and only frozen weights can be; give --adapter"
            )
        return frozenset(found)

    def _skipped(self, model: nn.Module) -> tuple[str, ...]:
        if self.skipped is not None:
            return self.skipped
        from transformers.quantizers.base import get_keys_to_not_convert

        return tuple(get_keys_to_not_convert(model))

    def stored_bytes(self, elements: int, outputs: int) -> int:
        """Return the bytes of a weight, or of a rank's shard, with its scales and tables.

        Args:
            elements: number of values.
            outputs: number of its output features.
        """
        if self.kind == "int8":
            return elements + 4 * outputs
        scales = -(-elements // _BLOCK)
        packed = (elements + 1) // 2 + _CODES
        if self.kind == "nf4":
            return packed + 4 * scales
        return packed + scales + 4 * -(-scales // _NESTED_BLOCK) + _NESTED_CODES + 4  # and the offset of all scales


def quantised_by(config: Any, kind: str | None = None) -> QuantisedBase | None:
    """Return how a configuration's `quantization_config`, or `kind`, stores the base; None for no quantisation."""
    given = getattr(config, "quantization_config", None)
    if kind is not None or given is None:
        return None if kind is None else QuantisedBase(kind)
    values: Mapping[str, Any] = given if isinstance(given, Mapping) else given.to_dict()
    skipped = values.get("llm_int8_skip_modules")
    skipped = None if skipped is None else tuple(skipped)
    if values.get("load_in_8bit"):
        return QuantisedBase("int8", skipped)
    if values.get("load_in_4bit"):
        return QuantisedBase("nf4-double" if values.get("bnb_4bit_use_double_quant") else "nf4", skipped)
    raise ConfigurationError(
        f"the planner does not know quantisation by {values.get('quant_method')}; use {', '.join(KINDS)}, or a "
        "configuration without quantisation"
    )


def with_adapter(build: Callable[[], nn.Module], adapter: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model with an adapter of peft.

    Args:
        build: builds the base.
        adapter: a `PeftConfig`.
    """
    return partial(_adapted, build, adapter)


def _adapted(build: Callable[[], nn.Module], adapter: Any) -> nn.Module:
    import copy

    from peft import get_peft_model

    return get_peft_model(build(), copy.deepcopy(adapter))  # which takes over defaults of the model


def _is_skipped(path: str, skipped: tuple[str, ...]) -> bool:
    return any(f".{path}.".find(f".{part}.") >= 0 for part in skipped)
