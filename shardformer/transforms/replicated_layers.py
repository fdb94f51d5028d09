"""Layers that a user has customized before sharding: they stay whole on every rank, or are rejected by name.

A parallel layer that replaced such a layer would lose its hooks, its forward or its weights. So the layer stays, reads
and returns full activations, and its hooks see the same values as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardformer.attention import log_once
from shardformer.expert_parallel.experts import is_experts
from shardformer.layers import (
    ColumnParallelLinear,
    GatheredLMHead,
    HeadParallelEmbedding,
    MultiQueryLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLMHead,
)
from shardformer.layers.linear import in_features, out_features
from shardformer.layers.parallel_module import ParallelModule
from shardformer.shard_config import ShardConfig
from shardformer.utils.derived_modules import hook_on, hooked_modules, user_code


@dataclass(frozen=True)
class Replacement:
    """A planned replacement of a module.

    Attributes:
        path: path of the module in the model.
        native: the module.
        target: the class that replaces it.
        arguments: further arguments of `from_native_module`.
    """

    path: str
    native: nn.Module
    target: type[ParallelModule]
    arguments: Mapping[str, Any]

    @property
    def cuts_outputs(self) -> bool:
        """Whether the output features of the replacement are sharded over ranks."""
        cuts = issubclass(self.target, ColumnParallelLinear | MultiQueryLinear | HeadParallelEmbedding)
        return cuts and self.target.shards_layer and not self.arguments.get("gather_output")

    @property
    def cuts_inputs(self) -> bool:
        """Whether the input features of the replacement are sharded over ranks."""
        return issubclass(self.target, RowParallelLinear) and not self.arguments.get("splits_input")

    @property
    def cut(self) -> Any:
        """What decides which shard of its parameters the replacement holds; an embedding has the rows of its head."""
        is_vocabulary = issubclass(self.target, VocabParallelEmbedding | VocabParallelLMHead | GatheredLMHead)
        return "vocabulary" if is_vocabulary else (self.target, self.arguments)


class KeptLayers:
    """The layers that stay whole on every rank.

    Args:
        replacements: the replacements of the policy.
        config: the sharding options.

    Attributes:
        reasons: module -> phrase that names what a replacement would lose.
    """

    def __init__(self, replacements: Sequence[Replacement], config: ShardConfig) -> None:
        self.replacements, self.config = list(replacements), config
        self.reasons: dict[nn.Module, str] = {}
        for each in self.replacements:
            if (reason := _reason(each)) is not None:
                self.reasons[each.native] = reason
        self.reasons |= dict.fromkeys(self._cut_apart(), "a weight that it shares with a layer that is cut otherwise")
        while tied := self._tied_to_kept():
            self.reasons |= dict.fromkeys(tied, "a weight that it shares with a layer that stays whole")

    def __contains__(self, module: nn.Module) -> bool:
        return module in self.reasons

    @property
    def paths(self) -> list[str]:
        """Paths of the layers that stay whole."""
        return [each.path for each in self.replacements if each.native in self.reasons]

    def problems(self, model: nn.Module) -> list[str]:
        """Return a sentence for each customization that sharding cannot preserve."""
        return [*self._cannot_stay(), *self._cannot_be_cut(), *self._hooks_on_parts(model)]

    def tell(self, name: str) -> None:
        """Log which layers of the model `name` are not sharded."""
        kept = [each for each in self.replacements if each.native in self.reasons]
        if kept and self.config.tensor_parallel_size > 1:
            more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
            log_once(name, f"keeps {kept[0].path}{more} whole on every rank, because of {self.reasons[kept[0].native]}")

    def _cut_apart(self) -> list[nn.Module]:
        """Return layers that share a parameter, of which their replacements would hold different shards.

        Replacements of the user's own are expected to know what they share.
        """
        sharing: dict[int, list[Replacement]] = {}
        for each in self.replacements:
            for parameter in each.native._parameters.values():
                if parameter is not None and _is_ours(each):
                    sharing.setdefault(id(parameter), []).append(each)
        apart = [group for group in sharing.values() if any(each.cut != group[0].cut for each in group)]
        return [each.native for group in apart for each in group if each.native not in self.reasons]

    def _tied_to_kept(self) -> list[nn.Module]:
        """Return layers to be sharded that share a parameter with a layer that stays whole."""
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

    def _cannot_be_cut(self) -> Iterator[str]:
        """Yield a sentence for the first layer whose quantised weight has no border where ranks could be cut."""
        found = [each for each in self.replacements if each.native not in self.reasons]
        told = [(each.path, each.target.quantised_problem(each.native)) for each in found]
        told = [(path, problem) for path, problem in told if problem is not None]
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        yield from (f"{path}{more} has {problem}" for path, problem in told[:1])

    def _hooks_on_parts(self, model: nn.Module) -> Iterator[str]:
        """Yield a sentence for each hook that would see only a rank's share of the activations."""
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
    """Return what the replacement of a module would lose; None if nothing.

    A replacement class of the user's own is expected to handle everything except hooks.
    """
    reason = user_code(each.native) if _is_ours(each) else hook_on(each.native)
    options = ("max_norm", "scale_grad_by_freq", "sparse")
    if reason is None and isinstance(each.native, nn.Embedding):
        reason = next((f"the option {name}" for name in options if getattr(each.native, name)), None)
    return reason


def _is_ours(each: Replacement) -> bool:
    return each.target.__module__.startswith("shardformer.")


def _unknown_size(each: Replacement) -> str | None:
    """Return the name of a feature count that is required but cannot be determined; None if there is none."""
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
