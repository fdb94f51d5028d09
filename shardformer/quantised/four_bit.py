"""NF4 and FP4 weights of bitsandbytes (QLoRA, arXiv 2305.14314): blocks of values that share a scale.

Two values share a byte, in the order of the flat [out, in] weight; each block of 32, 64, ... or 4096 values has the
largest of their absolute values as its scale. With double quantisation the scales themselves are 8-bit codes, in
blocks of 256 scales. A cut at a multiple of 32 values is exact: blocks that it splits become smaller blocks of the
same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.quantised.weight import QuantisedWeight, is_layer_of
from shardformer.shard_spec import Part, ShardSpec, annotate

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
