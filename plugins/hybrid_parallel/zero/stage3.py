"""ZeRO stage 3: ranks keep a shard of the parameters, and have the whole only while layers use them.

The parameters of a layer are gathered together, others with the module that has them. Small ones stay whole: a
collective would cost more than their memory. Of quantised weights the packed values and the scales of blocks are
sharded, as bytes that each rank has a range of.

The whole is flat memory of which the parameters are views. It is given back by shrinking its storage to nothing, and
filled again in the same storage: views that autograd has saved stay valid.

In a backward pass a module's values are needed from the first gradient of its outputs to the last of its inputs (as in
FSDP2). Where autograd computes no gradient of the inputs, they stay until the pass ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.zero.bucket_layout import (
    BucketOptions,
    Source,
    hide_values,
    places_in_bucket,
    show_values,
    take_source,
)
from plugins.hybrid_parallel.zero.collectives.backend import AllGatherHandle, ZeroCollectives
from shardformer.matmul.quantised import QuantisedWeight, packed_layers
from shardformer.shard_spec import spec_of
from shardformer.utils.freed_memory import return_freed_memory
from shardformer.utils.untraced import current_pass, in_backward, untraced

# Parameters with fewer values, and vectors, stay whole.
_LEAST = 512


def is_sharded(param: nn.Parameter) -> bool:
    """Return whether ranks keep only a shard of a parameter under stage 3."""
    is_plain = type(param.data) is Tensor and param.is_floating_point()
    return is_plain and param.dim() >= 2 and param.numel() >= _LEAST


@dataclass(frozen=True)
class ParameterSlice:
    """The part of one parameter that is in a rank's shard."""

    # start, stop: range in the flattened parameter; empty if there is none
    start: int
    stop: int
    place: slice  # range in the shard


