"""Options of precision: dtypes, master weights and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.hybrid_parallel.config.option_group import SWITCH, OptionGroup, one_of, option, positive

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(OptionGroup):
    """In which dtypes the model is trained.

    Attributes:
        precision: dtype of parameters and activations; "fp32" keeps the model's own dtype, "fp8" is "bf16" with the
            matrix products of the layers in 8 bit.
        initial_scale: loss scale of the first fp16 step.
        growth_interval: number of fp16 steps without overflow before the loss scale doubles.
        master_weights: keep fp32 copies of 16-bit parameters for the optimizer.
    """

    precision: str = option("fp32", one_of(*PRECISIONS))
    initial_scale: float = option(2.0**16, positive(2.0**16))
    growth_interval: int = option(1000, positive(1000))
    master_weights: bool = option(True, SWITCH)
