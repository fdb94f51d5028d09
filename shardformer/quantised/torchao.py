"""Int8 weights of torchao (`Int8WeightOnlyConfig`).

The weight is a tensor subclass that multiplies in `F.linear`; each row of it has a scale. The kinds that round their
inputs, too, pass no gradient to them, so that no layer before them could be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.quantised.weight import QuantisedWeight
from shardformer.shard_spec import ShardSpec, annotate


class TorchaoInt8(QuantisedWeight):
    """Weights that are an `Int8Tensor`, in `nn.Linear`."""

    name = "torchao int8"

    def accepts(self, native: nn.Module, group: ProcessGroup | None = None) -> bool:
        """Return whether its weight is an `Int8Tensor`."""
        stored = type(native._parameters.get("weight"))  # to read a parametrized weight may change it
        is_int8 = stored.__name__ == "Int8Tensor" and stored.__module__.startswith("torchao.")
        return is_int8 and isinstance(native, nn.Linear)

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Return (out, in)."""
        return tuple(module.weight.shape)

    def unusable(self, module: nn.Module) -> str | None:
        """Return None: torchao quantises where it makes the weight."""
        return None

    def problem(self, module: nn.Module) -> str | None:
        """Return what cannot be cut: scales that are not those of rows, and inputs that are changed."""
        weight = module.weight
        changes = (weight.act_quant_kwargs, weight.act_quant_scale, weight.act_pre_scale)
        if list(weight.block_size) == [1, weight.shape[1]] and all(each is None for each in changes):
            return None
        return (
            "int8 weights of torchao that have no scale for each row or that round their inputs; use tp_size=1 (dp, pp "
            "work), or Int8WeightOnlyConfig()"
        )

    def cut(self, module: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return an `Int8Tensor` of this rank's rows (`dim` 0) or columns (`dim` 1)."""
        weight, spec = module.weight, replace(features, full_shape=self.shape(module), dim=dim)

        def of_rows(value: Tensor | None) -> Tensor | None:
            if value is None or dim == 1:
                return value
            return replace(features, full_shape=tuple(value.shape), dim=0).shard(value)

        local = type(weight)(
            spec.shard(weight.qdata),
            of_rows(weight.scale),
            [1, spec.local_shape[1]],
            weight.dtype,
            zero_point=of_rows(weight.zero_point),
            reduce_range=weight.reduce_range,
        )
        return annotate(nn.Parameter(local, requires_grad=False), spec)

    def packed(self, module: nn.Module) -> Sequence[Tensor]:
        """Return the packed values, which are inside of the weight."""
        return [module.weight.qdata]

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b."""
        return F.linear(x, layer.weight, bias)

    def merges_exactly(self, layer: nn.Module, native: nn.Module) -> bool:
        """Return False: torchao quantises the weights of `nn.Linear` only."""
        return False