class ShardedParameters:
    """Parameters whose values ranks gather before use, and release after.

    The parameters become views of the whole, without values; who makes this fills `shard`.

    Args:
        size: elements of the whole.
        options: the options of their buckets: of the ranks that share the values.

    Attributes:
        flat: [ranks * shard], the whole; of no bytes while it is released.
        shard: [shard], this rank's values; zeros at first.
        rank: this rank's position among those that share the values.
        on_demand: called with the operation that reads released values; gathers them or refuses. None at first.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], offsets: Sequence[int], size: int, options: BucketOptions
    ) -> None:
        dtype, device = params[0].dtype, params[0].device
        self.params, self.options = list(params), options
        self.exchange, self.rank = options.exchange, options.shard_index
        self.flat = torch.empty(size, dtype=dtype, device=device)
        self._bytes = size * dtype.itemsize
        for param, offset in zip(params, offsets, strict=True):
            param.data = self.flat[offset : offset + param.numel()].view(param.shape)
        self.flat.untyped_storage().resize_(0)
        self.shard = self.exchange.empty_shard(size // options.num_shards, dtype, device)
        self._handle: AllGatherHandle | None = None
        self.is_gathered = True  # until the first release
        self.on_demand: Callable[[str], None] | None = None

    def start_use(self) -> None:
        """Start to gather what layers read."""
        self.start()

    def use(self) -> None:
        """Wait until layers can read; other code may read the values then, or gathers them on demand."""
        self.gather()

    def start(self) -> None:
        """Start to gather the values."""
        if self.is_gathered or self._handle is not None:
            return
        self.exchange.await_update()
        self.flat.untyped_storage().resize_(self._bytes)
        with torch.no_grad():
            self._handle = self.exchange.gather_shard(self.shard, self.flat)

    def gather(self) -> None:
        """Wait until this rank has all values."""
        if self.is_gathered:
            return
        self.start()
        with torch.no_grad():
            self._handle.wait()
        self._handle, self.is_gathered = None, True
        self.page_out()
        for param in self.params:
            show_values(param)

    def read_ahead(self) -> None:
        """Start to bring this rank's shard near, if it is offloaded and is needed for the next gather."""
        if not self.is_gathered and self.exchange.shard_memory is not None:
            self.exchange.shard_memory.read_ahead(self.shard)

    def page_out(self) -> None:
        """Let this rank's shard go until it is used again, if it is offloaded."""
        if self.exchange.shard_memory is not None:
            self.exchange.shard_memory.page_out(self.shard)

    def release(self) -> None:
        """Give the memory of the whole back; values that were changed in place are lost."""
        if self._handle is not None:
            self.gather()
        if self.is_gathered:
            if not self.flat.untyped_storage().resizable():
                self._move()
            self.is_gathered = False
            for param in self.params:
                hide_values(param, self)
            self.flat.untyped_storage().resize_(0)

    def _move(self) -> None:
        """Take other memory: code outside of torch, such as numpy, may still read this one."""
        self.flat = torch.empty_like(self.flat)
        for param in self.params:
            start = param.storage_offset()
            param.data = self.flat[start : start + param.numel()].view(param.shape)

    def dissolve(self) -> None:
        """Give the parameters whole values of their own."""
        self.gather()
        for param in self.params:
            param.data = param.data.clone()

    @torch.no_grad()
    def take_changed_values(self) -> None:
        """Take this rank's part of gathered values that were changed in place."""
        self.shard.copy_(self.flat.view(-1, len(self.shard))[self.rank])
        self.page_out()

    def slice_on(self, rank: int, param: nn.Parameter) -> ParameterSlice:
        """Return which part of a parameter is in the shard of a rank among those that share the values."""
        size, offset = len(self.shard), param.storage_offset()
        start = max(0, rank * size - offset)
        stop = max(start, min(param.numel(), (rank + 1) * size - offset))
        first = offset + start - rank * size
        return ParameterSlice(start, stop, slice(first, first + stop - start))

    def own_slice(self, param: nn.Parameter) -> tuple[int, int, Tensor]:
        """Return start and stop of this rank's part of a flattened parameter, and its values, a view of the shard."""
        own = self.slice_on(self.rank, param)
        return own.start, own.stop, self.shard[own.place]

    @torch.no_grad()
    def fill(self, param: nn.Parameter, source: Source) -> None:
        """Copy this rank's part of the values of a parameter, which are not asked for if it has none."""
        start, stop, values = self.own_slice(param)
        if start < stop:
            values.copy_(source().reshape(-1)[start:stop])

    @classmethod
    def of_frozen(
        cls, params: Sequence[nn.Parameter], options: BucketOptions, initial: dict[nn.Parameter, Source]
    ) -> ShardedParameters:
        """Shard parameters that are not trained; the sources that are used are removed from `initial`."""
        sources = [take_source(param, initial) for param in params]
        offsets, size = places_in_bucket([param.numel() for param in params], options.num_shards, False)
        made = cls(params, offsets, size, options)
        for param, source in zip(params, sources, strict=True):
            made.fill(param, source)
        made.page_out()
        return made

    def demand(self, operation: str) -> None:
        """Gather the values for an operation that reads them, or refuse it."""
        if self.on_demand is not None:
            self.on_demand(operation)
        self.gather()


def kind_of(param: Tensor) -> type[ShardedParameters]:
    """Return the class that shards and gathers a parameter, which a feature may have set as `sharded_as`."""
    return getattr(param, "sharded_as", ShardedParameters)


@dataclass(eq=False)
class GatherUnit:
    """Parameters that are gathered together, all of one kind."""

    number: int  # position in the model, the same on all replicas
    members: list[ShardedParameters] = field(default_factory=list)  # their memory
    # next, next_back: the units that a forward and a backward pass used after this one the last time
    next: GatherUnit | None = None
    next_back: GatherUnit | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherUnit:
        """Return a unit without members: copies of a model have whole parameters."""
        return GatherUnit(self.number)

    def start(self) -> None:
        """Start to gather what layers read."""
        for member in self.members:
            member.start_use()

    def read_ahead(self) -> None:
        """Start to bring this rank's shards near, if they are offloaded."""
        for member in self.members:
            member.read_ahead()

    def gather(self) -> None:
        """Gather what layers read."""
        self.start()
        for member in self.members:
            member.use()

    def release(self) -> None:
        """Give the memory of the values back."""
        for member in self.members:
            member.release()


