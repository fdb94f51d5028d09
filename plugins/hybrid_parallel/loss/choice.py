"""Choice of the loss for a batch: the user's criterion, the head's loss on sharded logits, or the model's own.

Contrastive losses compare each sample with all others of the batch: of all replicas and micro-batches. Within the
model's forward, the features of all samples take the place of those of this pass's samples, as soon as a module returns
them. The forward then computes the loss of the global batch itself, whatever its formula. All replicas do so, and each
counts for its part of the loss. From the outputs, the rows of other replicas are cut off again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.data.rows import main_input_of
from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import has_floats, nothing_of
from plugins.hybrid_parallel.distributed.mesh import HybridMesh
from plugins.hybrid_parallel.loss.step_loss import (
    CriterionStepLoss,
    HeadStepLoss,
    Microbatches,
    ModelStepLoss,
    NoLoss,
    RouterBalance,
    ScoresAsked,
    StepLoss,
    TokenScores,
)
from shardformer.attention import log_once
from shardformer.context_parallel.zigzag import ZigzagSharding, token_mask
from shardformer.distributed.collectives import gather_rows
from shardformer.loss.terms import HeadLoss, RouterScores, routers_are_asked
from shardformer.peft import behind_prompts, model_inside
from shardformer.policies.registry import head_loss_of
from shardformer.stages.placeholders import StagePlaceholder
from shardformer.utils.source import calls_loss_function

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
            self.rows, replicas, self.is_divided = [1], mesh.size("dp"), False
            self.global_rows = torch.full((), float(replicas), dtype=torch.float64, device=mesh.device)
        else:
            super().__init__(microbatches, mesh, batch, reason, main_input, model)
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


class LossSource(Enum):
    """Where a loss comes from: criterion, head's formula, or the model; SCORES of tokens; NOTHING: no labels."""

    CRITERION, SCORES, NOTHING, HEAD, MODEL = "criterion", "scores", "nothing", "head", "model"


class ChosenLoss(NamedTuple):
    """The loss of one batch."""

    source: LossSource  # where it comes from
    reason: str | None = None  # why the model's forward must compute it, if that is the source
    compares: bool = False  # whether the model's loss compares the samples of a batch with each other
    criterion: Callable[[Any, Any], Any] | None = None  # (outputs, batch) -> loss, if that is the source


