"""NeMo Automodel's parallelism for classes of transformers: DTensor plans, FSDP2, and `AutoPipeline`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.experimental import implicit_replication

from benchmarks.league.outcome import RefusedError, refusals
from benchmarks.league.pipelines import run_stages
from benchmarks.league.system import Library, Trained
from plugins.hybrid_parallel.verify.train import VerifyCase

_NUM_MICROBATCHES = 2


class Automodel(Library):
    """NeMo Automodel; its own transformers comes first on the path."""

    def train(self, case: VerifyCase, tp_size: int, pp_size: int, is_logged: bool = False) -> Trained:
        """Train whole models by its plans, stages by its pipeline."""
        if pp_size > 1:
            return self._train_stages(case, tp_size, pp_size)
        return super().train(case, tp_size, pp_size, is_logged)

    def why_not(self, tp_size: int, pp_size: int) -> str:
        """It has every layout."""
        return ""

    def prepared(self, whole: nn.Module, tp_size: int) -> nn.Module:
        """Apply the plan that it has for the class, or that transformers has, and FSDP2 over one rank."""
        self._device_mesh = _mesh(tp_size, 1)
        return _parallelize(whole, self._device_mesh)

    def around_step(self) -> AbstractContextManager[Any]:
        """The labels of a batch are replicated where logits are DTensors."""
        return implicit_replication()

    def after_backward(self, model: nn.Module) -> None:
        """Reduce gradients that ranks have copies or parts of, as its recipes do once a step."""
        _synchronize(model, self._device_mesh)

    def _train_stages(self, case: VerifyCase, tp_size: int, pp_size: int) -> Trained:
        from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline

        whole = case.tiny_model.build()
        batches = [case.tiny_model.batch(whole, step, case.rows) for step in range(case.steps)]
        shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
        if not type(whole).__name__.endswith("ForCausalLM"):
            raise RefusedError("its pipeline runs causal language models, and calls a loss on their logits")
        mesh, count = _mesh(tp_size, pp_size), _LabelCount()
        with refusals():
            stages = AutoPipeline(
                world_mesh=mesh,
                dp_axis_names=("dp",),
                tp_axis_name="tp",
                pp_microbatch_size=case.rows // _NUM_MICROBATCHES,
                pp_batch_size=case.rows,
                device=torch.device("cpu"),
                dtype=torch.float32,
            ).build(whole, loss_fn=count.loss, parallelize_fn=_parallelize_stage if tp_size > 1 else None)
        return run_stages(stages.parts[0], _Schedule(stages, count, mesh), batches, shapes)


class _LabelCount:
    """A loss that divides by the labels of the whole batch, as its recipe for training does."""

    labels = 1

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a micro-batch's share of the mean; labels: [rows, seq], shifted."""
        whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        return nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="sum") / self.labels


class _Schedule:
    """The schedule of `AutoPipeline`, called as its recipe for training does."""

    def __init__(self, stages: Any, count: _LabelCount, mesh: DeviceMesh) -> None:
        self.stages, self.count, self.mesh = stages, count, mesh

    def step(self, batch: dict[str, Any]) -> Tensor:
        """Run a step; the loss on ranks of the last stage."""
        info, inputs = self.stages.info, dict(batch)
        labels = nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
        self.count.labels = int((labels != -100).sum())
        ids, losses = inputs.pop("input_ids"), []
        self.stages.update_seq_len(ids.shape[1])
        target = {"target": labels, "losses": losses} if info.has_last_stage else {"target": None, "losses": None}
        self.stages.step(ids, **target, **inputs)
        _synchronize(self.stages.parts[0], self.mesh)
        return torch.stack(losses).sum() if losses else torch.zeros(())


def _mesh(tp_size: int, pp_size: int) -> DeviceMesh:
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from nemo_automodel.components.distributed.mesh_utils import _create_fsdp2_device_mesh

    sizes = ParallelismSizes(tp_size=tp_size, pp_size=pp_size)
    return _create_fsdp2_device_mesh(sizes, world_size=dist.get_world_size())[0]


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize

    full = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return fsdp2_strategy_parallelize(model, mesh, mp_policy=full)


def _synchronize(model: nn.Module, mesh: DeviceMesh) -> None:
    from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients

    synchronize_tp_replica_gradients([model], mesh)


def _parallelize_stage(stage: nn.Module, world_mesh: DeviceMesh, **_: Any) -> None:
    _parallelize(stage, world_mesh)
