"""Debug mode, which compares the state that ranks share, and the record of a pipeline's actions.

Compared are options, parameters, tied weights, rates, loss scale and random streams, by checksums. If two differ, the
ranks that share the tensor exchange it to measure the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from booster.errors import SynchronyError
from plugins.hybrid_parallel.distributed.agreement import checksum, raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import replicate_axis
from plugins.hybrid_parallel.features.feature import Feature
from plugins.hybrid_parallel.features.nonfinite import ModuleWatch
from plugins.hybrid_parallel.pipeline.timeline import ScheduleRecorder
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from shardformer.distributed.process_groups import all_gather_json, world_group
from shardformer.shard_spec import EXPERTS, TENSOR, spec_of
from shardformer.utils.module_paths import remembered

if TYPE_CHECKING:
    from plugins.hybrid_parallel.boosted.model import HybridParallelModel

# In causal order: a different learning rate leads to different parameters.
_STRUCTURE, _NUMBERS, _PARAMETERS = range(3)


@dataclass(frozen=True)
class _Shared:
    """State that several ranks must hold identically."""

    kind: int  # position in causal order; of all differences, the smallest kind is reported
    name: str  # name for messages, the same on all of these ranks
    value: Any  # a tensor, or a JSON-serializable value
    piece: int = 0  # number of the shard; ranks with another shard of the tensor have another number

    def digest(self) -> list[Any]:
        if isinstance(self.value, Tensor):
            return [self.piece, str(self.value.dtype), list(self.value.shape), checksum(self.value)]
        return [self.piece, self.value]


@dataclass(frozen=True)
class _Scope:
    """A set of ranks and the state that they share; `group` is None for all ranks."""

    words: str
    group: ProcessGroup | None
    shared: list[_Shared]

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)


class SynchronyCheck:
    """Compares the state of one model and its optimizers over ranks.

    Attributes:
        interval: number of steps between two comparisons; None for those alone that the user asks for.
    """

    def __init__(self, model: HybridParallelModel) -> None:
        self.model, self.mesh = model, model.mesh
        self.interval: int | None = None
        self._last_good: int | None = None

    def run(self, optimizers: Sequence[HybridParallelOptimizer]) -> None:
        """Compare the ranks, on all of them; raises SynchronyError on all, with the first difference."""
        if dist.get_world_size() == 1:
            return
        with self.model.summon_full_params(writeback=False):
            self._compare(optimizers)

    def _compare(self, optimizers: Sequence[HybridParallelOptimizer]) -> None:
        step = max((optimizer.num_steps for optimizer in optimizers), default=0)
        scopes = list(self._scopes(optimizers))
        here = [[kind, self.mesh.rank("pp"), *found] for scope in scopes for kind, *found in _differences(scope)]
        everywhere = [found for rank in all_gather_json(sorted(here)[:1]) for found in rank]
        if not everywhere:
            self._last_good = step
            return
        _, _, _, name, words, ranks = min(everywhere)
        sizes = all_gather_json(_size_of_difference(scopes, name, words, ranks))
        size = next((f" ({size})" for size in sizes if size is not None), "")
        since = "" if self._last_good is None else f", not yet after step {self._last_good}"
        if self._last_good == step:
            since = ", since the comparison at the end of that step"
        raise SynchronyError(
            f"{name} differs between {f'{words} ranks'.strip()} {ranks[0]} and {ranks[1]}{size}; "
            f"seen first after step {step}{since}; go back to a checkpoint from before"
        )

    def run_if_due(self, optimizers: Sequence[HybridParallelOptimizer]) -> None:
        """Compare at every `interval`-th step."""
        if self.interval is not None and all(optimizer.num_steps % self.interval == 0 for optimizer in optimizers):
            self.run(optimizers)

    def _scopes(self, optimizers: Sequence[HybridParallelOptimizer]) -> Iterator[_Scope]:
        params = dict(self.model.unwrap().named_parameters())
        structure = [[name, list(spec_of(param).full_shape)] for name, param in params.items()]
        names = _Shared(_STRUCTURE, "the list of parameters", structure)
        steps = list(_state_steps(optimizers))
        stream = {} if self.model.stream is None else self.model.stream.state_dict()
        streams = [_Shared(_NUMBERS, f"the shared random stream ({device})", state) for device, state in stream.items()]
        copies = [
            _Shared(_PARAMETERS, name, param.data, spec.rank // spec.copies if spec.dim is not None else 0)
            for name, param in params.items()
            if (spec := spec_of(param)).dim is None or spec.copies > 1
        ]
        yield _Scope("", None, list(_options(optimizers)))
        yield _Scope("tensor-parallel", self.mesh.group("tp"), [names, *streams, *steps, *copies])
        for axis, words in ((TENSOR, "data-parallel"), (EXPERTS, "expert-data-parallel")):
            alike = [
                _Shared(_PARAMETERS, name, param.data) for name, param in params.items() if spec_of(param).axis == axis
            ]
            common = [names, *steps] if axis == TENSOR else []
            yield _Scope(words, self.mesh.group(replicate_axis(axis)), [*common, *alike])
        first_names = {param: name for name, param in params.items()}
        for param, tie in sorted(self.model.tied.items(), key=lambda item: item[1].order):
            name = first_names[param]
            common = min((name, *self.model.origin.aliases.get(name, ())))  # its name differs between stages
            yield _Scope("tied", tie.group, [_Shared(_PARAMETERS, f"the tied weight {common}", param.data)])


def synchrony_of(model: HybridParallelModel) -> SynchronyCheck:
    """Return the comparison of a model, which remembers the last step after which nothing differed."""
    return remembered(model, SynchronyCheck)


def _options(optimizers: Sequence[HybridParallelOptimizer]) -> Iterator[_Shared]:
    """Yield the numbers in the parameter groups, the loss scale and the step count."""
    for index, optimizer in enumerate(optimizers):
        of = f" of optimizer {index}" if len(optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in sorted(group.items()):
                plain = value.tolist() if isinstance(value, Tensor) else value
                if key != "params" and isinstance(plain, int | float | tuple | list | bool):
                    yield _Shared(_NUMBERS, f"{key} of parameter group {number}{of}", plain)
        yield _Shared(_NUMBERS, f"the loss scale{of}", [optimizer.loss_scale.value, optimizer.loss_scale.state_dict()])
        yield _Shared(_NUMBERS, f"the number of steps{of}", optimizer.num_steps)


def _state_steps(optimizers: Sequence[HybridParallelOptimizer]) -> Iterator[_Shared]:
    """Yield the optimizer's step count of each parameter that this rank holds a piece of."""
    for optimizer in optimizers:
        for bucket in optimizer.buckets:
            for piece in bucket.pieces:
                step = optimizer.state.get(piece.parameter, {}).get("step")
                if step is not None:
                    name = optimizer.names[bucket.params[piece.index]]
                    yield _Shared(_NUMBERS, f"the optimizer's step count of {name}", float(step))


