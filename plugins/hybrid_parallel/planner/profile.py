"""Profile the cost of each part of a model on one rank, per way of sharding its layers and per micro-batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.model import HybridParallelModel
from plugins.hybrid_parallel.config.options import HybridParallelConfig
from plugins.hybrid_parallel.features.low_bits import reads_rounded, weights_rounded_once
from plugins.hybrid_parallel.planner.calibrate import Case, MeasuredParts, PartTimes
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.op_recorder import (
    MOST_OPERATORS,
    Operator,
    Part,
    PartRecord,
    PassRecord,
    Recorder,
    TooManyOperators,
)
from plugins.hybrid_parallel.planner.proxy_model import (
    LayerList,
    Packing,
    QuantisedBase,
    batch_of,
    build_proxy_model,
    give_memory,
    quiet,
    training_loss,
    watch_layers,
)
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.zero.stage3 import is_sharded
from shardformer.layers.experts import expert_modules
from shardformer.matmul.kernel import planned_for
from shardformer.peft import model_inside
from shardformer.shard_spec import grad_group_of, spec_of

_SHORT = 8, 16  # sample lengths in tokens at which any model is profiled within seconds


@dataclass(frozen=True)
class PartCost:
    """Cost of one part, for one micro-batch size."""

    # forward, backward: seconds of computation
    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0  # seconds of the backward pass spent on weight gradients of matrices, which can be deferred
    # forward_talk, backward_talk: seconds of collectives over the tensor-parallel ranks
    forward_talk: float = 0.0
    backward_talk: float = 0.0
    flops: float = 0.0  # FLOPs of the forward pass
    routed: float = 0.0  # bytes of the tokens of all choices of experts
    rounded: float = 0.0  # bytes of weights in FP8, which stay for a step, whatever the micro-batch
    saved: float = 0.0  # bytes saved for the backward pass
    # again, again_talk: the part of `forward` and `forward_talk` that recomputation by operators repeats
    again: float = 0.0
    again_talk: float = 0.0
    results: float = 0.0  # bytes that it saves besides the input
    deferred: float = 0.0  # bytes that the first half of a split backward pass leaves to the second
    output: float = 0.0  # bytes of the hidden state that the part returns
    # forward_peak, backward_peak: additional bytes while the part runs
    forward_peak: float = 0.0
    backward_peak: float = 0.0

    def taking(self, times: PartTimes | None) -> PartCost:
        """Return this cost with measured times; unchanged if `times` is None."""
        if times is None:
            return self
        late = times.backward * self.weights / self.backward if self.backward else 0.0
        again = times.forward * self.again / self.forward if self.forward else 0.0
        return replace(self, forward=times.forward, backward=times.backward, weights=late, again=again)

    def mixed(self, other: PartCost, share: float) -> PartCost:
        """Interpolate linearly from this cost (`share` 0) to `other` (1), or extrapolate; values stay non-negative."""
        names = [each.name for each in fields(self)]
        return PartCost(
            **{
                name: max(0.0, getattr(self, name) + share * (getattr(other, name) - getattr(self, name)))
                for name in names
            }
        )


@dataclass(frozen=True)
class LocalParameter:
    """Shard that a rank holds of a parameter of the pruned model."""

    size: int  # number of local elements
    itemsize: int  # bytes per element in training
    trains: bool  # whether the parameter gets a gradient
    kind: tuple  # key for bucketing; parameters of different kinds are in different buckets
    is_sharded: bool = False  # whether ranks keep a shard of it under ZeRO stage 3
    is_8_bit: bool = False  # whether they gather that in 8 bit
    stored: int | None = None  # bytes of a quantised weight, with its scales; None for any other

    @property
    def axis(self) -> str:
        """Mesh axis over which it is cut."""
        return self.kind[-1]

    @property
    def bytes(self) -> int:
        """Bytes of the parameter."""
        return self.size * self.itemsize if self.stored is None else self.stored

    def numel(self) -> int:
        """Return the number of local elements."""
        return self.size


@dataclass(frozen=True)
class Profile:
    """Costs of all parts of a model."""

    rows: tuple[int, int]  # two micro-batch sizes
    # cost of each part for these two sizes; for other sizes costs are linear in the micro-batch size
    costs: tuple[Mapping[Part, PartCost], Mapping[Part, PartCost]]
    parameters: Mapping[str, LocalParameter]  # name in the pruned model -> shard that this rank holds
    buffer_bytes: int  # bytes of the buffers of the pruned model
    records: tuple[Mapping[Part, PartRecord], ...] = ()  # what costs were derived from

    def at(self, rows: float) -> dict[Part, PartCost]:
        """Return the costs for micro-batches of `rows` samples."""
        (few, many), (one, two) = self.rows, self.costs
        return {part: one[part].mixed(two[part], (rows - few) / (many - few)) for part in one}


@dataclass(frozen=True, eq=False)
class Profiler:
    """Profiler of a model under different ways of sharding its layers."""

    build: Callable[[], nn.Module]  # builds the whole model; called on the meta device
    length: int  # tokens of a sample
    device: Device  # the device to predict times for
    precision: str  # training precision
    rows: tuple[int, int] = (1, 2)  # the two micro-batch sizes that are profiled
    # measured times of the parts; times of missing cases are derived from the operators
    measured: Mapping[Case, MeasuredParts] = field(default_factory=dict)
    quantised: QuantisedBase | None = None  # how the base is stored; None if it is not quantised
    quantised_names: frozenset[str] = frozenset()  # the quantised weights, by their names in the pruned model
    packing: Packing | None = None  # the documents of packed rows; None for one document in each sample
    kernels: tuple[str, ...] = ()  # switches of the plugin that layers are built with, such as `tiled_mlp`

    def profile(self, tp_size: int, sequence: bool) -> Profile:
        """Profile rank 0 of `tp_size`, or refuse it; `sequence`: whether activations are sharded along it."""
        with fake_rank(0, tp_size):
            with _device_like(self.device.name):
                model, lists, wrapped = build_proxy_model(self.build, self._config(tp_size, sequence))
            local = self._locals(model)
            buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
            with _mistakes_of(type(model).__name__, self.length):
                records = tuple(record(wrapped, lists, self.rows, self.length, self.device.name))
        return Profile(self.rows, self._costs(records, local, tp_size, sequence), local, buffers, records)

    def with_shared_experts(self, whole: Profile, tp_size: int, sequence: bool, ep_size: int) -> Profile:
        """Return a profile of ranks that share experts, whose tokens come from all: passes read fewer weights.

        They are not run, for they would read values.
        """
        with fake_rank(0, tp_size * ep_size), _device_like(self.device.name):
            model, _, _ = build_proxy_model(self.build, self._config(tp_size, sequence, ep_size))
            parameters = self._locals(model)
        costs = self._costs(whole.records, whole.parameters, tp_size, sequence, ep_size)
        return replace(whole, costs=costs, parameters=parameters)

    def _costs(
        self,
        records: Sequence[Mapping[Part, PartRecord]],
        local: Mapping[str, LocalParameter],
        tp_size: int,
        sequence: bool,
        ep_size: int = 1,
    ) -> tuple[Mapping[Part, PartCost], Mapping[Part, PartCost]]:
        link = self.device.ring(tp_size, 1)
        parts = sorted(set(records[0]) | set(records[1]), key=str)
        costs = tuple(
            {part: self._cost(each.get(part, PartRecord()), link, tp_size, ep_size) for part in parts}
            for each in records
        )
        taken = [self.measured.get(Case(tp_size, sequence, rows)) for rows in self.rows]
        if None not in taken:
            costs = tuple(
                {part: cost.taking(each.parts.get(part)) for part, cost in found.items()}
                for found, each in zip(costs, taken, strict=True)
            )
        costs = tuple(self._with_dequantised(found, local) for found in costs)
        return tuple(self._with_masks(found, rows) for found, rows in zip(costs, self.rows, strict=True))

    def _config(self, tp_size: int, sequence: bool, ep_size: int = 1) -> HybridParallelConfig:
        return HybridParallelConfig.from_options(
            tp_size=tp_size,
            ep_size=ep_size,
            enable_sequence_parallelism=sequence,
            precision=self.precision,
            nonfinite="ignore",
            **dict.fromkeys(self.kernels, True),
        )

    def _locals(self, model: nn.Module) -> dict[str, LocalParameter]:
        named = model_inside(model).named_parameters(remove_duplicate=False)
        in_8_bit = {module.weight for module in model.modules() if reads_rounded(module)}
        return {name: replace(self._local(name, each), is_8_bit=each in in_8_bit) for name, each in named}

    def _local(self, name: str, param: nn.Parameter) -> LocalParameter:
        found = _local(param)
        if name not in self.quantised_names:
            return found
        return replace(found, stored=self.quantised.stored_bytes(param.numel(), param.shape[0]), is_sharded=False)

    def _with_dequantised(
        self, costs: Mapping[Part, PartCost], local: Mapping[str, LocalParameter]
    ) -> dict[Part, PartCost]:
        """Add the temporary memory of layers that dequantise one weight after the other in both passes."""
        weights = [each.size * each.itemsize for each in local.values() if each.stored is not None]
        largest = max(weights, default=0)
        return {
            part: replace(cost, forward_peak=cost.forward_peak + largest, backward_peak=cost.backward_peak + largest)
            for part, cost in costs.items()
        }

    def _with_masks(self, costs: Mapping[Part, PartCost], rows: int) -> dict[Part, PartCost]:
        """Add the masks of packed rows, which are made before the first layer, and saved by every layer."""
        if self.packing is None:
            return dict(costs)
        mask, saved = self.packing.mask_bytes(rows, 4 if self.precision == "fp32" else 2)
        return {
            part: replace(cost, saved=cost.saved + (saved if part[0] == "layer" else mask if part[1] == 0 else 0))
            for part, cost in costs.items()
        }

    def _cost(self, record: PartRecord, link: Any, tp_size: int, ep_size: int) -> PartCost:
        forward, backward = (
            replace(each, operators=[_of_rank(operator, ep_size) for operator in each.operators])
            for each in (record.forward, record.backward)
        )
        matmuls = [each for each in forward.operators if each.kind == "matmul"]
        return PartCost(
            forward=self._seconds(forward.operators),
            backward=self._seconds(backward.operators),
            # The gradient of a matrix is a matmul of the same size as the one in the forward pass. A head that computes
            # its gradients in the forward pass (`early`) has two more matmuls there; together they cancel the gradient
            # matmul that is then not deferred.
            weights=max(0.0, sum(self._operator(each) * (-0.5 if each.early else 1.0) for each in matmuls)),
            forward_talk=_talk(forward, link, tp_size),
            backward_talk=_talk(backward, link, tp_size),
            flops=sum(self._useful(each) for each in forward.operators if not each.early),
            routed=record.routed,
            rounded=record.rounded,
            saved=record.saved,
            again=self._seconds([each for each in forward.operators if not each.is_saved]),
            # Sums over ranks belong to products, whose results are saved.
            again_talk=_talk(forward, link, tp_size, without=("all_reduce", "reduce_scatter")),
            results=record.results,
            deferred=record.deferred,
            output=record.output,
            forward_peak=forward.peak,
            backward_peak=backward.peak,
        )

    def _seconds(self, operators: Sequence[Operator]) -> float:
        # Kernel launches are serial and overlap with execution, so the slower of the two determines the time.
        return max(sum(map(self._operator, operators)), len(operators) * self.device.operator)

    def _useful(self, operator: Operator) -> float:
        return operator.flops if self.packing is None else self.packing.useful(operator)

    def _operator(self, operator: Operator) -> float:
        if self.packing is not None:
            operator = self.packing.executed(operator)
        memory = operator.bytes / self.device.bandwidth
        if operator.kind == "matmul":
            peak = self.device.flops["fp8"] if operator.is_8_bit else self.device.peak(self.precision)
            return self.device.matmul_seconds(operator.flops, operator.bytes, peak)
        if operator.kind == "attention":
            peak = self.device.peak(self.precision) * self.device.attention_efficiency
            return max(operator.flops / peak, memory)
        return memory * self.device.elementwise


def _of_rank(operator: Operator, ep_size: int) -> Operator:
    return replace(operator, bytes=operator.bytes - operator.of_experts * (1 - 1 / ep_size))


def _talk(record: PassRecord, link: Any, ranks: int, without: tuple[str, ...] = ()) -> float:
    return sum(link.collective(kind, size, ranks) for kind, size in record.collectives if kind not in without)


def record(
    wrapped: HybridParallelModel, lists: Sequence[LayerList], rows: Sequence[int], length: int, device: str
) -> list[dict[Part, PartRecord]]:
    """Record a forward and a backward pass on fake tensors, by part, for each micro-batch size.

    Args:
        length: tokens of a sample.
        device: name of the device, which decides how attention and loss run.

    Returns:
        For each micro-batch size, part -> its record.

    Raises:
        TooManyOperators: recording would take too long.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # One mode for all passes: tensors of another fake mode would be copied.
    with FakeTensorMode(allow_non_fake_inputs=True), quiet(), _device_like(device), _one_text_a_row():
        give_memory(wrapped.unwrap())

        def look(count: int, length: int, is_limited: bool = True) -> Recorder:
            return _record(wrapped, lists, batch_of(wrapped.unwrap(), count, length), is_limited)

        try:
            return [look(count, length).parts for count in rows]
        except TooManyOperators:
            few, many = (look(1, short).num_operators for short in _SHORT)
            if many > few:
                raise _too_long(type(wrapped.unwrap()).__name__, length, few, many) from None
            # Long rows in tiles have many operators, too, but not as many as tokens.
            return [look(count, length, is_limited=False).parts for count in rows]


