"""What each part of a model costs a rank, for one way of cutting its layers, by size of a micro-batch."""

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
from plugins.hybrid_parallel.inspect.shard_report import playing
from plugins.hybrid_parallel.planner.device import Device
from plugins.hybrid_parallel.planner.kernel_timing import Case, MeasuredParts, PartTimes
from plugins.hybrid_parallel.planner.op_recorder import (
    MOST_OPERATORS,
    Operator,
    Part,
    PartRecord,
    PassRecord,
    Recorder,
    TooManyOperators,
)
from plugins.hybrid_parallel.planner.proxy_model import give_memory, quiet, skeleton, training_loss, watch_layers
from plugins.hybrid_parallel.planner.pruned_model import LayerList
from plugins.hybrid_parallel.planner.synthetic_batch import batch_of
from shardformer.cross_entropy.chunking import planned_for
from shardformer.shard_spec import grad_group_of, spec_of

_SHORT = 8, 16  # tokens of samples that any model is looked at with in seconds


@dataclass(frozen=True)
class PartCost:
    """One part, for one size of a micro-batch.

    Attributes:
        forward, backward: seconds of computing.
        weights: seconds of the backward pass that are gradients of matrices, which may be put off.
        forward_talk, backward_talk: seconds of collectives over the tensor-parallel ranks.
        flops: of the forward pass.
        saved: bytes kept for the backward pass.
        output: bytes of the hidden state behind it.
        forward_peak, backward_peak: further bytes while it runs.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    forward_talk: float = 0.0
    backward_talk: float = 0.0
    flops: float = 0.0
    saved: float = 0.0
    output: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0

    def taking(self, times: PartTimes | None) -> PartCost:
        """The same with measured seconds."""
        if times is None:
            return self
        late = times.backward * self.weights / self.backward if self.backward else 0.0
        return replace(self, forward=times.forward, backward=times.backward, weights=late)

    def mixed(self, other: PartCost, share: float) -> PartCost:
        """This and `share` times the way from here to `other`."""
        names = [each.name for each in fields(self)]
        return PartCost(
            **{
                name: max(0.0, getattr(self, name) + share * (getattr(other, name) - getattr(self, name)))
                for name in names
            }
        )


@dataclass(frozen=True)
class LocalParameter:
    """What a rank has of a parameter of the skeleton.

    Attributes:
        size: elements here.
        itemsize: bytes of one in training.
        trains: whether it has a gradient.
        kind: parameters of different kinds are in different buckets.
    """

    size: int
    itemsize: int
    trains: bool
    kind: tuple

    def numel(self) -> int:
        """Elements here."""
        return self.size


@dataclass(frozen=True)
class Profile:
    """All parts.

    Attributes:
        rows: two sizes of a micro-batch.
        costs: for these: all costs are straight lines in between and beyond.
        parameters: name in the skeleton -> what this rank has of it.
        buffer_bytes: of the skeleton.
    """

    rows: tuple[int, int]
    costs: tuple[Mapping[Part, PartCost], Mapping[Part, PartCost]]
    parameters: Mapping[str, LocalParameter]
    buffer_bytes: int

    def at(self, rows: int) -> dict[Part, PartCost]:
        """The costs of micro-batches of `rows` samples."""
        (few, many), (one, two) = self.rows, self.costs
        return {part: one[part].mixed(two[part], (rows - few) / (many - few)) for part in one}


@dataclass(frozen=True, eq=False)
class Profiler:
    """Looks at a model under different layouts.

    Attributes:
        build: makes the whole model; called on the meta device.
        length: tokens of a sample.
        device: what it would run on.
        precision: that it would be trained in.
        rows: the sizes of micro-batches that are looked at.
        measured: what passes took on the device; where there is nothing, it is worked out from their operators.
    """

    build: Callable[[], nn.Module]
    length: int
    device: Device
    precision: str
    rows: tuple[int, int] = (1, 2)
    measured: Mapping[Case, MeasuredParts] = field(default_factory=dict)

    def profile(self, tp_size: int, sequence: bool) -> Profile:
        """The costs of rank 0 of `tp_size`.

        Raises:
            ConfigurationError: the model cannot be cut like this.
        """
        config = HybridParallelConfig(
            tp_size=tp_size, enable_sequence_parallelism=sequence, precision=self.precision, nonfinite="ignore"
        )
        with playing(0, tp_size):
            model, lists, wrapped = skeleton(self.build, config)
            local = {name: _local(param) for name, param in model.named_parameters(remove_duplicate=False)}
            buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
            link = self.device.link(tp_size - 1)
            with _mistakes_of(type(model).__name__, self.length):
                records = record(wrapped, lists, self.rows, self.length, self.device.name)
        parts = sorted(set(records[0]) | set(records[1]), key=str)
        costs = tuple(
            {part: self._cost(each.get(part, PartRecord()), link, tp_size) for part in parts} for each in records
        )
        taken = [self.measured.get(Case(tp_size, sequence, rows)) for rows in self.rows]
        if None not in taken:
            costs = tuple(
                {part: cost.taking(each.parts.get(part)) for part, cost in found.items()}
                for found, each in zip(costs, taken, strict=True)
            )
        return Profile(self.rows, costs, local, buffers)

    def _cost(self, record: PartRecord, link: Any, tp_size: int) -> PartCost:
        forward, backward = record.forward, record.backward
        matmuls = [each for each in forward.operators if each.kind == "matmul"]
        return PartCost(
            forward=self._seconds(forward.operators),
            backward=self._seconds(backward.operators),
            # A matrix's gradient is a product of the size of the one in the forward pass; a head that found its own
            # there has two products more, for one that is not put off.
            weights=max(0.0, sum(self._operator(each) * (-0.5 if each.early else 1.0) for each in matmuls)),
            forward_talk=_talk(forward, link, tp_size),
            backward_talk=_talk(backward, link, tp_size),
            flops=sum(each.flops for each in forward.operators if not each.early),
            saved=record.saved,
            output=record.output,
            forward_peak=forward.peak,
            backward_peak=backward.peak,
        )

    def _seconds(self, operators: Sequence[Operator]) -> float:
        # Python launches one after the other, while the device works on those before.
        return max(sum(map(self._operator, operators)), len(operators) * self.device.operator)

    def _operator(self, operator: Operator) -> float:
        memory = operator.bytes / self.device.bandwidth
        if operator.kind == "matmul":
            return self.device.matmul_seconds(operator.flops, operator.bytes, self.precision)
        if operator.kind == "attention":
            peak = self.device.flops[self.precision] * self.device.attention_efficiency
            return max(operator.flops / peak, memory)
        return memory * self.device.elementwise


def _talk(record: PassRecord, link: Any, ranks: int) -> float:
    return sum(link.collective(kind, size, ranks) for kind, size in record.collectives)


def record(
    wrapped: HybridParallelModel, lists: Sequence[LayerList], rows: Sequence[int], length: int, device: str
) -> list[dict[Part, PartRecord]]:
    """For each number of samples a forward and a backward pass on fake tensors, by part.

    Raises:
        TooManyOperators: it would take too long.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # One mode for all: tensors of another are copied.
    with FakeTensorMode(allow_non_fake_inputs=True), quiet(), _device_like(device), _one_text_a_row():
        give_memory(wrapped.unwrap())

        def look(count: int, length: int) -> Recorder:
            return _record(wrapped, lists, batch_of(wrapped.unwrap(), count, length))

        try:
            return [look(count, length).parts for count in rows]
        except TooManyOperators:
            few, many = (look(1, short).num_operators for short in _SHORT)
            raise _too_long(type(wrapped.unwrap()).__name__, length, few, many) from None


