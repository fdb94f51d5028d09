"""HybridParallelModel: this rank's share of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.copies import copy_module
from plugins.hybrid_parallel.boosted.forward_options import ForwardOptions
from plugins.hybrid_parallel.data.batch_check import FIRST_STEPS, check_batch_of_replica
from plugins.hybrid_parallel.data.index_check import naming_entry
from plugins.hybrid_parallel.data.microbatch import nothing_of, num_rows, stand_in, to_device, without_rows
from plugins.hybrid_parallel.debug.consistency import SynchronyCheck
from plugins.hybrid_parallel.debug.trace import StepTrace
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from plugins.hybrid_parallel.guards import GuardedModel
from plugins.hybrid_parallel.loss.choice import LossChoice
from plugins.hybrid_parallel.loss.step_loss import ModelStepLoss, StepLoss
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime
from plugins.hybrid_parallel.pipeline.schedule import SCHEDULES, Schedule
from plugins.hybrid_parallel.zero.backward_checks import refuse_backward
from plugins.hybrid_parallel.zero.grouping import TiedParameter
from plugins.hybrid_parallel.zero.optimizer import clip_grad_norm_
from shardformer.context_parallel.zigzag import current_pass
from shardformer.distributed.collectives import gather_from_axis
from shardformer.distributed.random import SharedStream
from shardformer.layers.lm_head import VocabParallelLMHead, parallel_logits
from shardformer.loss.terms import LOSS_KEYWORDS
from shardformer.peft.file_names import FileNames, file_names
from shardformer.utils.parameter_names import tied_names


@dataclass(frozen=True)
class WholeModel:
    """What a model was before it was sharded.

    Attributes:
        config: its configuration, None for a model that is not transformers'.
        names: of its parameters and persistent buffers.
        aliases: name -> the other names of the same (tied) parameter.
        listed_as: name of a tied parameter -> the one of its names that `named_parameters` lists.
        adapter_names: adapter of peft -> names of its tensors here -> in its file.
    """

    config: Any
    names: frozenset[str]
    aliases: Mapping[str, tuple[str, ...]]
    listed_as: Mapping[str, str]
    adapter_names: Mapping[str, FileNames] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> WholeModel:
        tied = tied_names(model)
        aliases = {name: tuple(other for other in names if other != name) for names in tied for name in names}
        listed_as = {name: names[0] for names in tied for name in names}
        config = copy.deepcopy(getattr(model, "config", None))
        return WholeModel(config, frozenset(model.state_dict(keep_vars=True)), aliases, listed_as, file_names(model))


class HybridParallelModel(GuardedModel):
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
        super().__init__(module, mesh)
        self.stream, self.origin = stream, origin
        self.saved_elsewhere = frozenset(saved_elsewhere)
        self.runtime = PipelineRuntime(module, mesh, schedule, num_chunks)
        self.losses = LossChoice(module, mesh)
        self.head_loss = self.losses.head_loss
        self.trace, self.synchrony = StepTrace(), SynchronyCheck(self)
        self.batches_seen = 0
        self.tied: Mapping[nn.Parameter, TiedParameter] = {}
        self.checked_full_batch = False
        self.options = ForwardOptions(module, mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridParallelModel:
        """A model with weights of its own on the same ranks, without an optimizer: for averages of weights (EMA)."""
        for optimizer in self.optimizers:
            optimizer.wait_for_parameters()
        module = copy_module(self.module, self.mesh, memo)
        elsewhere = [memo[id(param)] for param in self.saved_elsewhere]
        made = HybridParallelModel(
            module, self.mesh, self.stream, self.origin, elsewhere, self.runtime.schedule, self.runtime.num_chunks
        )
        made.tied = {memo[id(param)]: tie for param, tie in self.tied.items()}
        refuse_backward(made)
        made.training = self.training  # that of each module was copied
        return made

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the names that the whole model lists.

        A tied parameter that a stage holds as its head's weight is listed as the embedding's, as the unsharded model
        does: whoever chooses parameters by their names then chooses the same on every stage.
        """
        listed_as = self.origin.listed_as if remove_duplicate else {}
        for name, param in super().named_parameters("", recurse, remove_duplicate):
            yield (f"{prefix}." if prefix else "") + listed_as.get(name, name), param

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this rank's state dict, in which tied parameters have the names that it has or those that it lists."""
        own = self.module.state_dict(keep_vars=True)
        held_as = {self.origin.listed_as[name]: name for name in own if name in self.origin.listed_as}
        if any(name not in own and name in held_as for name in state_dict):
            state_dict = {name if name in own else held_as.get(name, name): each for name, each in state_dict.items()}
        return super().load_state_dict(state_dict, *args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters on this rank."""
        return next((param.dtype for param in self.module.parameters() if param.is_floating_point()), torch.float32)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What floating-point inputs are cast to; None to leave them."""
        return self.dtype if self.dtype in (torch.bfloat16, torch.float16) else None

    def parameters_only_of(self, stage: int, others: Collection[int]) -> frozenset[nn.Parameter]:
        """The parameters of a stage of this rank that none of the others here has."""
        parameters = self.runtime.stage_parameters
        return parameters[stage].difference(*(parameters[other] for other in others))

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
            ConfigurationError: another engine runs it.
        """
        self.refuse_outer_engine()
        if self.mesh.size("pp") > 1:
            raise RuntimeError(
                f"model(**batch) cannot run stage {self.mesh.rank('pp')} of a pipeline by itself; "
                "call booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)"
            )
        args, kwargs = self.options.by_name(args, kwargs)
        as_tuple = self.options.wants_tuple(kwargs)
        kwargs = self.options.inputs(to_device(kwargs, self.mesh.device, self.input_dtype, LOSS_KEYWORDS))
        if torch.is_grad_enabled():
            if self.checks_this_batch():
                check_batch_of_replica(kwargs, self.mesh)
            self.trace.begin([kwargs], [])
        with self.running(), naming_entry(kwargs):
            if self.losses.lacks_labels(kwargs):
                outputs = self._forward_without_loss(args, kwargs)
            elif self.losses.own_reason(kwargs) is None:
                outputs = self._forward_with_loss(args, kwargs)
            else:
                outputs = self._forward_with_own_loss(args, kwargs)
        return outputs.to_tuple() if as_tuple and hasattr(outputs, "to_tuple") else outputs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of all optimizers and of parameters that none has."""
        held = {param for each in self.optimizers for bucket in each.buckets for param in bucket.params}
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for param in self.module.parameters():
            if param not in held and param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before (0-d).

        To be called on all ranks between the backward pass and `step`: the place of
        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` under any layout.
        """
        if not self.optimizers:
            raise ConfigurationError("model.clip_grad_norm_ finds no optimizer; give boost() the optimizer as well")
        return clip_grad_norm_(self.optimizers, max_norm)

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

    def step_loss(
        self, microbatches: list[dict[str, Any]], criterion: Callable[[Any, Any], Any] | None, batch: Mapping[str, Any]
    ) -> StepLoss:
        """How the loss of a step over `microbatches`, the parts of `batch`, is computed."""
        return self.losses.step_loss(microbatches, criterion, batch)

    def inputs_of(self, microbatch: Mapping[str, Any], loss: StepLoss) -> dict[str, Any]:
        """The keyword arguments of the model's forward: labels are left to the loss, caches are not filled."""
        inputs = {name: value for name, value in microbatch.items() if name not in loss.own_entries}
        inputs = self.options.inputs(inputs, is_microbatch=True)
        if self.head_loss is not None and not isinstance(loss, ModelStepLoss):
            inputs = self.head_loss.inputs(inputs)
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

    def whole_sequences(self, outputs: Any) -> Any:
        """Outputs of this rank's part of each sequence -> of whole sequences."""
        axis = self.losses.axis
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

    def _forward_without_loss(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if args or num_rows(kwargs):
            return self.whole_sequences(self.module(*args, **kwargs))
        # Layers take no empty batch, and others may wait for this rank in them (experts).
        return without_rows(self.whole_sequences(self.module(**stand_in(kwargs))))

    def _forward_with_loss(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The pass with the head's loss, computed where the logits lie."""
        loss, given = self._share_of_loss(kwargs)
        with parallel_logits(self.module):
            outputs = self.module(*args, **{**self.head_loss.inputs(given), "return_dict": True})
            value = loss.share(outputs, 0) if given is kwargs else _no_share(outputs)
        outputs = self.gathered(outputs)
        if loss.aux_loss is not None:
            outputs = type(outputs)(**{**outputs, "aux_loss": loss.aux_loss})
        return self._with_loss(outputs if given is kwargs else without_rows(outputs), value)

    def _forward_with_own_loss(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The pass with the loss that the model's forward computes."""
        given = kwargs if num_rows(kwargs) else stand_in(kwargs)
        outputs = self.module(*args, **given)
        if not isinstance(outputs, Mapping) or not isinstance(outputs.get("loss"), Tensor):
            return outputs if given is kwargs else without_rows(outputs)
        loss, _ = self._share_of_loss(kwargs)
        value = loss.share(outputs, 0) if given is kwargs else _no_share(outputs)
        return self._with_loss(outputs if given is kwargs else without_rows(outputs), value)

    def _share_of_loss(self, kwargs: dict[str, Any]) -> tuple[StepLoss, dict[str, Any]]:
        """The loss of a global batch, and what the model is given: a stand-in where this share of it is empty."""
        if num_rows(kwargs):
            return self.step_loss([kwargs], None, kwargs), kwargs
        return self.step_loss([], None, kwargs), stand_in(kwargs)

    def _with_loss(self, outputs: Mapping[str, Any], share: Tensor) -> Any:
        """`outputs` with the loss of all replicas, of which each has a share."""
        if self.mesh.size(DP_CP) > 1:
            share = _SumOverReplicas.apply(share, self.mesh.group(DP_CP))
        rest = {key: item for key, item in outputs.items() if key != "loss"}
        return type(outputs)(loss=share, **rest)


def _no_share(outputs: Any) -> Tensor:
    """What an empty share adds to a loss: zero, in the precision of the others' shares."""
    nothing = nothing_of(outputs)
    return nothing.to(torch.promote_types(nothing.dtype, torch.float32))


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