def _too_long(name: str, length: int, few: int, many: int) -> TooManyOperators:
    """Make the error for samples of `length` tokens, given the operator counts of two short samples."""
    a_token = (many - few) / (_SHORT[1] - _SHORT[0])
    longest = _SHORT[0] + max(0, int((MOST_OPERATORS - few) / a_token))
    return TooManyOperators(
        f"{name} runs its tokens one after the other, {a_token:,.0f} operators for each: samples of {length} tokens "
        f"would take too long to look at; plan for {longest} tokens or fewer"
    )


def _record(
    wrapped: HybridParallelModel, lists: Sequence[LayerList], batch: dict[str, Tensor], is_limited: bool
) -> Recorder:
    module = wrapped.unwrap()
    recorder = Recorder(list(module.parameters()), is_limited)
    hooks = watch_layers(module, lists, recorder)
    hooks += [experts.register_forward_pre_hook(recorder.route) for _, experts in expert_modules(module)]
    # In training a gradient moves to its bucket as soon as it is complete, so it is not counted here.
    trained = [param for param in module.parameters() if param.requires_grad]
    hooks += [param.register_post_accumulate_grad_hook(_forget_gradient) for param in trained]
    try:
        with weights_rounded_once(module), recorder:
            with recorder.saving():
                loss = training_loss(wrapped, batch)
            recorder.turn()
            loss.backward()
            recorder.enter(recorder.part)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder


