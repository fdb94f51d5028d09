"""Features of few bits: frozen weights that are quantised, and matrix products in FP8."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.features.feature import Feature, Parts
from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions
from plugins.hybrid_parallel.zero.collectives.backend import AllGatherHandle
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers, ShardedParameters
from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.layers.embedding import VocabParallelLMHead
from shardformer.layers.experts import expert_modules
from shardformer.layers.parallel_module import Linear, replicated_linear
from shardformer.matmul.float8 import FP8_RECIPES, Float8, Rounded, RowsOfExperts, Rowwise, scale_of
from shardformer.matmul.native import Native
from shardformer.matmul.quantised import is_quantised, keep_format, kind_of_layer, quantised_layers, quantised_name
from shardformer.peft import adapter_configs, model_inside
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.module_paths import remembered

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel


_log = logging.getLogger(__name__)
# Recipe -> the least compute capability, the option that asks for it, and another value.
_NEEDED = {
    "tensorwise": ((8, 9), "precision='fp8'", "precision='bf16'"),
    "rowwise": ((9, 0), "fp8_recipe='rowwise'", "fp8_recipe='tensorwise'"),
    "mxfp8": ((10, 0), "fp8_recipe='mxfp8'", "fp8_recipe='tensorwise'"),
}


def multiply_in_fp8(model: nn.Module, recipe: str = "tensorwise") -> None:
    """Let the linear layers inside the model's lists of layers multiply in FP8, by a recipe of `matmul/float8.py`.

    Embeddings, heads and other modules outside of these lists keep their precision, as do norms, attention, routers
    and stacked experts. So do, on a GPU, layers that are too small to gain, unless all are.
    """
    in_lists = [module for path, module in model.named_modules() if any(part.isdigit() for part in path.split("."))]
    found = {module: layer for module in in_lists if (layer := _fp8_layer(module)) is not None}
    large = {module: layer for module, layer in found.items() if module.weight.is_cpu or _gains(layer)}
    found = large or found
    kernel = FP8_RECIPES[recipe]()
    for layer in found.values():
        layer.kernel = kernel
    replace_modules(model, found)
    if not found:
        _log.warning("%s has no linear layers in a list of layers: nothing multiplies in 8 bit", type(model).__name__)


def gather_in_fp8(model: nn.Module) -> None:
    """Let regions of sequence parallelism gather rounded tokens where nothing but products in FP8 reads the tokens."""
    for module in model.modules():
        if getattr(module, "gathered", None) is not None:
            layers = [each for each in module.modules() if any(p.dim() > 1 for p in each.parameters(recurse=False))]
            readers = [each for each in layers if not isinstance(each, RowParallelLinear | nn.Embedding)]
            kernels = {each.kernel if _gathers_rounded(each) else None for each in readers}
            if len(kernels) == 1:
                module.gather_kernel = kernels.pop()


def _gathers_rounded(layer: nn.Module) -> bool:
    is_column = isinstance(layer, ColumnParallelLinear) and layer.input_is_gathered
    return is_column and isinstance(layer.kernel, Float8) and layer.kernel.gathers_rounded


class _Float8Experts(nn.Module):
    """Multiplies in FP8; `kernel` keeps rounded weights."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with RowsOfExperts(self.kernel):
            return super().forward(hidden_states, top_k_index, top_k_weights)


def experts_in_fp8(model: nn.Module) -> None:
    """Let stacked experts multiply in FP8, by rows, where they run grouped products, and on a GPU if they gain."""
    found, kernel = {}, Rowwise()
    for _, experts in list(expert_modules(model)):
        sizes = [each.shape[1:] for each in experts.parameters(recurse=False) if each.dim() == 3]
        gains = 600 * sum(map(sum, sizes)) <= sum(size.numel() for size in sizes)  # see `_gains`
        way = getattr(getattr(experts, "config", None), "_experts_implementation", None)
        if way == "grouped_mm" and (gains or next(experts.parameters()).is_cpu):
            experts.kernel = kernel
            found[experts] = derive(experts, _Float8Experts)
    replace_modules(model, found)


