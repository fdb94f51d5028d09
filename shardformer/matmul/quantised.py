"""Frozen linear layers whose weights are quantised: the 4-bit and 8-bit layers of bitsandbytes, and those of torchao.

Each kind of weight knows how it is cut over ranks, and multiplies by its library's own product on this rank's shard.
The dequantised shard has the bits of the shard of the dequantised weight: nothing is quantised again. Kinds are
recognized by the classes of modules that are imported already; this file imports neither library otherwise.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardformer.distributed.collectives import copy_to_region, gather_features, split_to_region
from shardformer.matmul.kernel import LinearKernel
from shardformer.shard_spec import Part, ShardSpec, annotate
from shardformer.utils.derived_modules import is_quantised


class QuantisedWeight(LinearKernel):
    """One kind of frozen quantised weight of a linear layer, multiplied by its library's product.

    A row-parallel layer is cut between inputs if partial products sum up to the whole product, which blocks that
    straddle ranks and inputs that are rounded by the values of all features rule out. Otherwise it is cut between
    outputs: the input features are gathered before the product and the output features after it.
    """

    name: str  # the kind, as its library calls it

    @abstractmethod
    def unusable(self, module: nn.Module) -> str | None:
        """Return what the layer has that no layout can train on, and what would do instead; None if it can."""

    @abstractmethod
    def problem(self, module: nn.Module) -> str | None:
        """Return what the layer has that cannot be cut, and what would do instead; None if rows can be cut."""

    def packed(self, module: nn.Module) -> Sequence[Tensor]:
        """Return what has the values of a layer's weight, each in memory of its own: its packed values, and scales."""
        return [module.weight]

    def follow(self, module: nn.Module) -> None:  # noqa: B027 (most layers have no views)
        """Follow the tensors of `packed` of a layer to other memory, where the layer has views of them."""

    def prepare(self, layer: Any, native: nn.Module) -> None:
        """Tell peft whether `merge` into the shard gives the shard of the merged whole."""
        is_cut_alike = getattr(layer, "outputs", None) is None
        layer.merges_exactly = is_cut_alike and self.merges_exactly(layer, native)

    def rows(self, layer: Any, x: Tensor) -> Tensor:
        """Compute the sum over ranks of x W^T, or put the outputs of ranks together."""
        if layer.outputs is None:
            return super().rows(layer, x)
        whole = x if layer.splits_input else gather_features(x, layer.features, layer.group)
        # Each rank multiplies the gradient by its own rows: their sum is the gradient of the whole input.
        out = self.multiply(layer, copy_to_region(whole, layer.group), None)
        out = gather_features(out, layer.outputs, layer.group)
        return out if layer.sequence is None else split_to_region(out, out.dim() - 2, layer.group)

    @abstractmethod
    def merges_exactly(self, layer: nn.Module, native: nn.Module) -> bool:
        """Return whether quantising a shard again, as peft's `merge` does, gives the shard of the whole."""


def is_layer_of(module: nn.Module, name: str) -> bool:
    """Return whether a module is a layer of bitsandbytes, by the name of its class."""
    library = sys.modules.get("bitsandbytes.nn.modules")
    return library is not None and isinstance(module, getattr(library, name))


SMALLEST_BLOCK = 32  # values, of bitsandbytes' kernels
_SCALES_OF_A_BLOCK = 256  # of double quantisation