def _too_long(name: str, length: int, few: int, many: int) -> TooManyOperators:
    """The mistake of samples of `length` tokens, from the numbers of operators of two short ones."""
    a_token = max(1.0, (many - few) / (_SHORT[1] - _SHORT[0]))
    longest = _SHORT[0] + max(0, int((MOST_OPERATORS - few) / a_token))
    return TooManyOperators(
        f"{name} runs its tokens one after the other, {a_token:,.0f} operators for each: samples of {length} tokens "
        f"would take too long to look at; plan for {longest} tokens or fewer"
    )


def _record(wrapped: HybridParallelModel, lists: Sequence[LayerList], batch: dict[str, Tensor]) -> Recorder:
    module = wrapped.unwrap()
    recorder = Recorder(list(module.parameters()))
    hooks = watch_layers(module, lists, recorder)
    # A gradient goes to its bucket as soon as it is complete.
    trained = [param for param in module.parameters() if param.requires_grad]
    hooks += [param.register_post_accumulate_grad_hook(_forget_gradient) for param in trained]
    try:
        with recorder:
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
    """A model that cannot be run like this says so in a thousand ways."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigurationError(
            f"{name} cannot be looked at with samples of {length} tokens ({reason}); use another length or head"
        ) from error


def _forget_gradient(param: nn.Parameter) -> None:
    param.grad = None


def _local(param: nn.Parameter) -> LocalParameter:
    return LocalParameter(
        size=param.numel(),
        itemsize=param.element_size(),
        trains=param.requires_grad,
        kind=(grad_group_of(param) is not None, spec_of(param).is_owner),
    )


@contextmanager
def _one_text_a_row() -> Iterator[None]:
    """transformers looks at values to see whether rows are several texts, and has none here."""
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
    """Chunks of a loss and attention as on `device`: on a GPU dropout takes no kernel that keeps all scores."""
    if device == "this-machine" and not torch.cuda.is_available():
        with planned_for("cpu"):
            yield
        return
    native = F.scaled_dot_product_attention

    def without_dropout(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        return native(*args, dropout_p=0.0, **kwargs)

    F.scaled_dot_product_attention = without_dropout
    try:
        with planned_for("cuda"):
            yield
    finally:
        F.scaled_dot_product_attention = native
