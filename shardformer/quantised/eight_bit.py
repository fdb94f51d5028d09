"""8-bit weights of bitsandbytes (LLM.int8(), arXiv 2208.07339): each row of the weight has a scale.

The product also rounds its input to 8 bits, by the largest value of each token, and multiplies features with large
values in 16 bits. So each rank has to read all features, and the weight is cut between outputs only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.quantised.weight import QuantisedWeight, is_layer_of
from shardformer.shard_spec import ShardSpec, annotate


class EightBit(QuantisedWeight):
    """Weights of `bitsandbytes.nn.Linear8bitLt`."""

    name = "8-bit"

    def accepts(self, native: nn.Module, group: ProcessGroup | None = None) -> bool:
        """Return whether it is a `Linear8bitLt`."""
        return is_layer_of(native, "Linear8bitLt")

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Return (out, in)."""
        return module.out_features, module.in_features

    def unusable(self, module: nn.Module) -> str | None:
        """Return what cannot be trained on: a weight without values."""
        if module.weight.dtype == torch.int8 or module.weight.has_fp16_weights:
            return None
        return "an 8-bit weight that is not quantised yet; move it to its device first, by .to(device)"

    def problem(self, module: nn.Module) -> str | None:
        """Return what cannot be cut: a weight that is not stored in 8 bits."""
        if module.weight.dtype == torch.int8:
            return None
        return "a 16-bit weight that each pass quantises; use llm_int8_has_fp16_weight=False, or tp_size=1"

    def cuts_inputs(self, module: nn.Module, features: ShardSpec) -> bool:
        """Return False: the scale of a token is the largest of all its features."""
        return False

    def cut(self, module: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return the rows of this rank, [local out, in], with their scales [local out]."""
        spec = replace(features, full_shape=self.shape(module), dim=dim)
        rows, scales = spec.shard(module.weight.data), features.shard(scales_of(module))
        return annotate(type(module.weight)(rows, requires_grad=False, CB=rows, SCB=scales), spec)

    def follow(self, module: nn.Module) -> None:
        """Take the views of the weight by which bitsandbytes multiplies from its present memory."""
        if module.weight.CB is not None:
            module.weight.CB = module.weight.data
        if module.state.CB is not None:
            module.state.CB = module.weight.data

    def prepare(self, layer: nn.Module, native: nn.Module) -> None:
        """Take over the threshold of large features; peft reads scales from `state`."""
        super().prepare(layer, native)
        layer.state = type(native.state)(CB=layer.weight.data, SCB=layer.weight.SCB)
        layer.state.threshold, layer.state.use_pool = native.state.threshold, native.state.use_pool
        layer.state.has_fp16_weights = False

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute as `Linear8bitLt` does, which on CPUs rounds inputs in evaluation only."""
        import bitsandbytes  # imported already, as the weight is one of its classes

        weight, state = layer.weight, layer.state
        state.is_training = layer.training
        if state.CB is None or state.CB.data_ptr() != weight.data_ptr():  # moved, or merged by peft
            state.CB, state.SCB = weight.data, weight.SCB.to(weight.device)
        bias = None if bias is None else bias.to(x.dtype)
        return bitsandbytes.matmul(x, weight, bias=bias, state=state)

    def merges_exactly(self, layer: nn.Module, native: nn.Module) -> bool:
        """Return True: rows are quantised one by one."""
        return True


def scales_of(module: nn.Module) -> Tensor:
    """Return the scale of each row of a native layer, [out]: the first pass moves them into the layer's state."""
    return module.weight.SCB if module.weight.SCB is not None else module.state.SCB