class GatherUnits:
    """The units of a model's parameters.

    Attributes:
        of_parameter: parameter, or packed values of one, -> its unit.
        of_module: module -> the units that its forward pass needs.
    """

    def __init__(self) -> None:
        self.of_parameter: dict[Tensor, GatherUnit] = {}
        self.of_module: dict[nn.Module, dict[GatherUnit, None]] = {}
        self._of_owner: dict[tuple[nn.Module, type[ShardedParameters]], GatherUnit] = {}
        self._packed: dict[Tensor, tuple[nn.Module, QuantisedWeight]] = {}

    def add(self, model: nn.Module) -> None:
        """Add the parameters of a model, or of one of its stages: one unit for each element of its lists of layers.

        The model itself gets no hooks, which could change its loss: its own parameters are gathered when they are read.
        """
        quantised = dict(packed_layers(model))
        for module, owner in owners_of(model):
            tensors: list[Tensor] = [each for each in module._parameters.values() if each is not None]
            tensors = [param for param in tensors if is_sharded(param)]
            if module in quantised:
                packed = [each for each in quantised[module].packed(module) if each.numel() >= _LEAST]
                self._packed |= dict.fromkeys(packed, (module, quantised[module]))
                tensors += packed
            for tensor in tensors:
                if tensor not in self.of_parameter:
                    unit = self._of_owner.setdefault((owner, kind_of(tensor)), GatherUnit(len(self._of_owner)))
                    self.of_parameter[tensor] = unit
                if owner is not model:
                    self.of_module.setdefault(owner, {})[self.of_parameter[tensor]] = None

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Let quantised layers follow their packed values to other memory."""
        for tensor in tensors:
            if tensor in self._packed:
                module, kind = self._packed[tensor]
                kind.follow(module)


def owners_of(module: nn.Module, layer: nn.Module | None = None) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module and the module whose forward pass uses its parameters: its layer, or itself."""
    yield module, layer or module
    for child in module.children():
        yield from owners_of(child, child if layer is None and isinstance(module, nn.ModuleList) else layer)