def _gains(layer: nn.Module) -> bool:
    """Return whether 8 bit save more time in products than rounding takes; layers that share an input are one.

    Of each token, [in] and its gradient [out] are rounded, 6 bytes of reads and writes a value. The three products, of
    6 * in * out operations in bf16, take half the time in 8 bit. A GPU does about 300 operations for each byte that it
    moves (H100: 989e12 and 3.35e12 a second, B200: 2,250e12 and 8e12), so both take the same time where
    in * out / (in + out) is 600.
    """
    shared = getattr(layer, "_shared_input", None)
    weights = [each.weight for each in ([layer] if shared is None else shared.layers)]
    columns = weights[0].shape[0 if getattr(layer, "transposed", False) else -1]
    size = sum(weight.numel() for weight in weights)
    return size >= 600 * (columns + size // max(columns, 1))


@contextmanager
def weights_rounded_once(model: nn.Module, keeps_weights: bool = True) -> Iterator[None]:
    """Let layers that multiply in FP8 round their weights once in this context, in which weights must not change."""
    with ExitStack() as stack:
        for kernel in remembered(model, _fp8_kernels):
            stack.enter_context(kernel.reusing_weights(keeps_weights))
        yield


class RoundedParameters(ShardedParameters):
    """Weights that ranks round before they gather them: one byte a value; what reads other bits gathers all.

    The scale of a weight is that of the whole, so that values are those that a rank with the whole would round.
    torchao's all-gather in float8 does the same for FSDP2.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], offsets: Sequence[int], size: int, options: BucketOptions
    ) -> None:
        super().__init__(params, offsets, size, options)
        device = self.flat.device
        self.is_rounded = False  # whether `rounded_shard` has the values of `shard`
        self.rounded_shard = self.exchange.empty_shard(len(self.shard), torch.uint8, device)  # bytes of e4m3
        self._rounded = torch.empty(size, dtype=torch.uint8, device=device)
        self._scales: Sequence[Tensor] = ()  # one for each parameter, 0-d
        self._arriving: AllGatherHandle | None = None
        self._has_rounded = False
        self._release_rounded()

    @torch.no_grad()
    def peaks(self) -> Tensor:
        """Return the largest absolute value of this rank's part of each parameter, [parameters], in fp32."""
        parts = [self.own_slice(param)[2] for param in self.params]
        found = [part for part in parts if len(part)]
        norms = iter(torch._foreach_norm(found, torch.inf, dtype=torch.float32) if found else ())
        zero = torch.zeros((), device=self.shard.device)
        # Not every backend's maximum is nan if a value is; of inf, as of nan, all products are nan.
        return torch.stack([next(norms) if len(part) else zero for part in parts]).nan_to_num(nan=torch.inf)

    @torch.no_grad()
    def round(self, peaks: Tensor) -> None:
        """Round this rank's part of each parameter, given the largest absolute values of the whole ones."""
        self._release_rounded()
        scales = scale_of(peaks, torch.float8_e4m3fn)
        for param, scale in zip(self.params, scales.split(1), strict=True):
            place = self.slice_on(self.rank, param).place
            rounded = (self.shard[place] / scale).to(torch.float8_e4m3fn)
            self.rounded_shard[place].copy_(rounded.view(torch.uint8))
        self._scales = scales.unbind()

    @property
    def was_rounded(self) -> bool:
        """Whether it was rounded before."""
        return bool(self._scales)

    def start_use(self) -> None:
        """Start to gather the rounded values."""
        if not self.is_rounded:
            super().start_use()
        elif not (self.is_gathered or self._has_rounded or self._arriving is not None):
            self.exchange.await_update()
            self._rounded.untyped_storage().resize_(self._rounded.numel())
            self._arriving = self.exchange.gather_shard(self.rounded_shard, self._rounded)

    def use(self) -> None:
        """Give the products the rounded values; the parameters have no others."""
        if not self.is_rounded or self.is_gathered:
            super().use()
        elif not self._has_rounded:
            self.start_use()
            self._arriving.wait()
            self._arriving, self._has_rounded = None, True
            for param, scale in zip(self.params, self._scales, strict=True):
                start = param.storage_offset()
                values = self._rounded[start : start + param.numel()].view(torch.float8_e4m3fn)
                param.rounded = Rounded.of(values.view(param.shape), scale)

    def dissolve(self) -> None:
        """Give the parameters whole values of their own."""
        self._release_rounded()
        super().dissolve()

    def release(self) -> None:
        """Give the memory of the whole back, rounded or not."""
        self._release_rounded()
        super().release()

    def _release_rounded(self) -> None:
        for param in self.params:
            param.rounded = None
        if self._arriving is not None:
            self._arriving.wait()
        self._arriving, self._has_rounded = None, False
        self._rounded.untyped_storage().resize_(0)


@contextmanager
def _rounded_shards(gathers: ParameterGathers, is_backward: bool) -> Iterator[None]:
    """Gather rounded weights in this context, of all passes until the backward pass, in which they are still the same.

    The largest values of all weights are one message.
    """
    members = [each for each in gathers.members if isinstance(each, RoundedParameters) and not each.is_rounded]
    if members and not is_backward:
        with gathers.changing():
            for exchange in dict.fromkeys(member.exchange for member in members):
                own = [member for member in members if member.exchange is exchange]
                peaks = torch.cat([member.peaks() for member in own])
                dist.all_reduce(peaks, dist.ReduceOp.MAX, group=exchange.group)
                for member, part in zip(own, peaks.split([len(each.params) for each in own]), strict=True):
                    member.round(part)
    for member in members:
        member.is_rounded = member.was_rounded  # not yet, if it was made since the forward pass
    try:
        yield
    finally:
        for member in members:
            member.is_rounded = False


def _fp8_kernels(model: nn.Module) -> set[Float8]:
    return {module.kernel for module in model.modules() if isinstance(getattr(module, "kernel", None), Float8)}


def check_fp8(device: torch.device, recipe: str) -> None:
    """Check that a device has the FP8 products of a recipe; raises ConfigurationError if it has none."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    least, option, instead = _NEEDED[recipe]
    if capability < least:
        needed, found = (".".join(map(str, each)) for each in (least, capability))
        raise ConfigurationError(
            f"{option} needs a GPU of compute capability {needed} or more, and this one has {found}; use {instead}"
        )


def _fp8_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that multiplies in FP8 instead of `module`, or `module` itself; None if it is not linear."""
    if isinstance(module, VocabParallelLMHead):
        return None
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return module if type(module.kernel) is Native else None
    return replicated_linear(module)


class QuantisedWeights(Feature):
    """Frozen weights that a quantiser has packed."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse quantised weights without adapters, and those of which it is not known how they are cut."""
        inside, tp_size = model_inside(model), self.config.parallel.tp_size
        packed, name = quantised_name(inside), type(inside).__name__
        what = f"{packed} is packed" if packed is not None else "its weights are packed"
        if packed is not None and not adapter_configs(model):
            raise ConfigurationError(
                f"a quantised {name} ({what}) has no weights that can be trained; wrap it by peft's get_peft_model, or "
                "load it without quantization_config"
            )
        if self.config.mixed_precision.precision == "fp8":
            raise ConfigurationError(
                f"precision='fp8' cannot multiply the quantised weights of this {name} ({what}); use precision='bf16'"
            )
        for path, module, kind in quantised_layers(inside):
            if (problem := kind.unusable(module)) is not None:
                raise ConfigurationError(f"{path} has {problem}")
        unknown = _first_unknown(inside)
        if tp_size > 1 and (unknown is not None or packed is None):
            raise ConfigurationError(
                f"tp_size={tp_size} cannot shard a quantised {name}: {unknown or 'its weights'} of a kind that is not "
                "known; use the linear layers of bitsandbytes, tp_size=1 (dp and pp work), or load it without "
                "quantization_config"
            )

    def sharded(self, parts: Parts) -> None:
        """Let layers that stay whole keep the format of their weights in evaluation."""
        keep_format(parts.module)


def _first_unknown(model: nn.Module) -> str | None:
    """Return which quantised parameter belongs to no layer that can be cut: "NAME is"; None if all do."""
    for path, module in model.named_modules():
        own = _quantised_of(module) if kind_of_layer(module) is None else None
        if own is not None:
            return f"{path}.{own} is"
    return None


def _quantised_of(module: nn.Module) -> str | None:
    return next((name for name, parameter in module.named_parameters(recurse=False) if is_quantised(parameter)), None)


class Float8Products(Feature):
    """Matrix products of layers in FP8."""

    def check(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: HybridMesh) -> None:
        """Refuse a GPU without the products of the recipe."""
        raise_on_all_ranks(lambda: check_fp8(mesh.device, self.config.mixed_precision.fp8_recipe))

    def sharded(self, parts: Parts) -> None:
        """Have linear layers multiply in FP8, and under "rowwise" stacked experts, but not in graphs."""
        recipe = self.config.mixed_precision.fp8_recipe
        multiply_in_fp8(parts.module, recipe)
        gather_in_fp8(parts.module)
        if recipe == "rowwise" and not self.config.kernels.compile_layers:
            experts_in_fp8(parts.module)

    def boosted(self, model: HybridParallelModel) -> None:
        """Round weights once in each pass, under ZeRO stage 3 before they are gathered where layers allow it."""
        around = [lambda this: weights_rounded_once(model.unwrap(), not model.gathers)]
        config = self.config
        reads_bits = config.kernels.compile_layers or config.offload.offload_parameters is not None
        if config.zero.zero_stage == 3 and not reads_bits:
            for module in filter(reads_rounded, model.unwrap().modules()):
                module.weight.sharded_as = RoundedParameters
            around.append(lambda this: _rounded_shards(model.gathers, this.goes_back))
        model.around_passes += around
        model.around_losses += around


def reads_rounded(module: nn.Module) -> bool:
    """Return whether a layer reads its weight in FP8 alone, as [out, in]: not a `Conv1D`."""
    is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear | Linear)
    if not is_linear or type(module.kernel) is not Float8 or getattr(module, "transposed", False):
        return False
    return all(size % Float8.multiple == 0 for size in module.weight.shape)
