"""Contrastive losses, which compare each sample with all others of the batch: of all replicas and micro-batches.

Within the model's forward, the features of all samples take the place of those of this pass's samples, as soon as a
module returns them. The forward then computes the loss of the global batch itself, whatever its formula. All replicas
do so, and each counts for its part of the loss. From the outputs, the rows of other replicas are cut off again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import has_floats, nothing_of
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.step_loss import Microbatches, ModelStepLoss, StepLoss
from shardformer.distributed.collectives import gather_rows
from shardformer.stages.placeholders import StagePlaceholder

_ASKED = "return_loss"  # the argument of transformers' forwards that asks for such a loss
_POOLED = "pooler_output"
# Class -> modules whose outputs are the features of samples, [batch, features], or have them as their pooled output.
_PROJECTIONS, _TOWERS = ("text_projection", "visual_projection"), ("text_model", "vision_model")
_FEATURES: Mapping[str, tuple[str, ...]] = {
    "AlignModel": ("text_projection", "vision_model"),
    "AltCLIPModel": _PROJECTIONS,
    "BlipModel": _PROJECTIONS,
    "BridgeTowerForContrastiveLearning": ("itc_text_head", "itc_image_head", "itc_cross_modal_head"),
    "CLIPModel": _PROJECTIONS,
    "CLIPSegModel": _PROJECTIONS,
    "ChineseCLIPModel": _PROJECTIONS,
    "ClapModel": ("text_projection", "audio_projection"),
    "GroupViTModel": _PROJECTIONS,
    "MetaClip2Model": _PROJECTIONS,
    "OwlViTModel": _PROJECTIONS,
    "Owlv2Model": _PROJECTIONS,
    "Siglip2Model": _TOWERS,
    "SiglipModel": _TOWERS,
    "Tipsv2Model": _TOWERS,
    "VisionTextDualEncoderModel": _PROJECTIONS,
}
# Returns a loss if it is asked for one, and compares no samples.
_OTHERS = ("PatchTSMixer",)


def compares_samples(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether the loss of a batch compares its samples with each other."""
    asked = batch.get(_ASKED)
    if asked is None:
        asked = getattr(getattr(model, "config", None), _ASKED, False)
    return bool(asked) and not type(model).__name__.startswith(_OTHERS)


def coupled_outputs(model: nn.Module) -> tuple[str, ...]:
    """Return the names of outputs of a model that compare all samples of a batch."""
    sides = ("image", "text", "audio")
    return tuple(f"logits_per_{side}" for side in sides) if type(model).__name__ in _FEATURES else ()