class ParameterGathers:
    """Gathers and releases the parameters of one model.

    Attributes:
        prefetches: whether the next unit is gathered while this one is used.
    """

    def __init__(self) -> None:
        self.units = GatherUnits()
        self.prefetches = True
        self._pinned: set[GatherUnit] = set()  # read outside of their modules by passes that have yet to go back
        self._kept: set[GatherUnit] = set()  # used by passes of some replicas alone
        self._uses = Counter[GatherUnit]()  # begun in the backward pass: a layer may have several places in a model
        self._depth = 0
        self._latest: tuple[bool, GatherUnit | None] = (False, None)  # in a backward pass?, unit

    def __bool__(self) -> bool:
        return any(unit.members for unit in self.units.of_parameter.values())

    @property
    def members(self) -> list[ShardedParameters]:
        """What gathers the parameters of each bucket."""
        return [member for unit in self._all() for member in unit.members]

    @property
    def shards(self) -> list[Tensor]:
        """What this rank keeps of the sharded parameters: one flat tensor for each of their buckets."""
        return [member.shard for member in self.members]

    def holder(self, param: Tensor) -> ShardedParameters | None:
        """Return what has a shard of a parameter; None for a tensor that is whole at present."""
        unit = self.units.of_parameter.get(param)
        for member in [] if unit is None else unit.members:
            if not member.is_gathered and any(param is each for each in member.params):
                return member
        return None

    def own(self, params: Sequence[nn.Parameter], member: ShardedParameters) -> None:
        """Take over parameters of one unit, and release them."""
        unit = self.units.of_parameter[params[0]]
        unit.members.append(member)
        self.prefetches = self.prefetches and member.exchange.gathers_ahead
        member.on_demand = partial(self._demand, unit)
        member.release()

    def shard_frozen(self, options: Mapping[str, BucketOptions], initial: dict[nn.Parameter, Source]) -> None:
        """Shard what no optimizer trains; `options`: of each axis; `initial`: sources of values, used ones removed."""
        taken = {param for member in self.members for param in member.params}
        kinds: dict[tuple, list[nn.Parameter]] = {}
        for param, unit in self.units.of_parameter.items():
            axis = spec_of(param).axis
            if param not in taken and options[axis].shards_parameters:
                kinds.setdefault((unit, param.dtype, axis), []).append(param)
        for (_, _, axis), params in kinds.items():
            member = kind_of(params[0]).of_frozen(params, options[axis], initial)
            self.units.follow(params)
            self.own(params, member)
            return_freed_memory()  # of the parameters that are sharded now

    def dissolve(self, params: Set[nn.Parameter]) -> None:
        """Make parameters whole that are to be sharded in another way, with those in the same memory."""
        for unit in self._all():
            for member in [each for each in unit.members if not params.isdisjoint(each.params)]:
                member.dissolve()
                unit.members.remove(member)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterGathers:
        """Return gathers of nothing: copies of a model have whole parameters."""
        return ParameterGathers()

    def attach(self) -> None:
        """Register the hooks of modules, and tell the other ranks, which read it, that this rank's shard is filled."""
        for exchange in self._exchanges:
            exchange.end_update()
        for module, units in self.units.of_module.items():
            held = [unit for unit in units if unit.members]
            if held:
                module.register_forward_pre_hook(partial(self._before_forward, held), prepend=True, with_kwargs=True)
                module.register_forward_hook(partial(self._after_forward, held), with_kwargs=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Accept in this context that operations read released parameters, and release all at its end."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                if not torch.is_grad_enabled():  # no backward pass follows
                    self._kept.clear()
                self.release_all()

    def keep_all_but(self, params: Set[Tensor]) -> None:
        """Gather all other parameters until the passes of the step are over; all replicas must call this.

        It is for replicas whose passes use other modules: what only some of them use, none gathers by itself.

        Args:
            params: the parameters that the passes of all replicas use, in the same order.
        """
        self._kept.update(unit for param, unit in self.units.of_parameter.items() if param not in params)
        for unit in self._all():
            if unit in self._kept:
                unit.gather()

    @contextmanager
    def whole(self, keeps_changes: bool = False, params: Set[Tensor] | None = None) -> Iterator[None]:
        """Have parameters whole in this context; all replicas must enter it.

        Args:
            keeps_changes: whether values that are changed in place stay so.
            params: the parameters, and those in the same memory become whole; None for all.
        """
        members = [member for member in self.members if not member.is_gathered]
        if params is not None:
            members = [member for member in members if not params.isdisjoint(member.params)]
        with self.running():
            for member in members:
                member.gather()
            try:
                yield
            finally:
                with self.changing() if keeps_changes else nullcontext():
                    for member in members if keeps_changes else ():
                        member.take_changed_values()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change shards in this context; all replicas must enter it, and none gathers meanwhile."""
        exchanges = self._exchanges
        for exchange in exchanges:
            exchange.begin_update()
        try:
            yield
        finally:
            for exchange in exchanges:
                exchange.end_update()

    @property
    def _exchanges(self) -> list[ZeroCollectives]:
        return list(dict.fromkeys(member.exchange for member in self.members))

    def release_all(self) -> None:
        """Release all units, also those that were gathered ahead, but none whose values autograd has saved."""
        self._latest = (False, None)
        self._uses.clear()
        self._release(self._all())

    def end_step(self) -> None:
        """Release everything: no backward pass of the step is left."""
        self._pinned.clear()
        self._kept.clear()
        self.release_all()

    def _all(self) -> dict[GatherUnit, None]:
        return dict.fromkeys(self.units.of_parameter.values())

    def _demand(self, unit: GatherUnit, operation: str) -> None:
        if self._depth == 0:
            raise ConfigurationError(
                f"{operation} reads a parameter of which zero_stage=3 keeps a part on each rank; read and change "
                "parameters in `with model.summon_full_params():`, on all ranks"
            )
        if torch.is_grad_enabled():  # no hook tells when the backward pass reads it
            self._pinned.add(unit)
        unit.gather()

    def _use(self, units: Sequence[GatherUnit], is_backward: bool) -> None:
        """Gather units in the order of use, and start the one that followed the last time."""
        if self._kept:  # replicas use other units, and gather in one order
            for unit in units:
                unit.gather()
            return
        for unit in units:
            was_backward, before = self._latest
            if before is not None and before is not unit and was_backward == is_backward:
                setattr(before, "next_back" if is_backward else "next", unit)
            self._latest = (is_backward, unit)
            unit.gather()
        ahead = unit.next_back if is_backward else unit.next
        if ahead is not None and self._depth:
            ahead.start() if self.prefetches else ahead.read_ahead()

    def _release(self, units: Iterable[GatherUnit]) -> None:
        for unit in units:
            if unit not in self._pinned | self._kept and not self._uses[unit]:
                unit.release()

    def _begin_use(self, units: Sequence[GatherUnit]) -> None:
        self._uses.update(units)
        self._use(units, True)

    def _end_use(self, units: Sequence[GatherUnit]) -> None:
        self._uses.subtract(units)
        self._release(units)

    # ----- hooks -----

    @untraced
    def _before_forward(self, units: Sequence[GatherUnit], module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._use(units, in_backward())

    @untraced
    def _after_forward(
        self, units: Sequence[GatherUnit], module: nn.Module, args: tuple, kwargs: dict, outputs: Any
    ) -> None:
        # The gradient of a lookup does not read the table.
        if torch.is_grad_enabled() and not isinstance(module, nn.Embedding):
            results, given = _differentiable(outputs), _differentiable((args, kwargs))
            if results:
                UseInBackward(partial(self._begin_use, units), partial(self._end_use, units)).watch(results, given)
            elif given or any(param.requires_grad for unit in units for each in unit.members for param in each.params):
                self._pinned.update(units)  # the results are in an object that hides them
        # Some modules return a view of their own parameter, which is read later (Perceiver's positions).
        returned = {each.untyped_storage()._cdata for each in tree_leaves(outputs) if isinstance(each, Tensor)}
        self._pinned.update(
            unit for unit in units if any(each.flat.untyped_storage()._cdata in returned for each in unit.members)
        )
        if not in_backward():  # a layer that is recomputed there is about to be used
            self._release(units)


class UseInBackward:
    """One call of a module, as a backward pass sees it.

    The hooks of tensors refer in one direction alone, that of the graph: those of results to the nodes of inputs.
    `torch.autograd.graph.register_multi_grad_hook` lets inputs refer to each other, which nothing ever frees.

    Args:
        begin: called at the first gradient of the results.
        end: called after the last gradient of the inputs.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._pass = self._left = -1  # number of the backward pass; inputs that have yet to get a gradient

    def watch(self, results: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Register the hooks, on no tensor that is an input and a result, and on none that outlives the graph."""
        given = [tensor for tensor in given if not isinstance(tensor, nn.Parameter)]
        nodes = [get_gradient_edge(tensor).node for tensor in given]
        for tensor in results:
            if not any(tensor is each for each in given):
                tensor.register_hook(lambda grad: self._reach_results(nodes))
        for tensor in given:
            tensor.register_hook(lambda grad: self._reach_input())

    def _reach_results(self, nodes: Sequence[Any]) -> None:
        if self._pass != current_pass():
            self._pass, self._left = current_pass(), sum(map(torch._C._will_engine_execute_node, nodes))
            self._begin()

    def _reach_input(self) -> None:
        if self._pass == current_pass():
            self._left -= 1
            if self._left == 0:
                self._end()


def _differentiable(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]
