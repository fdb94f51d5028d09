"""Layers that a user has changed before the model is sharded: they stay whole on every rank, or are refused by name.

A parallel layer that took the place of such a layer would lose its hooks, its forward or its weights. So the layer
stays, reads and returns whole activations, and everything that hangs on it sees what it sees in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardformer.attention import log_once
from shardformer.expert_parallel.experts import is_experts
from shardformer.layers import ColumnParallelLinear, HeadParallelEmbedding, MultiQueryLinear, RowParallelLinear
from shardformer.layers.linear import in_features, out_features
from shardformer.layers.parallel_module import ParallelModule
from shardformer.shard_config import ShardConfig
from shardformer.utils.customizations import hook_on, hooked_modules, user_code


@dataclass(frozen=True)
class Replacement:
    """What is to take the place of a module."""

    path: str
    native: nn.Module
    target: type[ParallelModule]
    arguments: Mapping[str, Any]

    @property
    def cuts_outputs(self) -> bool:
        """Whether a rank has its own features of what the replacement returns."""
        cuts = issubclass(self.target, ColumnParallelLinear | MultiQueryLinear | HeadParallelEmbedding)
        return cuts and self.target.shards_layer and not self.arguments.get("gather_output")

    @property
    def cuts_inputs(self) -> bool:
        """Whether a rank has its own features of what the replacement reads."""
        return issubclass(self.target, RowParallelLinear) and not self.arguments.get("splits_input")


class KeptLayers:
    """The layers that stay whole.

    Args:
        replacements: what a policy would replace.
        config: what is asked for.

    Attributes:
        reasons: module -> what a replacement would lose, in words.
    """

    def __init__(self, replacements: Sequence[Replacement], config: ShardConfig) -> None:
        self.replacements, self.config = list(replacements), config
        self.reasons: dict[nn.Module, str] = {}
        for each in self.replacements:
            if (reason := _reason(each)) is not None:
                self.reasons[each.native] = reason
        while tied := self._tied_to_kept():
            self.reasons |= dict.fromkeys(tied, "a weight that it shares with a layer that stays whole")

    def __contains__(self, module: nn.Module) -> bool:
        return module in self.reasons

    @property
    def paths(self) -> list[str]:
        """Of the layers that stay whole."""
        return [each.path for each in self.replacements if each.native in self.reasons]

    def problems(self, model: nn.Module) -> list[str]:
        """Sentences on what cannot run as a user made it."""
        return [*self._cannot_stay(), *self._hooks_on_parts(model)]

    def tell(self, name: str) -> None:
        """Say which layers of the model `name` are not cut."""
        kept = [each for each in self.replacements if each.native in self.reasons]
        if kept and self.config.tensor_parallel_size > 1:
            more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
            log_once(name, f"keeps {kept[0].path}{more} whole on every rank, because of {self.reasons[kept[0].native]}")

    def _tied_to_kept(self) -> list[nn.Module]:
        """Layers that are to be cut and have a parameter of one that stays."""
        held = {id(parameter) for module in self.reasons for parameter in module._parameters.values()}
        held.discard(id(None))
        return [
            each.native
            for each in self.replacements
            if each.native not in self.reasons
            and any(id(parameter) in held for parameter in each.native._parameters.values())
        ]

    def _cannot_stay(self) -> Iterator[str]:
        for each in self.replacements:
            reason = self.reasons.get(each.native)
            if reason is None:
                continue
            start = f"{each.path} (a {type(each.native).__name__}) has {reason}, which"
            if not each.target.can_stay_whole:
                yield f"{start} would be lost where tensor parallelism cuts it; use tp_size=1 (dp or pp)"
            elif self.config.sequence is not None and each.target.shards_layer:
                yield f"{start} sequence parallelism cannot keep; use enable_sequence_parallelism=False"
            elif (side := _unknown_size(each)) is not None:
                yield (
                    f"{start} tensor parallelism keeps whole, but it does not say how many features it has; give it "
                    f"the attribute {side}, or use tp_size=1 (dp or pp)"
                )

    def _hooks_on_parts(self, model: nn.Module) -> Iterator[str]:
        """Hooks that would see a rank's share of what they see in plain torch."""
        if self.config.context is not None or self.config.sequence is not None:
            what = "cp_size above 1" if self.config.context is not None else "sequence parallelism"
            inner = [(path, hook) for path, _, hook in hooked_modules(model) if any(map(str.isdigit, path.split(".")))]
            for path, hook in inner[:1]:
                yield f"{path} has {hook}, which would see a part of each sequence under {what}; use dp, pp or tp alone"
            return
        outputs = [each.path for each in self.replacements if each.cuts_outputs]
        inputs = [each.path for each in self.replacements if each.cuts_inputs]
        replaced = {each.path for each in self.replacements}
        for path, module, hook in hooked_modules(model):
            if path in replaced:
                continue
            reads, returns = _any_below(path, inputs), _any_below(path, outputs)
            parent = path.rpartition(".")[0]
            lies_between = not (reads or returns) and any(each.rpartition(".")[0] == parent for each in outputs)
            sees_share = lies_between and not any(True for _ in module.parameters())
            if reads != returns or sees_share or (is_experts(module) and self.config.tensor_parallel_size > 1):
                yield (
                    f"{path} has {hook}, which would see a rank's share of its activations under tensor parallelism; "
                    f"hook a linear layer or the whole of {parent or 'the model'}, or use tp_size=1 (dp or pp)"
                )


def _reason(each: Replacement) -> str | None:
    """What the replacement of a module would lose; a class of the user's own knows what it replaces, but for hooks."""
    is_ours = each.target.__module__.startswith("shardformer.")
    reason = user_code(each.native) if is_ours else hook_on(each.native)
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    if reason is None and isinstance(each.native, nn.Embedding):
        reason = next((f"the option {name}" for name in options if getattr(each.native, name)), None)
    return reason


def _unknown_size(each: Replacement) -> str | None:
    """The number of features that has to be known, and is not."""
    sides = {"out_features": (each.cuts_outputs, out_features), "in_features": (each.cuts_inputs, in_features)}
    for name, (is_needed, ask) in sides.items():
        try:
            if is_needed:
                ask(each.native)
        except TypeError:
            return name
    return None


def _any_below(path: str, paths: Sequence[str]) -> bool:
    return any(not path or each.startswith(f"{path}.") for each in paths)
