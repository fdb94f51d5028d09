"""Options of kernels and precision: which of them run, in which dtypes, and which activations are recomputed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plugins.hybrid_parallel.config.option_group import SWITCH, OptionGroup, Rule, is_number, one_of, option, positive
from shardformer.attention.backends import NAMES

_CHOICES = ("full", "operators", "selective")
_RECOMPUTED = "is not available; use None, 'full', 'operators', 'selective' or a share of layers such as 0.5"
_BACKENDS = f"is not an attention backend; use True, False or one of {', '.join(NAMES)}"


@dataclass(frozen=True, kw_only=True)
class KernelOptions(OptionGroup):
    """Optimisations of the sharded model that leave its results as they are.

    Attributes:
        enable_fused_normalization: use fused kernels for layer and RMS norms.
        enable_flash_attention: True for the fastest attention kernel that applies, or the name of one.
        enable_jit_fused: use fused elementwise operators.
        enable_sequence_overlap: overlap the communication of sequence parallelism with matrix products.
        enable_all_optimization: enable every optimisation that is available.
        gradient_checkpointing: "full" recomputes every layer in the backward pass; a fraction in (0, 1] recomputes this
            share of each stage's layers, counted from its first; "operators" saves the results of each layer's matrix
            products and attention, and recomputes the rest; "selective" recomputes the attention kernels that store
            their scores; None keeps all activations.
        tiled_mlp: compute feed-forwards in tiles of tokens, and recompute each tile in the backward pass.
        compile_layers: compile each layer with `torch.compile`; off by default, because no GPU has measured it.
        cuda_graphs: record each compiled layer as a CUDA graph; no GPU has replayed one.
    """

    enable_fused_normalization: bool = option(False, SWITCH)
    enable_flash_attention: bool | str = option(
        False,
        Rule(
            (
                (lambda value: isinstance(value, bool | str), _BACKENDS),
                (lambda value: isinstance(value, bool) or value in NAMES, _BACKENDS),
            ),
            "sdpa",
        ),
    )
    enable_jit_fused: bool = option(False, SWITCH)
    enable_sequence_overlap: bool = option(False, SWITCH)
    enable_all_optimization: bool = option(False, SWITCH)
    gradient_checkpointing: str | float | None = option(
        None,
        Rule(
            (
                (lambda value: isinstance(value, str) or is_number(value), _RECOMPUTED),
                (
                    lambda value: value in ("full", "operators", "selective") or (is_number(value) and 0 < value <= 1),
                    _RECOMPUTED,
                ),
            ),
            0.5,
        ),
    )
    tiled_mlp: bool = option(False, SWITCH)
    compile_layers: bool = option(False, SWITCH)
    cuda_graphs: bool = option(False, SWITCH)


PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(OptionGroup):
    """In which dtypes the model is trained.

    Attributes:
        precision: dtype of parameters and activations; "fp32" keeps the model's own dtype, "fp8" is "bf16" with the
            matrix products of the layers in 8 bit.
        fp8_recipe: what has a scale of its own under "fp8": a matrix ("tensorwise"), a row ("rowwise"), or 32 values of
            one ("mxfp8").
        initial_scale: loss scale of the first fp16 step.
        growth_interval: number of fp16 steps without overflow before the loss scale doubles.
        master_weights: keep fp32 copies of 16-bit parameters for the optimizer.
    """

    precision: str = option("fp32", one_of(*PRECISIONS))
    fp8_recipe: str = option("tensorwise", one_of("tensorwise", "rowwise", "mxfp8"))
    initial_scale: float = option(2.0**16, positive(2.0**16))
    growth_interval: int = option(1000, positive(1000))
    master_weights: bool = option(True, SWITCH)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of parameters in training; None for the model's own."""
        return _DTYPES.get(self.precision)