class ContrastiveStepLoss(ModelStepLoss):
    """Loss that compares the samples of a batch: of the global one, which all replicas compute, or of each replica's.

    The last of several micro-batches sees the features of all, so that its loss is that of the whole batch. Their
    gradients are known then, before any backward pass, and the passes of the others start from them.

    Args:
        model: the sharded model.
        rest: see `ModelStepLoss`.
        compares_all: whether the batch is the global one.
    """

    def __init__(
        self,
        model: nn.Module,
        microbatches: Microbatches,
        mesh: HybridMesh,
        batch: Mapping[str, Any],
        reason: str,
        main_input: str | None,
        compares_all: bool,
    ) -> None:
        if compares_all:
            StepLoss.__init__(self, microbatches, mesh)
            self.reason, self.reads_floats, self.counts_without_rows = reason, has_floats(batch), True
            self.rows, replicas = [1], mesh.size("dp")
            self.global_rows = torch.full((), float(replicas), dtype=torch.float64, device=mesh.device)
        else:
            super().__init__(microbatches, mesh, batch, reason, main_input)
            self.rows, replicas = [sum(self.rows)], 1
        self.model, self.joins_replicas, name = model, replicas > 1, type(model).__name__
        self._features: list[list[Tensor]] = []  # of the micro-batches before the last one
        self._leaves: list[list[Tensor]] = []  # the same, as the loss sees them
        self._grads: list[Tensor | None] = []  # of the loss, for all leaves
        if name not in _FEATURES and (self.joins_replicas or len(microbatches) > 1):
            have = f"dp_size={replicas} replicas" if self.joins_replicas else f"{len(microbatches)} micro-batches"
            raise ConfigurationError(
                f"the loss of {name} compares all samples of a batch, of which {have} have parts; use dp_size=1 and "
                "num_microbatches=1, or HybridParallelPlugin(contrastive='replica', num_microbatches=1) to compare "
                "those of each replica alone"
            )

    @property
    def needs_all_forwards(self) -> bool:
        """Whether backward passes need what all forward passes have computed."""
        return self.passes > 1

    @contextmanager
    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> Iterator[None]:
        """Let the forward of the model see the features of all replicas and micro-batches in this context."""
        stages = getattr(self.model, "stage_views", None)
        if self.passes > 1 and stages is not None and len(stages.views) > 1:
            raise ConfigurationError(
                f"a contrastive loss of num_microbatches={self.passes} needs one stage on each rank, which now has "
                f"{len(stages.views)}; use num_microbatches=1, or a schedule with one stage, as '1f1b'"
            )
        with ExitStack() as stack:
            stack.enter_context(super().reading(model, keeps_outputs))
            if self.joins_replicas or (self.passes > 1 and self.microbatches):
                stack.enter_context(self._seeing_all())
            yield

    def _share(self, outputs: Any, index: int) -> Tensor:
        if index < self.passes - 1:
            own = self._features[index]
            return _FromGradients.apply(lambda: self._grads_of(index), *own) if own else nothing_of(outputs)
        share = super()._share(outputs, 0)
        leaves = [each for part in self._leaves for each in part]
        if share.requires_grad and leaves:
            self._grads = list(torch.autograd.grad(share, leaves, retain_graph=True, allow_unused=True))
        return share

    def _grads_of(self, index: int) -> list[Tensor | None]:
        """Return the gradients of a micro-batch's features."""
        start = sum(map(len, self._leaves[:index]))
        return self._grads[start : start + len(self._leaves[index])]

    @contextmanager
    def _seeing_all(self) -> Iterator[None]:
        """Give the model features of all, and take outputs of this replica's micro-batch from it."""
        seen: set[str] = set()  # in this pass: GroupViT projects the parts of images after the images
        places: list[tuple[int, int, int]] = []
        self._features, self._leaves = [], []

        def begin(module: nn.Module, args: tuple) -> None:
            seen.clear()
            places.clear()
            self._features.append([])
            self._leaves.append([])

        def joined(features: Tensor) -> Tensor:
            number, at = len(self._features), len(self._features[-1])
            own = features if self.microbatches else features[:0]
            if number < self.passes:
                leaf = own.detach().requires_grad_(own.requires_grad)
                self._features[-1].append(own)
                self._leaves[-1].append(leaf)
                return features
            self._features[-1].append(own)
            before = [part[at] for part in self._leaves[:-1]]
            mine = torch.cat([*before, own])
            everyone, start = self._of_replicas(mine)
            start += len(mine) - len(own)
            places.append((start, start + len(own), len(everyone)))
            return everyone

        def of_module(name: str, module: nn.Module, args: tuple, output: Any) -> Any:
            if name in seen:
                return None
            seen.add(name)
            if isinstance(output, Tensor):
                return joined(output)
            made = copy.copy(output)
            made[_POOLED] = joined(output[_POOLED])
            return made

        def of_this_part(module: nn.Module, args: tuple, outputs: Any) -> Any:
            return _own_rows("", outputs, places[-1]) if places else outputs

        handles = [self.model.register_forward_pre_hook(begin), self.model.register_forward_hook(of_this_part)]
        for name in _FEATURES[type(self.model).__name__]:
            module = self.model.get_submodule(name)
            if not isinstance(module, StagePlaceholder):
                handles.append(module.register_forward_hook(partial(of_module, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _of_replicas(self, own: Tensor) -> tuple[Tensor, int]:
        """Return the features of all replicas that are compared, and where those of this one begin."""
        if not self.joins_replicas:
            return own, 0
        group, rank = self.mesh.group("dp"), self.mesh.rank("dp")
        numbers = gather_rows(torch.full((len(own),), rank, device=own.device), group)
        return gather_rows(own, group), int((numbers < rank).sum())


class _FromGradients(torch.autograd.Function):
    """A zero whose gradients are known by the time of the backward pass."""

    @staticmethod
    def forward(ctx: Any, grads: Callable[[], list[Tensor | None]], *features: Tensor) -> Tensor:
        """Return zero (0-d)."""
        ctx.grads = grads
        return features[0].new_zeros((), dtype=torch.promote_types(features[0].dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the features."""
        return None, *(None if each is None else each * grad.to(each) for each in ctx.grads())


def _own_rows(name: str, value: Any, place: tuple[int, int, int]) -> Any:
    """Return this replica's rows of nested outputs that have those of all; scores compare them with one another."""
    start, stop, total = place
    if isinstance(value, Tensor):
        for dim in (0, 1) if name.startswith("logits") and value.dim() == 2 else (0,):
            if value.dim() and value.shape[dim] == total:
                value = value.narrow(dim, start, stop - start)
        return value
    if isinstance(value, Mapping):
        return type(value)(**{key: _own_rows(key, each, place) for key, each in value.items()})
    return tuple(_own_rows(name, each, place) for each in value) if type(value) is tuple else value
