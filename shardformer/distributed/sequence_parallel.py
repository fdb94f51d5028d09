"""Sequences divided over tensor-parallel ranks: split-gather, all-to-all, and in blocks.

Split-gather (arXiv 2205.05198, section 4.2): between the tensor-parallel regions of a layer every rank holds
`[batch, seq/tp, hidden]`. `enter` splits the sequence before the stack of layers and `leave` gathers it afterwards; a
tensor-parallel region starts with `gather` and ends with `reduce_scatter`. A length that the number of ranks does not
divide is padded inside and trimmed again. Some modules count positions from 0 by the length of their input, of which a
rank has a part: Llama 4 scales queries by the logarithm of their positions (arXiv 2501.19399).

All-to-all (DeepSpeed-Ulysses, arXiv 2309.14509): a rank holds a slice of the sequence and whole weights. An all-to-all
before the attention kernel gives it the whole sequence for a subset of the heads; one after it reverses this.

Blocks: what sums over tokens between the regions (the gradients of norms and of biases) is computed for each of a fixed
number of blocks by itself, and random numbers are drawn by block. A rank that has some of the blocks finds the same
numbers as one that has them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from shardformer.distributed import collectives
from shardformer.distributed.blocks import BlockedTensor, Blocks, own_blocks, reduce_from_blocks
from shardformer.shard_spec import pad_to_multiple
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.module_paths import alias_parameters
from shardformer.utils.source import counts_positions, with_globals

SEQ_DIM = 1  # tensors are [batch, seq, hidden]
_OF_TOKENS = ("per_layer_input",)  # what layers read for each token besides the hidden states: in Gemma 4
# Queries that tokens which have not arrived yet can answer.
_OF_SHAPE = {Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device"))}


class SequenceParallel:
    """Sequence-parallel region of one model on one mesh axis. Copies of the model share it.

    Attributes:
        length: sequence length, before padding, of the pass that is inside the region.
        sums_gradients: whether `gather` sums the gradient of its output over ranks.
    """

    sums_gradients = True

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.length = 0  # sets `_padding`, too
        self.positions: Tensor | None = None  # of whole sequences, [batch or 1, seq]; `slice_positions` sets them

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self

    @property
    def length(self) -> int:
        """The length of whole sequences, without padding."""
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        # A graph has this number as a constant, and takes the length from its inputs, which differ more often.
        self._length, self._padding = length, -length % self.world_size

    @property
    def grad_group(self) -> ProcessGroup | None:
        """The ranks whose gradients of parameters between regions are partial sums; None if they are whole."""
        return self.group

    def enter(self, x: Tensor) -> Tensor:
        """Split [batch, seq, hidden], the same on every rank -> [batch, seq/tp, hidden]."""
        self.length = x.shape[SEQ_DIM]
        return self.split(x)

    def split(self, x: Tensor) -> Tensor:
        """Split any sequence [batch, seq, hidden], the same on every rank -> [batch, seq/tp, hidden]."""
        return collectives.split_to_region(x, SEQ_DIM, self.group)

    def positions_of_part(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return [length], the positions of this rank's tokens in whole sequences; `length` is that of its part."""
        return torch.arange(length, device=device) + dist.get_rank(self.group) * length

    def leave(self, x: Tensor) -> Tensor:
        """Gather [batch, seq/tp, hidden] -> [batch, seq, hidden], the same on every rank, also flattened."""
        if x.dim() == 2:
            return self.leave(self._by_rows(x)).flatten(0, 1)
        length = self.length
        out = self._gather_whole(x)

        def enter_backward(_: Any) -> None:
            self.length = length

        # The backward pass enters the region here. By then another micro-batch may have entered it; layers that are
        # recomputed must see the length of their own pass.
        if not torch.compiler.is_compiling() and out.grad_fn is not None:  # a graph is recomputed as a whole
            out.grad_fn.register_prehook(enter_backward)
        return out

    def _gather_whole(self, x: Tensor) -> Tensor:
        return collectives.gather_from_region(x, SEQ_DIM, self.group, self.length)

    def gather(self, x: Tensor) -> Tensor:
        """Apply `g-bar`: [batch, seq/tp, hidden] -> [batch, seq, hidden], also with flat rows."""
        if x.dim() == 2:
            return self.gather(self._by_rows(x)).flatten(0, 1)
        traced = torch.compiler.is_compiling()
        length = x.shape[SEQ_DIM] * self.world_size - self._padding if traced else self.length
        return collectives.all_gather(x, SEQ_DIM, self.group, length)

    def _by_rows(self, x: Tensor) -> Tensor:
        """Return [batch * seq/tp, hidden] as [batch, seq/tp, hidden]."""
        return x.unflatten(0, (-1, pad_to_multiple(self.length, self.world_size) // self.world_size))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Apply `g-bar*`: reduce-scatter partial sums [batch, seq, hidden] -> [batch, seq/tp, hidden]."""
        if x.dim() == 2:
            return self.reduce_scatter(x.unflatten(0, (-1, self.length))).flatten(0, 1)
        return collectives.reduce_scatter(x, SEQ_DIM, self.group)

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """Start a reduce-scatter of [batch, seq, hidden]; return this rank's [seq/tp, batch, hidden] and the work."""
        return collectives.start_reduce_scatter(x, SEQ_DIM, self.group)


def first_input(args: tuple, kwargs: dict, change: Any) -> tuple[tuple, dict]:
    """Apply `change` to the hidden states in a module's inputs, positional or keyword."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def first_output(output: Any, change: Any) -> Any:
    """Apply `change` to the hidden states that a module returns, alone or first in a tuple or list."""
    if not isinstance(output, tuple | list):
        return change(output)
    changed = (change(output[0]), *output[1:])
    return list(changed) if isinstance(output, list) else changed


class PendingTokens(Tensor):
    """Placeholder for tokens of a pending gather: its shape is known, and any operator on it waits for the values.

    Readers such as a norm in front of a column-parallel layer, hooks and adapters need no special code.
    """

    pending_gather: Any  # has `tokens`

    @staticmethod
    def of(whole: Tensor, gather: Any) -> Tensor:
        """Return a placeholder of the shape and the autograd graph of `whole`; fake ones, of plans, are no such class.

        They have no values that could be read too early.
        """
        placeholder = whole.as_subclass(PendingTokens) if type(whole) is Tensor else whole.view_as(whole)
        placeholder.pending_gather = gather
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _OF_SHAPE:
            args, kwargs = tree_map_only(PendingTokens, lambda x: x.pending_gather.tokens(), (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class PendingGather:
    """An asynchronous all-gather of the sequence.

    Attributes:
        local: this rank's tokens, [batch, seq/tp, hidden], with their autograd graph.
        own: the same values, [seq/tp, batch, hidden].
        rows, other_rows: rows of the gathered [seq, batch, hidden] from this rank, and from the other ranks.
        length: length of the sequence without padding.
    """

    def __init__(self, local: Tensor, region: SequenceParallel) -> None:
        self.local, self.region, self.length = local, region, region.length
        self.own = local.detach().movedim(SEQ_DIM, 0).contiguous()
        share, rank = len(self.own), dist.get_rank(region.group)
        self.rows = slice(rank * share, (rank + 1) * share)
        self.other_rows = [slice(0, self.rows.start), slice(self.rows.stop, share * region.world_size)]
        self._gathered = self.own.new_empty((share * region.world_size, *self.own.shape[1:]))
        self._tokens: Tensor | None = None
        self._work = collectives.all_gather_flat(self._gathered, self.own, group=region.group, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the gather; return the tokens, [seq, batch, hidden], with padding."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._gathered

    def placeholder(self) -> Tensor:
        """Return a placeholder [batch, seq, hidden]: column-parallel layers recognize it, other readers wait."""
        return PendingTokens.of(self._gathered.movedim(0, SEQ_DIM)[:, : self.length], self)

    def tokens(self) -> Tensor:
        """Return the gathered tokens, [batch, seq, hidden], differentiable; not used by column-parallel layers."""
        if self._tokens is None:
            self._tokens = collectives.all_gather(
                self.local, SEQ_DIM, self.region.group, self.length, gathered=self.wait()
            )
        return self._tokens


def gather_on_entry(module: nn.Module, region: SequenceParallel, overlaps: bool = False) -> None:
    """Let `module`, a tensor-parallel region, see the whole sequence.

    With `overlaps`, it starts before the tokens of other ranks arrive: its column-parallel layers multiply this rank's
    tokens meanwhile. In a graph the compiler splits the gather and the products. A module may have a `gather_kernel`,
    whose products read the tokens in another form, which is gathered instead.
    """

    def start(called: nn.Module, x: Tensor) -> Tensor:
        if x.dim() <= 2 or torch.compiler.is_compiling():
            return region.gather(x)
        if overlaps:
            return PendingGather(x, region).placeholder()
        kernel = vars(called).get("gather_kernel")
        return region.gather(x) if kernel is None else kernel.gathered_later(x, region)

    module.gathered = region
    module.register_forward_pre_hook(
        lambda called, args, kwargs: first_input(args, kwargs, partial(start, called)), with_kwargs=True
    )


def wrap_layers(layers: list[nn.Module], region: SequenceParallel) -> None:
    """Enter the region before the first of `layers` and leave it after the last."""
    layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: first_input(args, kwargs, region.enter), with_kwargs=True
    )
    layers[-1].register_forward_hook(lambda _, __, output: first_output(output, region.leave))


def run_whole(module: nn.Module, region: SequenceParallel) -> None:
    """Let `module`, between modules on sequence slices, see the whole sequence, computing the same on every rank."""

    def enter(x: Tensor) -> Tensor:
        if x.dim() > 2:
            return region.enter(x)
        return region.enter(x.unflatten(0, (-1, region.length))).flatten(0, 1)  # experts return [tokens, hidden]

    # In front of a hook of the module's own, which sums up the gradient of whole sequences.
    module.register_forward_pre_hook(
        lambda _, args, kwargs: first_input(args, kwargs, region.leave), with_kwargs=True, prepend=True
    )
    module.register_forward_hook(lambda _, __, output: _outputs_of_tokens(output, enter))


def _outputs_of_tokens(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to all that a module returns for a token, [batch, seq, ...]: DBRX returns a residual, too."""
    if not isinstance(output, tuple) or output[0].dim() <= 2:
        return first_output(output, change)
    first = output[0]

    def is_of_tokens(x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() == first.dim() and x.shape[:2] == first.shape[:2]

    return tuple(change(each) if is_of_tokens(each) else each for each in output)


def slice_other_tokens(layer: nn.Module, region: SequenceParallel) -> None:
    """Let `layer` see its slice of what it reads for each token, [batch, seq, ...], besides the hidden states."""
    signature = inspect.signature(layer.forward)
    names = [name for name in _OF_TOKENS if name in signature.parameters]

    def narrow(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        bound = signature.bind(*args, **kwargs)
        for name in names:
            if bound.arguments.get(name) is not None:
                bound.arguments[name] = region.enter(bound.arguments[name])
        return bound.args, bound.kwargs

    if names:
        layer.register_forward_pre_hook(narrow, with_kwargs=True)


def slice_positions(layer: nn.Module, region: SequenceParallel) -> None:
    """Let `layer`, which holds a slice of the sequence, see only the positions of that slice."""

    def own(x: Any, dim: int) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[dim] != region.length:
            return x
        share = pad_to_multiple(region.length, region.world_size) // region.world_size
        first = dist.get_rank(region.group) * share
        piece = x.narrow(dim, min(first, region.length), max(min(share, region.length - first), 0))
        missing = share - piece.shape[dim]
        return F.pad(piece, (0, 0) * (-dim - 1) + (0, missing)) if missing else piece

    def own_tables(tables: Any) -> Any:
        if isinstance(tables, (tuple, list)):  # cos and sin, [..., seq, features]
            return tuple(own(table, -2) for table in tables)
        return own(tables, -2)  # one table of complex numbers

    def own_positions(positions: Any) -> Any:
        region.positions = positions
        return own(positions, -1)

    changes = {"position_embeddings": own_tables, "position_ids": own_positions}
    names = list(inspect.signature(layer.forward).parameters)

    def narrow(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        changed = {name: changes[name](value) if name in changes else value for name, value in kwargs.items()}
        named = zip_longest(names[: len(args)], args)  # a forward that takes *args names fewer
        return tuple(changes[name](value) if name in changes else value for name, value in named), changed

    layer.register_forward_pre_hook(narrow, with_kwargs=True)


# (tokens of a part, device) -> [part], the positions of this rank's tokens in whole sequences
PositionsOfPart = Callable[[int, "torch.device | str | None"], Tensor]


def count_whole_sequences(model: nn.Module, layers: Iterable[nn.Module], positions: PositionsOfPart) -> None:
    """Let modules of `layers` that count the positions of their input count those of whole sequences."""
    modules = dict.fromkeys(each for layer in layers for each in layer.modules())
    counting = [module for module in modules if counts_positions(type(module))]
    methods = {cls: _methods_of(cls, positions) for cls in {type(module) for module in counting}}
    replace_modules(model, {module: derive(module, methods[type(module)]) for module in counting})


def _methods_of(cls: type[nn.Module], positions: PositionsOfPart) -> type[nn.Module]:
    forward = with_globals(cls.forward, {"torch": _Torch(positions)})
    return type(cls.__name__, (nn.Module,), {"forward": forward})


class _Torch:
    """What a forward reads from `torch`, where `arange` counts the tokens of this rank's part."""

    def __init__(self, positions: PositionsOfPart) -> None:
        self._positions = positions

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def arange(self, length: int, device: torch.device | str | None = None, **options: Any) -> Tensor:
        """Return [part], the positions in whole sequences of a part of `length` tokens."""
        return self._positions(length, device).to(**options)


# Names under which a cross-attention takes the hidden states of the encoder.
_MEMORY = ("key_value_states", "encoder_hidden_states")


class UlyssesAllToAll:
    """All-to-all exchange around attention in one sequence-parallel region. Copies of the model share it.

    Attributes:
        memory_length: tokens of the encoder's sequence, where the attention that runs now reads it; None where it reads
            the sequence of its queries.
    """

    def __init__(self, region: SequenceParallel) -> None:
        self.region = region
        self.memory_length: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UlyssesAllToAll:
        return self  # hooks of the copy tell this one of their calls

    def attach(self, attention: nn.Module) -> None:
        """Let an attention exchange heads for parts of the sequence.

        Where it is called as a cross-attention, it projects a slice of the encoder's sequence, [batch, memory, hidden],
        which is whole on every rank. T5's, which make a bias of relative positions, make that of whole sequences.
        """
        attention.sequence_exchange = self
        if hasattr(attention, "compute_bias"):
            attention.compute_bias = _bias_of_sequence.__get__(attention)

        def cut(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            name = next((name for name in _MEMORY if kwargs.get(name) is not None), None)
            self.memory_length = None if name is None else kwargs[name].shape[1]
            return args, kwargs if name is None else {**kwargs, name: self.region.split(kwargs[name])}

        attention.register_forward_pre_hook(cut, with_kwargs=True)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split heads, gather the sequence: [batch, heads, seq/tp, head_dim] -> [batch, heads/tp, seq, head_dim]."""
        size, length = self.region.world_size, self.region.length
        of_keys = length if self.memory_length is None else self.memory_length

        def exchanged(x: Tensor, tokens: int) -> Tensor:
            return collectives.all_to_all(repeated_for(x, size), 1, 2, self.region.group)[:, :, :tokens]

        return exchanged(query, length), exchanged(key, of_keys), exchanged(value, of_keys)

    @property
    def rank(self) -> int:
        """Number of this rank among those that exchange: it attends with the heads of that number."""
        return dist.get_rank(self.region.group)

    def own_heads(self, bias: Tensor | None, heads: int) -> Tensor | None:
        """Return the part of a bias [batch, all heads or 1, queries, keys] for this rank's `heads`."""
        if bias is None or bias.dim() < 4 or bias.shape[1] in (1, heads):
            return bias
        return bias.narrow(1, self.rank * heads, heads)

    def to_sequence(self, found: Tensor) -> Tensor:
        """Exchange attention output back: [batch, seq, heads/tp, head_dim] -> [batch, seq/tp, heads, head_dim]."""
        return collectives.all_to_all(collectives.pad_dim(found, 1, self.region.world_size), 1, 2, self.region.group)


def _bias_of_sequence(self: nn.Module, query_length: int, key_length: int, **options: Any) -> Tensor:
    """Compute T5's position bias, [1, heads, seq, seq], in a layer whose hidden states are a slice of a sequence."""
    length = self.sequence_exchange.region.length
    return type(self).compute_bias(self, length, length, **options)


def repeated_for(x: Tensor, size: int) -> Tensor:
    """Repeat heads of [batch, heads, ...] that are fewer than `size`, so that every rank gets one."""
    return x if x.shape[1] % size == 0 else x.repeat_interleave(size // x.shape[1], 1)


_FIELDS = "hidden_states"  # hidden_states, encoder_hidden_states, ...


class BlockedSequence(SequenceParallel):
    """Sequence-parallel region whose tokens are a `BlockedTensor` along the sequence: [batch, seq/blocks, hidden] each.

    Inside of a tensor-parallel region ranks have whole sequences, and each weight is computed in blocks of features.

    Args:
        is_cut: whether ranks have different blocks of the sequence; otherwise each of them has all.
    """

    sums_gradients = False

    def __init__(self, group: ProcessGroup, blocks: Blocks, is_cut: bool) -> None:
        super().__init__(group)
        self.is_cut, count = is_cut, blocks.sequence_count
        self.blocks = replace(blocks, count=count, local=own_blocks(count, group) if is_cut else range(count))

    @property
    def grad_group(self) -> ProcessGroup | None:
        """The ranks whose gradients of parameters between regions are partial sums; None if they are whole."""
        return self.group if self.is_cut else None

    def enter(self, x: Tensor) -> BlockedTensor:
        """Divide [batch, seq, hidden], the same on every rank, into this rank's blocks."""
        self.length = x.shape[SEQ_DIM]
        return self._divide(x)

    def gather(self, x: BlockedTensor) -> Tensor:
        """Join the blocks of all ranks: [batch, seq, hidden], the same on every rank; `f` sums its gradient.

        Also [batch * seq/blocks, hidden] -> [batch * seq, hidden], for layers that flatten both.
        """
        if x.dim() == 2:
            share = -(-self.length // self.blocks.count)
            return self._gather_whole(x.unflatten(0, (-1, share))).flatten(0, 1)
        return self._gather_whole(x)

    def reduce_scatter(self, x: BlockedTensor) -> BlockedTensor:
        """Add up blocks of features, each [batch, seq, hidden], and keep this rank's blocks of the sequence."""
        whole = reduce_from_blocks(x, self.group)
        if whole.dim() == 2:
            return self._divide(whole.unflatten(0, (-1, self.length))).flatten(0, 1)
        return self._divide(whole)

    def _divide(self, x: Tensor) -> BlockedTensor:
        return BlockedTensor(_Divide.apply(x, self), self.blocks)

    def _gather_whole(self, x: BlockedTensor) -> Tensor:
        return _Join.apply(self, self.length, *x.blocks)

    def parts_of(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's blocks of [batch, seq, hidden], padded with zeros, in memory of their own."""
        parts = collectives.pad_dim(whole, SEQ_DIM, self.blocks.count).chunk(self.blocks.count, SEQ_DIM)
        return tuple(parts[index].clone(memory_format=torch.contiguous_format) for index in self.blocks.local)

    def whole_of(self, parts: Sequence[Tensor], length: int) -> Tensor:
        """Return [batch, seq, hidden] from the blocks of all ranks, without padding."""
        if self.is_cut:
            own = torch.stack(parts)
            everyone = own.new_empty((self.blocks.count, *own.shape[1:]))
            collectives.all_gather_flat(everyone.view(-1), own.view(-1), group=self.group)
            parts = everyone.unbind()
        return torch.cat(parts, SEQ_DIM).narrow(SEQ_DIM, 0, length).contiguous()


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, region: BlockedSequence) -> tuple[Tensor, ...]:
        ctx.region, ctx.length = region, whole.shape[SEQ_DIM]
        return region.parts_of(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.region.whole_of(grads, ctx.length), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: BlockedSequence, length: int, *parts: Tensor) -> Tensor:
        ctx.region = region
        return collectives.without_base(region.whole_of(parts, length))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.region.parts_of(grad)


def use_parameters_by_block(layers: Iterable[nn.Module], region: BlockedSequence) -> None:
    """Let modules between regions read an alias of each parameter for each block; see `Blocks.use`."""
    blocks = region.blocks

    def aliases_of(module: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
        is_between = any(isinstance(x, BlockedTensor) and x.region is blocks for x in inputs)
        if not is_between or not torch.is_grad_enabled():
            return {}
        trained = {name: each for name, each in module._parameters.items() if each is not None and each.requires_grad}
        return {name: BlockedTensor([blocks.use(each) for _ in blocks.local], blocks) for name, each in trained.items()}

    for module in dict.fromkeys(each for layer in layers for each in layer.modules()):
        if any(parameter is not None for parameter in module._parameters.values()):
            alias_parameters(module, aliases_of)


def return_whole_states(model: nn.Module, region: BlockedSequence) -> None:
    """Let `model` return the hidden states of whole sequences, if all ranks have all blocks of them."""

    def join(_: nn.Module, __: tuple, outputs: Any) -> Any:
        for name, value in outputs.items() if isinstance(outputs, Mapping) else ():
            if name.endswith(_FIELDS) and isinstance(value, tuple):
                outputs[name] = tuple(region.gather(x) if isinstance(x, BlockedTensor) else x for x in value)
        return outputs

    model.register_forward_hook(join)
