"""Tensor parallelism of other libraries, each with the settings that its documentation gives for training."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from benchmarks.league.outcome import RefusedError
from benchmarks.league.system import Library, to_array
from shardformer.distributed.process_groups import broadcast_json


class TransformersPlan(Library):
    """transformers' own tensor parallelism: `from_pretrained` with a `DistributedConfig`."""

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Load the model from a folder, as its documentation does."""
        from transformers.distributed import DistributedConfig

        if not _plan_of(whole):
            raise RefusedError("the class has no tp_plan")
        with _shared_folder() as folder:
            if dist.get_rank() == 0:
                whole.save_pretrained(folder)
            dist.barrier()
            plan = DistributedConfig(tp_size=tp_size, tp_plan="auto")
            model = type(whole).from_pretrained(folder, distributed_config=plan, dtype=next(whole.parameters()).dtype)
            dist.barrier()
        _same_weights(model, whole)
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # as in the whole one: some have no field of a configuration
                module.p = 0.0
        return model.train()

    def why_no_stages(self) -> str:
        """Its `pp_size` sends hidden states without a graph and returns no loss."""
        return "its pp_size runs a forward pass over stages, without a loss or a backward pass"


class Accelerate(TransformersPlan):
    """accelerate's `ParallelismConfig(tp_size=…)` over a model that transformers loads with its tp_plan."""

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Load the model with its plan, and prepare it."""
        from accelerate import Accelerator, ParallelismConfig
        from accelerate.state import AcceleratorState, GradientState

        for state in (AcceleratorState, GradientState):  # of the class before
            state._reset_state()
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=tp_size))
        return accelerator.prepare(super().prepared(whole, tp_size))

    def why_no_stages(self) -> str:
        """Its stages are for inference."""
        return "ParallelismConfig has no stages, and prepare_pippy is for inference"


class TorchPlan(Library):
    """torch's `parallelize_module` with the plan that transformers has for the class."""

    _STYLES: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
    }

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Translate the plan, style by style."""
        plan = _plan_of(whole)
        unknown = sorted(set(plan.values()) - set(self._STYLES))
        if not plan:
            raise RefusedError("the class has no tp_plan")
        if unknown:
            raise RefusedError(f"torch has no style {unknown[0]!r} of this plan")
        styles = {name: self._STYLES[style]() for name, style in plan.items()}
        model = parallelize_module(whole, init_device_mesh("cpu", (tp_size,)), styles)
        model.tie_weights()  # each module got a parameter of its own
        return model

    def why_no_stages(self) -> str:
        """Stages are another interface of torch."""
        return "it has no stages; see torch's pipelining"


class AutoTP(Library):
    """DeepSpeed's tensor parallelism for training, AutoTP."""

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Let DeepSpeed find the layers to cut."""
        import deepspeed

        model = deepspeed.tp_model_init(whole, tp_size=tp_size, dtype=next(whole.parameters()).dtype)
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "tensor_parallel": {"autotp_size": tp_size},
                "zero_optimization": {"stage": 0},
            },
        )
        return engine.module

    def why_no_stages(self) -> str:
        """Its stages need another model."""
        return "its PipelineModule takes a list of layers: the class would have to be written again"

    def whole(self, model: nn.Module, param: nn.Parameter, value: Tensor) -> numpy.ndarray:
        """Gather by DeepSpeed's own context, which makes the values of a parameter of its layers whole."""
        from deepspeed.module_inject.layers import GatherReplacedLayerParams

        if not hasattr(param, "gather_params"):
            return to_array(value)
        own, param.data = param.data, value.clone()
        with GatherReplacedLayerParams([param], model, enabled=True):
            found = to_array(param)
        param.data = own
        return found


def _plan_of(model: nn.Module) -> dict[str, str]:
    return dict(getattr(model, "tp_plan", None) or {})


@contextmanager
def _shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="league-") as own:
        yield Path(broadcast_json(own))
        dist.barrier()


@torch.no_grad()
def _same_weights(model: nn.Module, whole: nn.Module) -> None:
    """Give the loaded model the values of the whole one: a class may not read every weight that it wrote."""
    values = dict(whole.named_parameters(remove_duplicate=False))
    for name, param in model.named_parameters(remove_duplicate=False):
        if name in values and isinstance(param, DTensor) and param.shape == values[name].shape:
            cut = distribute_tensor(values[name].detach(), param.device_mesh, param.placements)
            param.to_local().copy_(cut.to_local())
        elif name in values and param.shape == values[name].shape:
            param.copy_(values[name])