class LossChoice:
    """Chooses the loss of each step for one model.

    Args:
        adds_exactly: whether sums are the same bits in any order, see `StepLoss`.
        compares_all: whether contrastive losses compare the samples of all replicas, or those of each alone.

    Attributes:
        head_loss: loss of the model's head class; None if it is not known.
        scores: what passes give instead of a loss and logits; None if they do not.
    """

    scores: ScoresAsked | None = None

    def __init__(
        self, model: nn.Module, mesh: HybridMesh, adds_exactly: bool = False, compares_all: bool = True
    ) -> None:
        self.model, self.mesh, self.adds_exactly = model_inside(model), mesh, adds_exactly
        self.compares_all = compares_all
        self.main_input = main_input_of(model) or main_input_of(self.model)
        self.head_loss = behind_prompts(model, head_loss_of(self.model))
        self._coupled_outputs = coupled_outputs(self.model)

    @property
    def axis(self) -> ZigzagSharding | None:
        """The ranks that have outputs of different parts of every sequence; None if outputs are of whole sequences."""
        return self.model.context_axis if getattr(self.model, "returns_parts", False) else None

    def choose(self, batch: Mapping[str, Any], criterion: Callable[[Any, Any], Any] | None = None) -> ChosenLoss:
        """Choose the loss of a batch. An empty share has the keys of the others but no rows, and the same choice."""
        if criterion is not None:
            return ChosenLoss(LossSource.CRITERION, criterion=criterion)
        if self.scores is not None:
            return ChosenLoss(LossSource.SCORES)
        if self.head_loss is not None and not self.head_loss.applies_to(batch):
            return ChosenLoss(LossSource.NOTHING)
        reason = own_loss_reason(self.model, self.head_loss, batch)
        if reason is not None and self.axis is not None:
            raise ConfigurationError(
                f"{reason}, which would find parts of sequences under cp_size={self.axis.size}; use cp_size=1, "
                "or pass a criterion"
            )
        if reason is None:
            return ChosenLoss(LossSource.HEAD)
        return ChosenLoss(LossSource.MODEL, reason, compares=compares_samples(self.model, batch))

    def step_loss(self, chosen: ChosenLoss, microbatches: Microbatches, batch: Mapping[str, Any]) -> StepLoss:
        """Return the loss of a step over `microbatches`; refused on all ranks if these parts do not add up to it."""
        loss = self._step_loss(chosen, microbatches, batch)
        loss.adds_exactly = self.adds_exactly
        if self.adds_exactly and isinstance(loss, ContrastiveStepLoss):
            raise ConfigurationError(
                "reproducible=True adds up losses of single units, and a contrastive loss compares all samples of a "
                "batch; use reproducible=False"
            )
        if self.adds_exactly and (loss.balance is not None or getattr(loss, "routers", None) is not None):
            raise ConfigurationError(
                "output_router_logits=True adds a loss over the router scores of a whole batch, which "
                "reproducible=True does not add up exactly; use output_router_logits=False, or reproducible=False"
            )
        loss.coupled_outputs = self._coupled_outputs
        return loss

    def _step_loss(self, chosen: ChosenLoss, microbatches: Microbatches, batch: Mapping[str, Any]) -> StepLoss:
        source, reason = chosen.source, chosen.reason
        if source is LossSource.CRITERION:
            return CriterionStepLoss(microbatches, self.mesh, chosen.criterion, self.main_input)
        if source is LossSource.SCORES:
            return TokenScores(microbatches, self.mesh, self.model, self.scores, self.head_loss, self.axis)
        if source is LossSource.NOTHING:
            return NoLoss(microbatches, self.mesh)
        adds_routers = routers_are_asked(self.model, batch)
        are_spread = adds_routers and self._routers_are_spread(microbatches, is_known=reason is None)
        if source is LossSource.MODEL:
            if chosen.compares:
                given = microbatches, self.mesh, batch, reason, self.main_input
                return ContrastiveStepLoss(self.model, *given, self.compares_all)
            if any(self.mesh.size(axis) > 1 for axis in ("pp", "dp", "cp", "tp")):
                name = type(self.model).__name__
                log_once(name, f"computes its loss itself, of whole logits and as a mean over samples: {reason}")
            return ModelStepLoss(microbatches, self.mesh, batch, reason, self.main_input, self.model)
        loss = HeadStepLoss(microbatches, self.mesh, self.head_loss, batch, self.axis, adds_routers and not are_spread)
        if are_spread:
            loss.balance = self._router_balance(microbatches)
        return loss

    def routers_are_asked(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the outputs for `batch` are to include the auxiliary loss of routers."""
        return routers_are_asked(self.model, batch)

    def balance_without_labels(self, microbatches: Microbatches) -> RouterBalance | None:
        """Return the auxiliary loss of a batch without labels, which the user's may add; None if no rank has it."""
        routers = None if self.head_loss is None else self.head_loss.routers
        return None if routers is None or not routers.adds_up else self._router_balance(microbatches)

    @property
    def routers_see_parts(self) -> bool:
        """Whether a router sees parts of the sequences of its replica."""
        return self.mesh.size("cp") > 1 or self.cuts_over_tp

    @property
    def cuts_over_tp(self) -> bool:
        """Whether tensor-parallel ranks have parts of sequences in every layer (`all_to_all`)."""
        return getattr(self.model, "heads_are_exchanged", False)

    def token_mask(self, microbatch: Mapping[str, Any]) -> Tensor | None:
        """Return the attention mask of the tokens that this rank's layers see; None if all of them count."""
        axis = self.model.context_axis if self.mesh.size("cp") > 1 else None
        return token_mask(microbatch, axis, self.mesh.group("tp") if self.cuts_over_tp else None)

    def _router_balance(self, microbatches: Microbatches) -> RouterBalance:
        masks = [self.token_mask(microbatch) for microbatch in microbatches]
        return RouterBalance(self.head_loss.routers, self._router_scores, masks, self.mesh, self.cuts_over_tp)

    @cached_property
    def _router_scores(self) -> RouterScores:
        return RouterScores(list(self.head_loss.routers.routers(self.model.modules())))

    def _routers_are_spread(self, microbatches: Microbatches, is_known: bool) -> bool:
        """Return whether the auxiliary loss is of routers on several stages, of several micro-batches or parts of them.

        Args:
            is_known: whether the loss can be combined over replicas.

        Raises:
            ConfigurationError: if no rank can have what it is computed from; raised on all ranks.
        """
        sizes = {axis: self.mesh.size(axis) for axis in ("pp", "cp", "dp")}
        fewest = most = len(microbatches)
        if sizes["dp"] > 1:
            extremes = torch.tensor([fewest, -most])  # on the CPU: the result is read at once
            dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=self.mesh.group("dp"))
            fewest, most = int(extremes[0]), -int(extremes[1])
        adds_up = is_known and self.head_loss.routers.adds_up
        are_spread = sizes["pp"] > 1 or most > 1 or self.routers_see_parts
        reasons = {
            f"pp_size={sizes['pp']} spreads over stages; use pp_size=1": sizes["pp"] > 1 and not adds_up,
            f"cp_size={sizes['cp']} spreads over ranks; use cp_size=1": sizes["cp"] > 1 and not adds_up,
            "sequence_parallelism_mode='all_to_all' spreads over ranks; use 'split_gather'": (
                self.cuts_over_tp and not adds_up
            ),
            f"is cut into {most} micro-batches; use num_microbatches=1": most > 1 and not adds_up,
            f"dp_size={sizes['dp']} spreads over replicas; use dp_size=1": sizes["dp"] > 1 and not is_known,
            "leaves a replica without samples; use drop_last=True": fewest == 0 and not are_spread,
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise ConfigurationError(
                    "output_router_logits=True adds a loss over the router scores of all layers and tokens of the "
                    f"batch, which {reason}, or output_router_logits=False"
                )
        return are_spread


_NOT_USERS = ("shardformer.", "plugins.hybrid_parallel.", "transformers.", "torch.")


def own_loss_reason(model: nn.Module, head_loss: HeadLoss | None, batch: Mapping[str, Any]) -> str | None:
    """Return why the model's own forward has to compute this batch's loss; None if `head_loss` gives the same."""
    name = type(model).__name__
    if head_loss is None:
        return f"the forward of {name} computes a loss of its own"
    if "forward" in vars(model):
        return f"the forward of this {name} was replaced"
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    if any(map(_is_users, hooks)):
        return f"a forward hook on the {name} may change it"
    if calls_loss_function(type(model).forward):
        function = model.loss_function
        home, known = str(getattr(function, "__module__", "")), head_loss.function
        called = getattr(function, "__name__", type(function).__name__)
        if not home.startswith("transformers.loss.") or known not in (None, called):
            return f"its loss_function is {called}"
    if head_loss.routers is None and routers_are_asked(model, batch):
        return "it adds an auxiliary loss of its routers"
    unread = head_loss.unread(batch)
    return None if unread is None else f"its loss reads {unread}"


def _is_users(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    home = getattr(function, "__module__", None) or type(function).__module__
    return not home.startswith(_NOT_USERS)
