"""Context parallelism: each rank of an axis holds a shard of every sequence throughout the model.

The inputs of the base model are sharded before its first layer, so embeddings, layers, head and loss see 1/cp of the
tokens; only attention accesses tokens of other ranks (`attention.py`). Sequences are sharded in zigzag order
(Llama 3, arXiv 2407.21783, section 3.3.2; Brandon et al., arXiv 2311.09431): of 2 * cp chunks, rank r holds chunks r
and 2 * cp - 1 - r, which balances the number of scores per rank under a causal mask.

Two facts about a batch decide how it is sharded: whether the mask hides any token, and whether positions restart. The
host records them before the batch moves to its device: asking that in each pass would wait for all queued kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.attention.packed_documents import may_be_packed, restart_flag
from shardformer.distributed.collectives import all_gather, local_slice, pad_dim
from shardformer.stages.placeholders import LayerInputs
from shardformer.utils.module_paths import by_layer, mask_among, part_of

# Inputs that are not sharded: masks cover the tokens of all ranks.
_WHOLE = ("attention_mask",)
Positions = Callable[[Mapping[str, Any]], Tensor | None]


@dataclass
class ContextParallelPass:
    """One forward pass over sharded sequences."""

    axis: ZigzagSharding  # the ranks that share the sequences
    length: int  # tokens of a sequence, without the padding to equal shards
    real: Tensor | None = None  # [batch, length] bool, True for tokens that are not padding; None if all are
    positions: Tensor | None = None  # [batch or 1, length], if documents are packed in a row; None otherwise
    # [batch, length], not zero for tokens that are not padding, on the CPU; None if only the device has it
    mask_on_host: Tensor | None = None
    positions_on_host: Tensor | None = None  # `positions` on the CPU

    def __post_init__(self) -> None:
        if self.positions is not None and self.positions_on_host is None:
            self.positions_on_host = self.positions.cpu()  # where it has asked for restarts, the host has waited before

    @property
    def documents(self) -> Tensor:
        """[batch or 1, length], the index of the document that each token belongs to."""
        starts = self.positions.diff(dim=-1, prepend=self.positions[:, :1] - 1) != 1
        return starts.cumsum(-1)


class ZigzagSharding:
    """Zigzag sharding of sequences over the ranks of a group. Copies of a model share it.

    Attributes:
        latest: the pass whose inputs were sharded last. Layers must not read it: they may be recomputed after another
            pass has begun. They find their own pass in their attention mask.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.latest: ContextParallelPass | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ZigzagSharding:
        return self

    def chunk(self, length: int) -> int:
        """Return the number of tokens in one of the 2 * cp chunks of a sequence."""
        return -(-length // (2 * self.size))

    def places(self, length: int, rank: int, device: torch.device | str | None = "cpu") -> Tensor:
        """Return [2 * chunk], global indices of a rank's tokens; indices from `length` on are padding."""
        chunk = self.chunk(length)
        first = torch.arange(chunk, device=device)
        return torch.cat([first + rank * chunk, first + (2 * self.size - 1 - rank) * chunk])

    def positions_of_part(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return [length], the positions of this rank's tokens in whole sequences; `length` is that of its part."""
        return self.places(length * self.size, self.rank, device)

    def order(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Return [length], the index of each token of the sequence in the concatenated shards of all ranks."""
        held = torch.cat([self.places(length, rank, device) for rank in range(self.size)])
        return held.argsort()[:length]

    def take(self, x: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """Return this rank's shard of `dim`; padding past the end of the sequence is `fill`."""
        dim = dim % x.dim()
        x, chunk = pad_dim(x, dim, 2 * self.size, fill), self.chunk(x.shape[dim])
        starts = (self.rank * chunk, (2 * self.size - 1 - self.rank) * chunk)
        return torch.cat([x.narrow(dim, start, chunk) for start in starts], dim)

    def gather(self, x: Tensor, length: int, dim: int = 1) -> Tensor:
        """Gather shards in sequence order, unpadded; backward, partial gradients are reduce-scattered."""
        return all_gather(x, dim, self.group).index_select(dim, self.order(length, x.device))


def cut_inputs(base: nn.Module, axis: ZigzagSharding, positions: Positions) -> None:
    """Let `base`, a transformers model without a head, read this rank's shard of its inputs.

    Args:
        positions: inputs -> [batch or 1, seq] if the family numbers positions in its own way; None for 0, 1, ...
    """
    signature = inspect.signature(base.forward)

    def cut(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = dict(signature.bind_partial(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        return (), cut_batch(given, axis, positions)

    base.register_forward_pre_hook(cut, with_kwargs=True)


def cut_features(base: nn.Module, axis: ZigzagSharding, names: Sequence[str]) -> None:
    """Let `base` read this rank's features, [tokens, hidden], of inputs `names`, for each layer."""
    signature = LayerInputs(base)

    def cut(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {name: signature.get(name, args, kwargs) for name in names}
        mask = mask_among(given.values())
        for name, value in given.items():
            parts = {number: part_of(each, mask, axis.take) for number, each in by_layer(value).items()}
            if parts:
                own = parts if isinstance(value, Mapping) else list(parts.values())
                args, kwargs = signature.put(name, own, args, kwargs)
        return args, kwargs

    if names:
        base.register_forward_pre_hook(cut, with_kwargs=True)


def cut_batch(inputs: Mapping[str, Any], axis: ZigzagSharding, positions: Positions) -> dict[str, Any]:
    """Return this rank's shard of inputs and begin a pass; ValueError unless tokens and mask are [batch, seq]."""
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
    if tokens is None:
        raise ValueError(f"cp_size={axis.size} cuts input_ids or inputs_embeds, and the batch has neither; give one")
    rows, length = tokens.shape[:2]
    if tokens.dim() != (2 if inputs.get("input_ids") is not None else 3):
        raise ValueError(
            f"cp_size={axis.size} cuts sequences of [batch, seq], and the batch has tokens of {tuple(tokens.shape)}; "
            "use cp_size=1"
        )
    mask, given = inputs.get("attention_mask"), inputs.get("position_ids")
    if problem := problem_of_mask(mask, (rows, length), axis.size):
        raise ValueError(problem)
    whole = given if given is not None else positions(inputs)
    if whole is None:
        whole = torch.arange(length, device=tokens.device)[None]
    packed = whole if may_be_packed(inputs) and restarts(whole) else None
    on_host = [None if each is None else host_copy(each) for each in (mask, packed)]
    axis.latest = ContextParallelPass(axis, length, _real(mask), packed, *on_host)
    parts = {name: _part(value, name, length, axis) for name, value in inputs.items()}
    # With a mask always present, transformers does not take a jump between two chunks for a new document.
    ones = torch.ones(rows, length, dtype=torch.long, device=tokens.device) if mask is None else mask
    return {**parts, "attention_mask": ones, "position_ids": axis.take(whole, dim=-1)}


def problem_of_mask(mask: Any, tokens: tuple[int, ...], cp_size: int) -> str:
    """Return why ranks cannot share sequences under an attention mask; empty if they can or there is none.

    Args:
        tokens: (batch, seq).
    """
    shape = tuple(getattr(mask, "shape", ()))
    if mask is None or shape == tokens:
        return ""
    kind = f"an attention_mask of shape {shape}" if shape else f"a {type(mask).__name__} of masks"
    return f"cp_size={cp_size} cannot cut {kind}; use one of shape [batch, seq], {tokens}, or cp_size=1"


def _real(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    return None if hides_nothing(mask) else mask.bool()


def _part(value: Any, name: str, length: int, axis: ZigzagSharding) -> Any:
    is_cut = isinstance(value, Tensor) and name not in _WHOLE and value.dim() >= 2 and value.shape[1] == length
    if not is_cut:
        return value
    return axis.take(_repeat_last(value, 2 * axis.size) if value.is_floating_point() else value)


def _repeat_last(embeds: Tensor, multiple: int) -> Tensor:
    """Pad [batch, seq, ...] with the last token: a model may take the root of a norm, whose derivative at 0 is none."""
    missing = -embeds.shape[1] % multiple
    last = embeds[:, -1:].detach()
    return torch.cat([embeds, last.expand(-1, missing, *last.shape[2:])], dim=1) if missing else embeds


def token_mask(inputs: Mapping[str, Any], axis: ZigzagSharding | None, tp_group: ProcessGroup | None) -> Tensor | None:
    """Return the attention mask of this rank's tokens, [batch, seq/(cp * tp)]; None if there is none and all count.

    Args:
        inputs: of the model's forward, of whole sequences.
        axis: the ranks that share sequences; None without context parallelism.
        tp_group: tensor-parallel ranks that have parts of sequences in every layer; None if they see the same tokens.
    """
    mask = inputs.get("attention_mask")
    if axis is None and tp_group is None:
        return mask
    if mask is None:
        tokens = next(inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    mask = mask if axis is None else axis.take(mask)
    return mask if tp_group is None else local_slice(mask, 1, tp_group)


def record_facts(parts: Sequence[Mapping[str, Any]], on_host: Sequence[Mapping[str, Any]]) -> None:
    """Record the facts of `parts` on their tensors, read from the same micro-batches `on_host`."""
    for name, asks in _FACTS.items():
        known = [part.get(name) for part in on_host]
        if not known or not all(isinstance(each, Tensor) for each in known):
            continue
        answers = torch.stack([asks(each) for each in known]).tolist()
        for part, value, answer in zip(parts, known, answers, strict=True):
            if part[name] is not value:  # the user's own tensor may change
                part[name].known_fact = answer
    for part, given in zip(parts, on_host, strict=True):
        for name in _FACTS:
            there, known = part.get(name), given.get(name)
            if isinstance(known, Tensor) and known.device.type == "cpu" != there.device.type:
                there.on_host = known


def host_copy(x: Tensor) -> Tensor | None:
    """Return an attention mask, or positions, in the memory of the host; None if only the device has them."""
    return getattr(x, "on_host", None)


def hides_nothing(mask: Tensor) -> bool:
    """Return whether an attention mask is True, or not zero, everywhere."""
    return _answer(mask, _is_full)


def restarts(positions: Tensor) -> bool:
    """Return whether positions, [batch or 1, seq], restart within a row, at another document."""
    return _answer(positions, restart_flag)


def _answer(value: Tensor, asks: Callable[[Tensor], Tensor]) -> bool:
    known = getattr(value, "known_fact", None)
    return bool(asks(value)) if known is None else known


def _is_full(mask: Tensor) -> Tensor:
    return mask.bool().all()


_FACTS: Mapping[str, Callable[[Tensor], Tensor]] = {"attention_mask": _is_full, "position_ids": restart_flag}
