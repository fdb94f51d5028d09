"""Contrastive losses, which compare each sample with all others of the batch: here with those of all replicas.

Within the model's forward, the features of all samples take the place of those of this replica's samples, as soon as a
module returns them. The forward then computes the loss of the global batch itself, whatever its formula. All replicas
do so, and each counts for its part of the loss. From the outputs, the rows of other replicas are cut off again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.entry_dtypes import has_floats
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
    """Loss that compares the samples of the global batch; all replicas compute the whole of it.

    Args:
        model: the sharded model.
        rest: see `ModelStepLoss`.

    Raises:
        ConfigurationError: if a batch is cut into micro-batches, or it is not known what the model compares.
    """

    counts_without_rows = True

    def __init__(
        self, model: nn.Module, microbatches: Microbatches, mesh: HybridMesh, batch: Mapping[str, Any], reason: str
    ) -> None:
        StepLoss.__init__(self, microbatches, mesh)
        check_one_part(microbatches)
        name, replicas = type(model).__name__, mesh.size("dp")
        if name not in _FEATURES and replicas > 1:
            raise ConfigurationError(
                f"the loss of {name} compares all samples of a batch, of which dp_size={replicas} replicas have parts; "
                "use dp_size=1, or HybridParallelPlugin(contrastive='replica') to compare those of each replica alone"
            )
        self.reason, self.reads_floats, self.model = reason, has_floats(batch), model
        self.rows, self.global_rows = [1], torch.full((), float(replicas), dtype=torch.float64, device=mesh.device)

    @contextmanager
    def reading(self, model: nn.Module, keeps_outputs: bool = False) -> Iterator[None]:
        """Let the forward of the model see the features of all replicas in this context."""
        with ExitStack() as stack:
            stack.enter_context(super().reading(model, keeps_outputs))
            if self.mesh.size("dp") > 1:
                stack.enter_context(_features_of_all(self.model, self.mesh, bool(self.microbatches)))
            yield


def check_one_part(microbatches: Microbatches) -> None:
    """Refuse micro-batches of a batch whose samples are compared.

    Raises:
        ConfigurationError: if there are several.
    """
    if len(microbatches) > 1:
        raise ConfigurationError(
            f"a contrastive loss compares all samples of a batch, which is cut into {len(microbatches)} micro-batches; "
            "use num_microbatches=1"
        )


@contextmanager
def _features_of_all(model: nn.Module, mesh: HybridMesh, has_rows: bool) -> Iterator[None]:
    """Give the model features of all replicas in this context, and take outputs of this one from it.

    Args:
        has_rows: whether this replica has samples; if not, the model runs on a stand-in.
    """
    group, places = mesh.group("dp"), list[tuple[int, int, int]]()

    def joined(features: Tensor) -> Tensor:
        own = features if has_rows else features[:0]
        everyone = gather_rows(own, group)
        numbers = gather_rows(torch.full((len(own),), mesh.rank("dp"), device=own.device), group)
        start = int((numbers < mesh.rank("dp")).sum())
        places.append((start, start + len(own), len(everyone)))
        return everyone

    def of_module(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, Tensor):
            return joined(output)
        made = copy.copy(output)
        made[_POOLED] = joined(output[_POOLED])
        return made

    def of_this_replica(module: nn.Module, args: tuple, outputs: Any) -> Any:
        return _own_rows("", outputs, places[-1]) if places else outputs

    handles = [model.register_forward_hook(of_this_replica)]
    for name in _FEATURES[type(model).__name__]:
        module = model.get_submodule(name)
        if not isinstance(module, StagePlaceholder):
            handles.append(module.register_forward_hook(_once(of_module), prepend=False))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _once(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for the first call of a module: GroupViT projects the parts of images after the images."""
    calls = []

    def first(*given: Any) -> Any:
        calls.append(None)
        return hook(*given) if len(calls) == 1 else None

    return first


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