class FourBit(QuantisedWeight):
    """Weights of `bitsandbytes.nn.Linear4bit`."""

    name = "4-bit"

    def accepts(self, native: nn.Module, group: ProcessGroup | None = None) -> bool:
        """Return whether it is a `Linear4bit`."""
        return is_layer_of(native, "Linear4bit")

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Return (out, in)."""
        return tuple(module.weight.quant_state.shape)

    def unusable(self, module: nn.Module) -> str | None:
        """Return what cannot be trained on: a weight without values, or one packed for another product."""
        state = getattr(module.weight, "quant_state", None)
        if state is None:
            return "a 4-bit weight that is not quantised yet; move it to its device first, by .to(device)"
        if getattr(state, "packing_format_for_cpu", False):
            return (
                "a weight that bitsandbytes has packed for evaluation on this CPU, with rounded scales; build the "
                "model again, and call boost before the first evaluation"
            )
        return None

    def problem(self, module: nn.Module) -> str | None:
        """Return what cannot be cut: rows of split blocks."""
        state = module.weight.quant_state
        if not _has_whole_rows(module):
            return (
                f"4-bit weights in rows of {state.shape[1]} values, which blocks of {state.blocksize} do not divide, "
                "so that tensor parallelism has no border to cut at; use tp_size=1 (dp, pp work), or name the layer in "
                "llm_int8_skip_modules"
            )
        return None

    def cuts_inputs(self, module: nn.Module, features: ShardSpec) -> bool:
        """Return whether all borders between ranks are at multiples of some block size."""
        return _block_size(module, _borders(features)) is not None

    def cut(self, module: nn.Module, features: ShardSpec, dim: int) -> nn.Parameter:
        """Return the packed values [local out, local in / 2], with a quantisation state of their own."""
        weight, state = module.weight, module.weight.quant_state
        num_out, num_in = self.shape(module)
        size = _block_size(module, _borders(features) if dim == 1 else [])
        packed = weight.data.reshape(-1).view(torch.uint8).view(num_out, num_in // 2)
        spec = _packed_spec(features, (num_out, num_in // 2), dim)
        scales = _scales(state).repeat_interleave(state.blocksize // size).view(num_out, num_in // size)
        scales = _cut(scales, features, dim, size)
        shape = torch.Size((spec.local_shape[0], 2 * spec.local_shape[1]))
        options: dict[str, Any] = {
            "shape": shape, "code": state.code, "blocksize": size, "quant_type": state.quant_type,
            "dtype": state.dtype,
        }  # fmt: skip
        codes = _codes_of_rows(state, features, num_in) if dim == 0 and size == state.blocksize else None
        if codes is None:
            new = type(state)(absmax=scales.reshape(-1), **options)
        else:
            new = type(state)(absmax=codes[0], offset=state.offset, state2=codes[1], **options)
        local = type(weight)(
            spec.shard(packed),
            requires_grad=False,
            quant_state=new,
            blocksize=size,
            compress_statistics=new.nested,
            quant_type=state.quant_type,
            quant_storage=torch.uint8,
            bnb_quantized=True,
        )
        return annotate(local, spec)

    def packed(self, module: nn.Module) -> Sequence[Tensor]:
        """Return the packed values, and the scales of blocks."""
        return [module.weight, module.weight.quant_state.absmax]

    def prepare(self, layer: nn.Module, native: nn.Module) -> None:
        """Take over the dtype of products; bitsandbytes' layers have the state as an attribute, too."""
        super().prepare(layer, native)
        layer.compute_dtype, layer.quant_state = native.compute_dtype, layer.weight.quant_state

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute in the layer's `compute_dtype`, or else in that of `x`; the output has the dtype of `x`."""
        import bitsandbytes  # imported already, as the weight is one of its classes

        dtype = layer.compute_dtype or x.dtype
        bias = None if bias is None else bias.to(dtype)
        state = layer.weight.quant_state
        return bitsandbytes.matmul_4bit(x.to(dtype), layer.weight, bias=bias, quant_state=state).to(x.dtype)

    def merges_exactly(self, layer: nn.Module, native: nn.Module) -> bool:
        """Return False if blocks were split, or if scales are quantised around the mean of all scales of the whole."""
        return layer.weight.blocksize == native.weight.blocksize and not native.weight.quant_state.nested


def keep_format(model: nn.Module) -> None:
    """Let 4-bit layers that stay whole keep the format of their weights in evaluation.

    On CPUs with AVX512-BF16, bitsandbytes packs them for another product in the first evaluation, with scales rounded
    to bf16. That cannot be undone, and the other product has no gradient.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _borders(features: ShardSpec) -> list[int]:
    """Return where the pieces of all ranks begin and end."""
    ranks = map(features.on_rank, range(features.world_size))
    return sorted({place for spec in ranks for start, stop, _ in spec.pieces() for place in (start, stop)})


def _block_size(module: nn.Module, borders: list[int]) -> int | None:
    """Return the largest block size, at most that of the weight, that divides all borders; None if none does."""
    size = module.weight.quant_state.blocksize
    while size >= SMALLEST_BLOCK and any(place % size for place in borders):
        size //= 2
    return size if size >= SMALLEST_BLOCK and _has_whole_rows(module) else None


def _has_whole_rows(module: nn.Module) -> bool:
    """Return whether no block is in two rows; bitsandbytes' kernel for CPUs reads other scales then."""
    return module.weight.quant_state.shape[1] % module.weight.quant_state.blocksize == 0


