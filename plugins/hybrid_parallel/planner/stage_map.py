"""Map pipeline stages to parts of a model, computed once per number of stages without partitioning the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from torch import nn

from booster.errors import ConfigurationError
from booster.logging import quiet
from plugins.hybrid_parallel.planner.op_recorder import Part
from plugins.hybrid_parallel.planner.proxy_model import LayerList, layer_lists, name_in_skeleton
from plugins.hybrid_parallel.shard_report import fake_rank
from plugins.hybrid_parallel.zero.stage3 import owners_of
from shardformer import PipelineStageManager, Policy, ShardConfig
from shardformer.layers.experts import expert_modules, num_experts
from shardformer.peft import adapters_detached, model_inside
from shardformer.policies.registry import policy_for
from shardformer.shardformer import ModelSharder
from shardformer.stages.stage import StagePartitioner
from shardformer.transforms.layout_checks import check_policy
from shardformer.transforms.sequences import mixers_of_layers, reason_against_sharing
from shardformer.utils.module_paths import alias_groups


@dataclass(frozen=True)
class StageParts:
    """Parts and parameters of one stage."""

    layers: tuple[Part, ...]  # the layers that it runs, in order
    gaps: tuple[Part, ...]  # the other parts that it runs: those before, between and after the lists of layers
    names: tuple[str, ...]  # the parameters that it holds, in the model's order, by their names in the skeleton
    # index in `names` -> (index among the parameters that several stages hold, those stages)
    tied: dict[int, tuple[int, tuple[int, ...]]]
    # for each parameter, the number of the module whose passes gather it under ZeRO stage 3
    owners: tuple[int, ...] = ()
    # indices in `names` of the parameters that several modules of the model hold
    repeated: frozenset[int] = frozenset()
    shape: int = 0  # an ID that stages with the same parameters share

    @property
    def parts(self) -> Counter[Part]:
        """How often the stage runs each part."""
        return Counter((*self.layers, *self.gaps))


class ModelMap:
    """Whole model on the meta device, and its partitions into pipeline stages.

    Args:
        build: builds the model; called on the meta device.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        with quiet(), torch.device("meta"):
            self.model = model_inside(build())  # names and paths are those inside of peft's wrapper
        self.name = type(self.model).__name__
        self.config = getattr(self.model, "config", None)
        self._stages: dict[int, list[StageParts] | ConfigurationError] = {}

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters; tied parameters count once."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def num_layers(self) -> int:
        """Number of layers in all lists."""
        return sum(len(each.kinds) for each in self.lists)

    @cached_property
    def policy(self) -> Policy | None:
        """Sharding policy of the model's family; None if there is none, so that the model cannot be sharded."""
        try:
            policy = policy_for(self.model)
        except ValueError:
            return None
        policy.set_model(self.model)
        return policy

    @cached_property
    def shares_sequences(self) -> bool:
        """Whether ranks can share sequences and costs of layers; token mixers run over whole sequences."""
        is_shared = self.policy is not None and reason_against_sharing(self.model, self.policy) is None
        return is_shared and not mixers_of_layers(self.model, self.policy)

    @cached_property
    def ep_sizes(self) -> list[int]:
        """Numbers of ranks that may share the experts: those that divide their number in every layer."""
        common = gcd(*(num_experts(experts) for _, experts in expert_modules(self.model)))
        return [size for size in range(1, max(common, 1) + 1) if common % size == 0] if self.policy else [1]

    @cached_property
    def lists(self) -> list[LayerList]:
        """Lists of layers of the model."""
        return [] if self.policy is None else layer_lists(self.model, self.policy.base_path, self.policy.stages)

    def stages(self, count: int) -> list[StageParts]:
        """Return the `count` stages that `boost` makes; ConfigurationError if the model has not so many."""
        if count not in self._stages:
            try:
                self._stages[count] = self._cut(count) if count > 1 else [self._whole()]
            except ValueError as error:
                self._stages[count] = ConfigurationError(str(error))
        found = self._stages[count]
        if isinstance(found, ConfigurationError):
            raise found
        return found

    def _whole(self) -> StageParts:
        layers = [("layer", number, kind) for number, each in enumerate(self.lists) for kind in each.kinds]
        gaps = [("gap", number) for number in range(len(self.lists) + 1)]
        names = [name_in_skeleton(names[0], self.lists) for names in self._names]
        owners = [self._owners[names[0]] for names in self._names]
        repeated = frozenset(index for index, names in enumerate(self._names) if len(names) > 1)
        return StageParts(tuple(layers), tuple(gaps), tuple(names), {}, tuple(owners), repeated)

    @cached_property
    def _names(self) -> list[list[str]]:
        return alias_groups(self.model)

    @cached_property
    def _owners(self) -> dict[str, int]:
        """Name of each parameter -> number of the module that gathers it."""
        paths = {module: path for path, module in self.model.named_modules()}
        numbers: dict[nn.Module, int] = {}
        return {
            f"{paths[module]}.{name}" if paths[module] else name: numbers.setdefault(owner, len(numbers))
            for module, owner in owners_of(self.model)
            for name in module._parameters
        }

    def _cut(self, count: int) -> list[StageParts]:
        manager = PipelineStageManager(0, count)
        with fake_rank(0, 1):
            config = ShardConfig(pipeline_stage_manager=manager, enable_tensor_parallelism=False)
            sharder = ModelSharder(self.model, config)
            with adapters_detached(self.model, sharder.config, sharder.policy):
                check_policy(sharder)
        cut = StagePartitioner(self.model, self.policy.base_path, self.policy.stages, manager)
        held: list[list[str]] = [[] for _ in range(count)]
        owners: list[list[int]] = [[] for _ in range(count)]
        repeated: list[list[int]] = [[] for _ in range(count)]
        tied: list[dict[int, tuple[int, tuple[int, ...]]]] = [{} for _ in range(count)]
        order = 0
        for names in self._names:
            stages = tuple(sorted(set.union(*map(cut.holders, names))))
            for stage in stages:
                if len(stages) > 1:
                    tied[stage][len(held[stage])] = order, stages
                # A stage may hold a tied parameter only under one of its other names.
                present = [name for name in names if stage in cut.holders(name)] or [names[0]]
                own = present[0]
                repeated[stage] += [len(held[stage])] if len(present) > 1 else []
                owners[stage].append(self._owners[own])
                held[stage].append(name_in_skeleton(own, self.lists))
            order += len(stages) > 1
        shapes: dict[tuple, int] = {}
        return [
            StageParts(
                self._layers_in(layers),
                self._gaps_of(cut, layers, stage, count),
                tuple(held[stage]),
                tied[stage],
                tuple(owners[stage]),
                frozenset(repeated[stage]),
                shapes.setdefault((tuple(held[stage]), tuple(tied[stage].items())), len(shapes)),
            )
            for stage, layers in enumerate(cut.ranges)
        ]

    def _layers_in(self, layers: Sequence[int]) -> tuple[Part, ...]:
        parts = [("layer", number, kind) for number, each in enumerate(self.lists) for kind in each.kinds]
        return tuple(parts[index] for index in layers)

    def _gaps_of(self, cut: StagePartitioner, layers: range, stage: int, count: int) -> tuple[Part, ...]:
        """Return the gaps of a stage: a gap runs with the first layer of the next list, the head on the last stage."""
        gaps = [("gap", number) for number, start in enumerate(cut.starts[:-1]) if start in layers]
        return (*gaps, ("gap", len(self.lists))) if stage == count - 1 else tuple(gaps)
