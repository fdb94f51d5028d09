"""HybridParallelModel: this rank's share of the model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from booster.wrappers import ModelWrapper
from plugins.hybrid_parallel.debug.batches import FIRST_STEPS, check_batch_of_replica
from plugins.hybrid_parallel.debug.synchrony import SynchronyCheck
from plugins.hybrid_parallel.debug.trace import StepTrace
from plugins.hybrid_parallel.mesh import REPLICAS, HybridMesh
from plugins.hybrid_parallel.pipeline.microbatch import num_rows, to_device
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Schedule
from plugins.hybrid_parallel.step_loss import CriterionStepLoss, HeadStepLoss, ModelStepLoss, NoLoss, StepLoss
from plugins.hybrid_parallel.zero.optimizer import HybridParallelOptimizer
from plugins.hybrid_parallel.zero.parameters import TiedParameter
from shardformer.adapters import model_inside
from shardformer.collectives import gather_from_axis
from shardformer.context import ContextAxis, current_pass
from shardformer.layers.head import VocabParallelLMHead, parallel_logits
from shardformer.losses import head_loss_of
from shardformer.rng import SharedStream
from shardformer.sharder import tied_names


@dataclass(frozen=True)
class WholeModel:
    """What a model was before it was sharded.

    Attributes:
        config: its configuration, None for a model that is not transformers'.
        names: of its parameters and persistent buffers.
        aliases: name -> the other names of the same (tied) parameter.
    """

    config: Any
    names: frozenset[str]
    aliases: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(model: nn.Module) -> WholeModel:
        aliases = {
            name: tuple(other for other in names if other != name) for names in tied_names(model) for name in names
        }
        config = copy.deepcopy(getattr(model, "config", None))
        return WholeModel(config, frozenset(model.state_dict(keep_vars=True)), aliases)


class HybridParallelModel(ModelWrapper):
    """This rank's share of a model.

    With one pipeline stage it is called like the model it wraps: `model(**batch)`. The loss it returns is then the
    mean over the global batch of all data-parallel ranks, so that each of them has to call it.

    Args:
        module: the sharded model.
        mesh: the grid of ranks.
        stream: the random stream of replicated regions; None on a single rank, which keeps torch's own.
        origin: what the whole model was, for saving and loading.
        saved_elsewhere: parameters here that another stage is the one to save.
        schedule, num_chunks: of the pipeline.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: HybridMesh,
        stream: SharedStream | None,
        origin: WholeModel,
        saved_elsewhere: Collection[nn.Parameter] = (),
        schedule: Schedule = SCHEDULES["1f1b"],
        num_chunks: int = 1,
    ) -> None:
        super().__init__(module)
        self.mesh, self.stream, self.origin = mesh, stream, origin
        self.saved_elsewhere = frozenset(saved_elsewhere)
        self.runtime = PipelineRuntime(module, mesh, schedule, num_chunks)
        inside = model_inside(module)
        self.head_loss = head_loss_of(inside)
        self.trace, self.synchrony = StepTrace(), SynchronyCheck(self)
        self.batches_seen = 0
        self.optimizers: list[HybridParallelOptimizer] = []
        self.tied: Mapping[nn.Parameter, TiedParameter] = {}
        self.has_seen_full_batch = False
        self._takes_use_cache = "use_cache" in inspect.signature(inside.forward).parameters

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters on this rank."""
        return next((param.dtype for param in self.module.parameters() if param.is_floating_point()), torch.float32)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What floating-point inputs are cast to; None to leave them."""
        return self.dtype if self.dtype in (torch.bfloat16, torch.float16) else None

    @cached_property
    def _stage_parameters(self) -> dict[int, frozenset[nn.Parameter]]:
        return {stage: frozenset(self.runtime.parameters_of(stage)) for stage in self.runtime.stages}

    def parameters_only_of(self, stage: int, others: Collection[int]) -> frozenset[nn.Parameter]:
        """The parameters of a stage of this rank that none of the others here has."""
        return self._stage_parameters[stage].difference(*(self._stage_parameters[other] for other in others))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A pass through the model: its parameters are here, and it draws from its own random stream."""
        for optimizer in self.optimizers:
            optimizer.wait_for_parameters()
        with self.stream.active() if self.stream is not None and self.training else nullcontext():
            yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass of the whole model, on one pipeline stage.

        Raises:
            RuntimeError: the model is a stage of a pipeline.
        """
        if self.mesh.size("pp") > 1:
            raise RuntimeError(
                f"model(**batch) cannot run stage {self.mesh.rank('pp')} of a pipeline by itself; "
                "call booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)"
            )
        kwargs = to_device(kwargs, self.mesh.device, self.input_dtype)
        self._refuse_hidden_states(kwargs)
        if torch.is_grad_enabled():
            if self.checks_this_batch():
                check_batch_of_replica(kwargs, self.mesh)
            self.trace.begin([kwargs], [])
        with self.running():
            if self.head_loss is None or not self.head_loss.applies_to(kwargs):
                return self.whole_sequences(self.module(*args, **kwargs))
            return self._forward_with_loss(args, kwargs)

    def checks_this_batch(self) -> bool:
        """Whether to compare a training batch over ranks: the first few, and in debug mode all."""
        self.batches_seen += 1
        return self.batches_seen <= FIRST_STEPS or self.trace.watch is not None

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate` on this rank's share of the weights; every tensor-parallel rank gets all tokens.

        Sampling draws from torch's own random numbers, those of the first of the tensor-parallel ranks.

        Raises:
            RuntimeError: the model is a stage of a pipeline, or its layers keep no cache.
        """
        for optimizer in self.optimizers:
            optimizer.wait_for_parameters()
        return self.module.generate(*args, **to_device(kwargs, self.mesh.device, self.input_dtype))

    def step_loss(self, microbatches: list[dict[str, Any]], criterion: Callable[[Any, Any], Any] | None) -> StepLoss:
        """How the loss of a step over `microbatches` is computed."""
        if criterion is not None:
            return CriterionStepLoss(microbatches, self.mesh, criterion)
        # An empty share has the keys of the others' batches but none of their rows; it asks like they do.
        if self.head_loss is not None:
            has_labels = all(self.head_loss.applies_to(microbatch) for microbatch in microbatches)
            return (
                HeadStepLoss(microbatches, self.mesh, self.head_loss, self.parts_axis)
                if has_labels
                else NoLoss(microbatches, self.mesh)
            )
        return ModelStepLoss(microbatches, self.mesh)

    def inputs_of(self, microbatch: Mapping[str, Any], loss: StepLoss) -> dict[str, Any]:
        """The keyword arguments of the model's forward: labels are left to the loss, caches are not filled."""
        inputs = {name: value for name, value in microbatch.items() if name not in loss.own_entries}
        self._refuse_hidden_states(inputs)
        if self.head_loss is not None and not isinstance(loss, ModelStepLoss):
            inputs = self.head_loss.inputs(inputs)
        if self._takes_use_cache:
            inputs["use_cache"] = False
        return inputs

    def gathered(self, outputs: Any) -> Any:
        """`outputs` of whole sequences, with vocabulary-parallel logits gathered over the tensor-parallel ranks."""
        outputs = self.whole_sequences(outputs)
        head = next((module for module in self.module.modules() if isinstance(module, VocabParallelLMHead)), None)
        if head is None or not isinstance(outputs, Mapping):
            return outputs

        def whole(value: Any) -> Any:
            local_rows = head.weight.shape[1 if head.transposed else 0]
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-1] != local_rows:
                return value
            return gather_from_axis(value, value.dim() - 1, head.group)[..., : head.full_out_features]

        logits = {key: whole(value) for key, value in outputs.items() if key.endswith("logits")}
        return type(outputs)(**{**outputs, **logits})

    @property
    def parts_axis(self) -> ContextAxis | None:
        """The ranks that each have outputs of a part of every sequence; None where outputs are of whole ones."""
        inside = model_inside(self.module)
        return inside.context_axis if getattr(inside, "returns_parts", False) else None

    def whole_sequences(self, outputs: Any) -> Any:
        """Outputs of this rank's part of each sequence -> of whole sequences."""
        axis = self.parts_axis
        if axis is None:
            return outputs
        length = current_pass().length
        part = 2 * axis.chunk(length)

        def whole(value: Any) -> Any:
            is_part = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == part
            return axis.gather(value, length) if is_part else value

        if not isinstance(outputs, Mapping):
            return whole(outputs)
        return type(outputs)(**{key: whole(value) for key, value in outputs.items()})

    def _refuse_hidden_states(self, inputs: Mapping[str, Any]) -> None:
        """Those of all layers are asked for where no rank has them."""
        asked = inputs.get("output_hidden_states")
        if not (getattr(self.origin.config, "output_hidden_states", False) if asked is None else asked):
            return
        if self.mesh.size("pp") > 1:
            raise ConfigurationError(
                f"output_hidden_states=True asks for what lies on {self.mesh.size('pp')} pipeline stages; "
                "use pp_size=1 or output_hidden_states=False"
            )
        if getattr(model_inside(self.module), "sequence_is_cut", False):
            cp_size = self.mesh.size("cp")
            cut_by = f"cp_size={cp_size}" if cp_size > 1 else "enable_sequence_parallelism=True"
            raise ConfigurationError(
                f"output_hidden_states=True finds parts of sequences under {cut_by}; leave that out, or use "
                "output_hidden_states=False"
            )

    def _forward_with_loss(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if num_rows(kwargs) == 0:
            raise ConfigurationError(
                "this rank's share of the last batch is empty; use booster.execute_pipeline, or drop_last=True"
            )
        as_tuple = kwargs.get("return_dict") is False
        loss = HeadStepLoss([kwargs], self.mesh, self.head_loss, self.parts_axis)
        inputs = self.head_loss.inputs(kwargs)
        with parallel_logits(self.module):
            outputs = self.module(*args, **{**inputs, "return_dict": True})
            value = loss.share(outputs, 0)
        if self.mesh.size(REPLICAS) > 1:
            value = _SumOverReplicas.apply(value, self.mesh.group(REPLICAS))
        outputs = self.gathered(outputs)
        rest = {key: item for key, item in outputs.items() if key != "loss"}
        outputs = type(outputs)(loss=value, **rest)
        return outputs.to_tuple() if as_tuple else outputs


class _SumOverReplicas(torch.autograd.Function):
    """The global loss from each rank's share of it.

    Its gradient is multiplied by the number of ranks, because `booster.backward` averages over them: a loss that the
    user computed himself is a local mean there.
    """

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.world_size = dist.get_world_size(group)
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.world_size, None