@contextmanager
def _mistakes_of(name: str, length: int) -> Iterator[None]:
    """Turn any exception of the model into a `ConfigurationError`: models fail with arbitrary exception types."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigurationError(
            f"{name} cannot be profiled with samples of {length} tokens ({reason}); use another length or head"
        ) from error


def _forget_gradient(param: nn.Parameter) -> None:
    param.grad = None


def _local(param: nn.Parameter) -> LocalParameter:
    return LocalParameter(
        size=param.numel(),
        itemsize=param.element_size(),
        trains=param.requires_grad,
        kind=(grad_group_of(param) is not None, spec_of(param).is_owner, spec_of(param).axis),
        is_sharded=is_sharded(param),
    )


@contextmanager
def _one_text_a_row() -> Iterator[None]:
    """Disable transformers' check for packed sequences, which reads values that fake tensors do not have."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    native = getattr(masking_utils, name)
    setattr(masking_utils, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, native)


@contextmanager
def _device_like(device: str) -> Iterator[None]:
    """Run losses, rounding and attention as on `device`.

    Kernels of GPUs save no scores for dropout, so that it is disabled, nor for values of another width than keys.
    """
    if device == "this-machine" and not torch.cuda.is_available():
        with planned_for("cpu"):
            yield
        return
    native = F.scaled_dot_product_attention

    def as_on_gpus(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        kwargs["dropout_p"] = 0.0
        if query.shape[-1] == value.shape[-1] or attn_mask is not None or kwargs.get("enable_gqa") or args:
            return native(query, key, value, attn_mask, *args, **kwargs)
        causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, None, torch.is_grad_enabled(), 0.0, causal, scale=scale)[0]

    F.scaled_dot_product_attention = as_on_gpus
    try:
        with planned_for("cuda"):
            yield
    finally:
        F.scaled_dot_product_attention = native