def _packed_spec(features: ShardSpec, shape: tuple[int, int], dim: int) -> ShardSpec:
    """Return the sharding of packed values, [out, in / 2]: two inputs are one column."""
    if dim == 0:
        return replace(features, full_shape=shape, dim=0)
    # Borders are at multiples of 32, so that all pieces of a part have one size unless its unit is even.
    parts = tuple(Part(part.size // 2, part.unit // 2 if part.unit % 2 == 0 else part.unit) for part in features.parts)
    return replace(features, full_shape=shape, dim=1, parts=parts)


def _scales(state: Any) -> Tensor:
    """Return the scale of each block in fp32: [blocks]."""
    if not state.nested:
        return state.absmax.float()
    from bitsandbytes.functional import dequantize_blockwise

    return (dequantize_blockwise(state.absmax, state.state2) + state.offset).float()


def _cut(scales: Tensor, features: ShardSpec, dim: int, size: int) -> Tensor:
    """Return the scales of this rank's rows (`dim` 0) or columns (`dim` 1); those of padding rows are zero."""
    if dim == 0:
        return replace(features, full_shape=tuple(scales.shape), dim=0).shard(scales)
    return torch.cat([scales[:, start // size : stop // size] for start, stop, _ in features.pieces()], dim=1)


def _codes_of_rows(state: Any, features: ShardSpec, num_in: int) -> tuple[Tensor, Any] | None:
    """Return the quantised scales of this rank's rows, if it starts at a block of scales; None if it does not."""
    (start, stop, padding), *more = features.pieces()
    first, last = (row * num_in // state.blocksize for row in (start, stop))
    if not state.nested or more or padding or first % _SCALES_OF_A_BLOCK:
        return None
    second, stops = state.state2, -(-last // _SCALES_OF_A_BLOCK)
    scales = second.absmax[first // _SCALES_OF_A_BLOCK : stops].clone()
    return state.absmax[first:last].clone(), type(state)(
        absmax=scales, blocksize=second.blocksize, code=second.code, dtype=second.dtype
    )


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


KINDS: tuple[QuantisedWeight, ...] = (FourBit(), EightBit(), TorchaoInt8())


def kind_of_layer(module: nn.Module) -> QuantisedWeight | None:
    """Return the kind of weight of a native quantised linear layer that can be cut; None for any other module."""
    return next((kind for kind in KINDS if kind.accepts(module)), None)


def quantised_name(model: nn.Module) -> str | None:
    """Return the name of the first quantised parameter of a model; None if it has none."""
    return next((name for name, parameter in model.named_parameters() if is_quantised(parameter)), None)


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, QuantisedWeight]]:
    """Yield path, module and kind of the native quantised linear layers of a model."""
    for path, module in model.named_modules():
        kind = kind_of_layer(module)
        if kind is not None:
            yield path, module, kind


def packed_layers(model: nn.Module) -> Iterator[tuple[nn.Module, QuantisedWeight]]:
    """Yield module and kind of the quantised linear layers of a model, native ones and shards."""
    for module in model.modules():
        kernel = getattr(module, "kernel", None)
        kind = kernel if isinstance(kernel, QuantisedWeight) else kind_of_layer(module)
        if kind is not None and is_quantised(module.weight):  # and no part of an adapter that is like such a layer
            yield module, kind


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of all values of a whole model: parameters, buffers, scales of quantised weights.

    Parameters of a tensor subclass that has no values of its own (torchao) are given by the tensors inside of them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(tensor):
            yield from ((f"{name}.{part}", getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
        else:
            yield name, tensor
    for path, module, kind in quantised_layers(model):
        if isinstance(kind, EightBit):
            yield f"{path}.SCB", scales_of(module)
        if not isinstance(kind, FourBit):
            continue
        state = module.weight.quant_state
        tensors = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
        if state.nested:
            tensors |= {"nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        yield from ((f"{path}.weight.{name}", tensor) for name, tensor in tensors.items() if tensor is not None)