def _differences(scope: _Scope) -> Iterator[list[Any]]:
    """Yield [kind, position, name, words, two ranks] for each difference in the scope."""
    if dist.get_world_size(scope.group) == 1:
        return
    tables = all_gather_json({shared.name: shared.digest() for shared in scope.shared}, scope.group)
    kinds = {shared.name: shared.kind for shared in scope.shared}
    for position, name in enumerate(kinds):
        present = [rank for rank, table in enumerate(tables) if name in table]
        for piece in {table[name][0] for table in tables if name in table}:
            alike = [rank for rank in present if tables[rank][name][0] == piece]
            pair = _odd_one(alike, tables, name)
            if pair is not None:
                yield [kinds[name], position, name, scope.words, [scope.ranks[rank] for rank in pair]]


def _odd_one(ranks: Sequence[int], tables: Sequence[Mapping[str, Any]], name: str) -> list[int] | None:
    """Return a rank with the most common value and the first rank with another; None if all values are equal."""
    digests = {rank: repr(tables[rank][name]) for rank in ranks}
    counted = Counter(digests.values())
    if len(counted) == 1:
        return None
    usual = max(counted, key=counted.__getitem__)
    of_most = next(rank for rank in ranks if digests[rank] == usual)
    return [of_most, next(rank for rank in ranks if digests[rank] != usual)]


def _size_of_difference(scopes: Sequence[_Scope], name: str, words: str, ranks: list[int]) -> str | None:
    """Describe how much the value differs between two ranks; None if this rank does not share it."""
    scope = next((each for each in scopes if each.words == words and set(ranks) <= set(each.ranks)), None)
    shared = next((each for each in scope.shared if each.name == name), None) if scope else None
    if shared is None:
        return None
    if not isinstance(shared.value, Tensor):
        if shared.kind == _STRUCTURE:
            return None
        values = all_gather_json(str(shared.value)[:80], scope.group)
        one, other = (values[scope.ranks.index(rank)] for rank in ranks)
        return f"{one} and {other}"
    if not shared.value.is_floating_point():
        return None
    other = shared.value.detach().clone()
    dist.broadcast(other, ranks[0], group=scope.group or world_group())
    largest = float((other.double() - shared.value.detach().double()).abs().max()) if other.numel() else 0.0
    return f"largest difference {largest:.3g}" if dist.get_rank() == ranks[1] else None


class Debug(Feature):
    """Checks every module for nan and inf, and compares what ranks must share."""

    def boosted(self, model: HybridParallelModel) -> None:
        """Watch the modules, before an optimizer's hooks take the gradients away; compare ranks from now on."""
        watch = model.trace.watch = ModuleWatch(model.unwrap())
        model.runtime.register_microbatch_hook(watch.begin_microbatch)
        synchrony = synchrony_of(model)
        synchrony.interval = self.config.debugging.synchrony_interval
        model.before_steps.append(lambda: synchrony.run_if_due(model.optimizers))

    def after_step(self, optimizer: HybridParallelOptimizer, model: HybridParallelModel) -> None:
        """Compare the ranks."""
        if not optimizer.step_was_skipped:
            synchrony_of(model).run_if_due([optimizer])


class RecordedSchedule(Feature):
    """Writes the times of a pipeline's actions."""

    def boosted(self, model: HybridParallelModel) -> None:
        """Record in the model's runtime; a directory that cannot be written raises an error on all ranks."""
        directory = Path(self.config.debugging.record_schedule)
        model.runtime.recorder = raise_on_all_ranks(lambda: ScheduleRecorder(directory, model.mesh))
