"""Column- and row-parallel layers with frozen quantised weights: the library's product, between our collectives."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import (
    copy_to_region,
    gather_features,
    reduce_from_region,
    split_features,
    split_to_region,
)
from shardformer.layers.linear import ColumnParallelLinear, RowParallelLinear, column_spec, copies_group, row_spec
from shardformer.layers.lm_head import GatheredLMHead, VocabParallelLMHead
from shardformer.layers.parallel_module import ParallelModule
from shardformer.quantised import QuantisedWeight, kind_of_layer
from shardformer.shard_spec import ShardSpec, annotate, parameter_like, shard_parameter
from shardformer.utils.derived_modules import with_class


class QuantisedColumnLinear(ColumnParallelLinear):
    """Column-parallel layer with this rank's rows of a quantised weight; see `ColumnParallelLinear`.

    Attributes:
        features: sharding of the output features, of one dim.
        merges_exactly: whether peft's `merge` into the shard gives the shard of the merged whole.
    """

    multiplies_alone = True
    features: ShardSpec
    quantised: QuantisedWeight
    merges_exactly: bool

    @staticmethod
    def from_native_module(module: nn.Module, process_group: ProcessGroup, **kwargs: Any) -> QuantisedColumnLinear:
        """Shard a quantised linear layer; arguments as of `ColumnParallelLinear`."""
        return _column(QuantisedColumnLinear, module, process_group, **kwargs)

    def local(self, x: Tensor) -> Tensor:
        """Compute [..., in] -> [..., local out], without communication."""
        return self.quantised.multiply(self, x, self.added_bias)

    def plain(self) -> ColumnParallelLinear:
        """Return a layer that works like this one, for an adapter; its parameters have to be set."""
        return with_class(copy.copy(self), ColumnParallelLinear)


class QuantisedLMHead(QuantisedColumnLinear, VocabParallelLMHead):
    """Language-model head with this rank's rows of a quantised weight; see `VocabParallelLMHead`."""

    shards_layer = False

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: ProcessGroup, *, divisible_by: int = 1, **kwargs: Any
    ) -> QuantisedLMHead:
        """Shard the native head; padding rows are zero."""
        return _column(QuantisedLMHead, module, process_group, divisible_by=divisible_by, gather_output=True, **kwargs)

    def plain(self) -> VocabParallelLMHead:
        """Return a head that works like this one, for an adapter; its parameters have to be set."""
        return with_class(copy.copy(self), VocabParallelLMHead)


class QuantisedRowLinear(RowParallelLinear):
    """Row-parallel layer with this rank's part of a quantised weight; see `RowParallelLinear`.

    The weight is cut between inputs if partial products sum up to the whole product, which blocks that straddle ranks
    and inputs that are rounded by the values of all features rule out. Otherwise it is cut between outputs: the
    input features are gathered before the product and the output features after it.

    Attributes:
        features: sharding of the input features, of one dim.
        outputs: sharding of the output features if these are cut; None if the inputs are.
        merges_exactly: whether peft's `merge` into the shard gives the shard of the merged whole.
    """

    features: ShardSpec
    outputs: ShardSpec | None
    quantised: QuantisedWeight
    merges_exactly: bool

    @staticmethod
    def from_native_module(
        module: nn.Module, process_group: ProcessGroup, *, num_heads: int | None = None, **kwargs: Any
    ) -> QuantisedRowLinear:
        """Shard a quantised linear layer; arguments as of `RowParallelLinear`."""
        kind = kind_of_layer(module)
        num_out, num_in = kind.shape(module)
        features = row_spec(num_in, process_group, num_heads)
        outputs = None if kind.cuts_inputs(module, features) else row_spec(num_out, process_group)
        weight = kind.cut(module, outputs or features, 1 if outputs is None else 0)
        bias = module.bias
        if bias is not None:
            # Under sequence parallelism the bias is added to this rank's tokens only: its gradient is a partial sum.
            whole = ShardSpec(tuple(bias.shape), rank=features.rank, world_size=features.world_size)
            sequence = kwargs.get("sequence")
            bias = annotate(parameter_like(bias, bias.data), whole, None if sequence is None else sequence.grad_group)
        layer = QuantisedRowLinear(weight, bias, process_group, **kwargs)
        layer.features, layer.outputs = features, outputs
        _take_over(layer, module, kind)
        layer.merges_exactly = layer.merges_exactly and outputs is None
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, seq, in] -> [batch, seq, out]; which of the two are shards depends on the layer."""
        if self.outputs is not None:
            out = self._with_cut_outputs(x)
        else:
            x = split_features(x, self.features, self.group) if self.splits_input else x
            out = self.quantised.multiply(self, x, None)
            out = reduce_from_region(out, self.group) if self.sequence is None else self.sequence.reduce_scatter(out)
        return out if self.bias is None or not self.adds_bias else out + self.bias.to(out.dtype)

    def _with_cut_outputs(self, x: Tensor) -> Tensor:
        whole = x if self.splits_input else gather_features(x, self.features, self.group)
        # Each rank multiplies the gradient by its own rows: their sum is the gradient of the whole input.
        out = self.quantised.multiply(self, copy_to_region(whole, self.group), None)
        out = gather_features(out, self.outputs, self.group)
        return out if self.sequence is None else split_to_region(out, out.dim() - 2, self.group)

    def plain(self) -> RowParallelLinear:
        """Return a layer that works like this one, for an adapter; its parameters have to be set."""
        return with_class(copy.copy(self), RowParallelLinear)

    def extra_repr(self) -> str:
        """Describe the shard for `repr`."""
        return f"{super().extra_repr()}, cut={'inputs' if self.outputs is None else 'outputs'}"


_QUANTISED: dict[type[ParallelModule], type[ParallelModule]] = {
    ColumnParallelLinear: QuantisedColumnLinear,
    GatheredLMHead: QuantisedColumnLinear,
    RowParallelLinear: QuantisedRowLinear,
    VocabParallelLMHead: QuantisedLMHead,
}


def for_quantised(target: type[ParallelModule], native: nn.Module) -> type[ParallelModule]:
    """Return the class that replaces a layer: `target`, or the one for its quantised weight where there is one."""
    return target if kind_of_layer(native) is None else _QUANTISED.get(target, target)


def quantised_problem(target: type[ParallelModule], native: nn.Module) -> str | None:
    """Return why a policy's class cannot replace a quantised layer; None if it can, or if it is not quantised."""
    kind = kind_of_layer(native)
    if kind is None:
        return None
    if target not in _QUANTISED:
        return f"{kind.name} weights, which a {target.__name__} cannot cut; use tp_size=1 (dp, pp work)"
    return kind.problem(native)


def _column(cls: type, module: nn.Module, group: ProcessGroup, **kwargs: Any) -> Any:
    kind = kind_of_layer(module)
    features = column_spec(kind.shape(module)[0], group, **kwargs)
    weight = kind.cut(module, features, 0)
    # Adapters follow the weight, so that their gradients are summed over the ranks that hold the same heads.
    annotate(weight, weight.shard_spec, copies_group(group, features.copies))
    bias = None
    if module.bias is not None:
        bias = shard_parameter(module.bias, features, copies_group(group, features.copies))
    named = {name: kwargs[name] for name in ("gather_output", "input_is_gathered") if name in kwargs}
    layer = cls(weight, bias, group, **named)
    layer.features = features
    _take_over(layer, module, kind)
    return layer


def _take_over(layer: Any, module: nn.Module, kind: QuantisedWeight) -> None:
    layer.quantised = kind
    kind.prepare(layer, module)
    layer.merges_exactly = kind.merges_exactly(layer, module)
