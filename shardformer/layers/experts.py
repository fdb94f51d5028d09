"""Expert parallelism: find the modules that hold experts, shard them, and send tokens to the ranks that hold theirs.

transformers 5 stacks the experts of a layer in parameters [experts, ...] of one module, whose forward takes hidden
states [tokens, hidden], experts [tokens, k] and weights [tokens, k]. Any family with such a module can be sharded: a
rank holds an equal share of the experts. Tensor parallelism does not shard these modules.

The all-to-all is that of GShard (arXiv 2006.16668, section 3.3) and DeepSpeed-MoE (arXiv 2201.05596, section 5.3)
without fixed sizes: as in Megatron-Core, ranks first exchange row counts, so that no token is padded or dropped.

Biases of routers balance experts without an auxiliary loss (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437). A bias is
added to scores only to choose experts. After each step it grows for experts that had fewer tokens than the mean.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardformer.distributed.collectives import (
    RowExchange,
    all_to_all_uneven,
    gather_from_region,
    local_slice,
    split_to_region,
)
from shardformer.matmul.kernel import LateGradients
from shardformer.shard_config import ShardConfig
from shardformer.shard_spec import EXPERTS, Part, ShardSpec, annotate, shard_parameter
from shardformer.utils.derived_modules import derive, replace_modules
from shardformer.utils.untraced import in_backward, untraced

# (hidden states [tokens, hidden], experts [tokens, k], weights [tokens, k]) -> [tokens, hidden]
ExpertsForward = Callable[[Tensor, Tensor, Tensor], Tensor]


class TokenDispatcher:
    """Sends tokens to the ranks that hold their experts, and combines the results.

    A choice with the number `num_experts` selects no expert and adds nothing.

    Args:
        num_experts: total over all ranks; the ranks hold equal shares, in order.
        tp_group: tensor-parallel ranks that see the same tokens, so that each sends a slice of them; None if each rank
            sees different tokens.
        meanwhile: called while tokens are on their way; None for nothing to do.
        capacity: how many rows a rank sends to each one where gradients are wanted, as a multiple of an equal share of
            the most that a rank has; None for those that the device counts, on which the host waits.
        may_skip: whether there are choices that select no expert.
    """

    def __init__(
        self,
        num_experts: int,
        group: ProcessGroup,
        tp_group: ProcessGroup | None,
        meanwhile: Callable[[], None] | None = None,
        capacity: float | None = None,
        may_skip: bool = True,
    ) -> None:
        self.num_experts, self.group, self.tp_group, self.meanwhile = num_experts, group, tp_group, meanwhile
        self.capacity, self.may_skip, self.num_ranks = capacity, may_skip, dist.get_world_size(group)
        self.weights: Mapping[str, Tensor | None] = {}  # whose gradients are computed while those of tokens go back
        self.late = LateGradients()
        self.missing: Tensor | None = None  # the most rows over those that a rank sends to one, on the device

    @untraced
    def __call__(
        self, experts: ExpertsForward, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; all ranks of the group must call this, with any number of tokens.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index, top_k_weights: experts of each token, and their weights, [tokens, k].
        """
        tp_group = self.tp_group
        if tp_group is None:
            return self._dispatch(experts, hidden_states, top_k_index, top_k_weights)
        index = local_slice(top_k_index, 0, tp_group, fill=self.num_experts)
        hidden, weights = (split_to_region(each, 0, tp_group) for each in (hidden_states, top_k_weights))
        return gather_from_region(self._dispatch(experts, hidden, index, weights), 0, tp_group, len(hidden_states))

    def _dispatch(self, experts: ExpertsForward, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self.has_slots and not len(hidden):  # a rank without tokens has slots as well: it sends one of no weight
            hidden, index, weights = (F.pad(each, (0, 0, 0, 1)) for each in (hidden, index, weights))
            return self._dispatch(experts, hidden, index, weights)[:0]
        chosen = index.reshape(-1)  # (token, choice) pairs, flattened
        # Not `bincount`, which waits for a GPU to learn the size of its result.
        counts = chosen.new_zeros(self.num_experts + 1).scatter_add_(0, chosen, torch.ones_like(chosen))
        counts = counts[: self.num_experts]
        arriving = torch.empty_like(counts)  # [ranks * experts here]
        dist.all_to_all_single(arriving, counts, group=self.group)
        order = chosen.argsort(stable=True)  # sorted by expert; queued before the host waits
        if self.has_slots:
            sent = received = None
            order, places, experts_here, is_over = self._in_slots(chosen, counts, arriving, order)
            weights, skips = weights.masked_fill(is_over, math.nan), self.may_skip
        else:
            totals = torch.stack([counts, arriving]).view(2, self.num_ranks, -1).sum(-1)
            # Rows to and from each rank. Sizes of tensors are numbers of the host: a layer waits for the device here.
            sent, received = totals.tolist()
            places, order = _inverse(order), order[: sum(sent)]  # choices of no expert come last
            experts_here = torch.arange(len(arriving) // self.num_ranks, device=order.device).repeat(self.num_ranks)
            experts_here = experts_here.repeat_interleave(arriving, output_size=sum(received))
            skips = len(order) < len(places)

        exchange = RowExchange(sent, received, self.group)
        rows = exchange.start(_SentRows.apply(hidden, order, places, skips))
        if self.meanwhile is not None:
            self.meanwhile()
        self.late.mark(self.weights)
        rows = exchange.finish(rows)
        found = _run_experts(experts, rows, experts_here)
        back = all_to_all_uneven(found, received, sent, self.group)

        return _combined(_ReturnedRows.apply(back, order, places, skips), weights, hidden.dtype)

    @property
    def has_slots(self) -> bool:
        """Whether ranks exchange as many rows whatever is chosen."""
        return self.capacity is not None and torch.is_grad_enabled()

    def _most(self, number: int) -> int:
        most = torch.tensor(number)  # on the CPU: reading the result must not wait for the device
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def _in_slots(
        self, chosen: Tensor, counts: Tensor, arriving: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give each rank as many slots, without waiting for the device; those without a row hold any other.

        Return the choice in each slot, the slot of each choice, the expert of each slot that arrives (their number
        where it has no row), and whether a rank has more rows than slots. There is one choice at least.
        """
        most = self._most(len(chosen))
        slots = min(most, math.ceil(self.capacity * most / self.num_ranks))
        sent, arriving = counts.view(self.num_ranks, -1).sum(1), arriving.view(self.num_ranks, -1)
        first, numbers = sent.cumsum(0) - sent, torch.arange(slots, device=chosen.device)
        inside = order[(first.unsqueeze(1) + numbers).clamp(max=len(order) - 1)].flatten()
        ranks = chosen // arriving.shape[1]
        places = (_inverse(order) - first[ranks.clamp(max=self.num_ranks - 1)]).clamp(max=slots - 1)
        places = (ranks * slots + places).clamp(max=len(inside))  # no slot for a choice of no expert
        over = sent.max() - slots
        self.missing = over if self.missing is None else torch.maximum(self.missing, over)
        here = torch.searchsorted(arriving.cumsum(1), numbers.expand(self.num_ranks, -1).contiguous(), right=True)
        return inside, places, here.flatten(), over > 0


def overfull(model: nn.Module) -> Iterator[str]:
    """Yield a sentence for each layer that had more rows than slots since the last call; waits for the device."""
    for path, experts in expert_modules(model):
        missing, experts.dispatcher.missing = experts.dispatcher.missing, None
        if missing is not None and missing > 0:
            factor = f"expert_rank_capacity_factor={experts.dispatcher.capacity}"
            yield f"{path} had {int(missing)} rows too many for one rank under {factor}; use a larger one, or None"


class _SentRows(torch.autograd.Function):
    """[tokens, hidden] -> [rows, hidden], the token of each choice that is sent.

    The gradient of a token gathers those of its choices, too: a sum by index sorts them once more, and adds in 16 bit.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, places: Tensor, skips: bool = False) -> Tensor:
        """Gather; `order`: [rows] choices, `places`: [tokens * k], the inverse; `skips`: some choices have no row."""
        ctx.save_for_backward(places)
        ctx.skips = skips
        ctx.num_choices = len(places) // max(len(hidden), 1)
        return hidden.index_select(0, order if ctx.num_choices < 2 else order // ctx.num_choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        found = _by_choice(grad, places, ctx.skips)
        return found if ctx.num_choices < 2 else found.unflatten(0, (-1, ctx.num_choices)).sum(1), None, None, None


class _ReturnedRows(torch.autograd.Function):
    """[rows, hidden] -> [tokens * k, hidden], zero for choices of no expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor, skips: bool = False) -> Tensor:
        """Gather; `order`, `places` and `skips` as in `_SentRows`."""
        ctx.save_for_backward(order)
        return _by_choice(rows, places, skips)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


def _combined(choices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum weighted choices, [tokens * k, hidden] and [tokens, k] -> [tokens, hidden]."""
    pairs = choices.unflatten(0, weights.shape)
    if pairs.dtype != weights.dtype:
        return (pairs * weights.unsqueeze(-1)).sum(1).to(dtype)
    return torch.bmm(weights.unsqueeze(1), pairs).squeeze(1).to(dtype)  # without weighted pairs in memory


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _by_choice(rows: Tensor, places: Tensor, skips: bool) -> Tensor:
    """Return the row of each choice; one of zeros, added at the end, for those that were not sent."""
    if skips:
        rows, places = F.pad(rows, (0, 0, 0, 1)), places.clamp(max=len(rows))
    return rows.index_select(0, places)


class ExpertCapacity:
    """Capacity limit of experts (GShard, arXiv 2006.16668, section 2.2, with a sequence as a group).

    An expert takes ceil(factor * length * k / experts) choices of each sequence of a batch. The first choices of all
    tokens go before the second ones, and earlier tokens before later ones. Choices over the limit add nothing. The
    result does not depend on the layout, because sequences are whole wherever the limit is applied.

    Args:
        factor: capacity as a multiple of a fair share.
        skips: whether a choice over the limit may get the number `num_experts`; else its weight becomes zero.
    """

    def __init__(self, factor: float, num_experts: int, skips: bool) -> None:
        self.factor, self.num_experts, self.skips = factor, num_experts, skips
        self._length = 0  # of the sequences in the current pass

    def attach(self, block: nn.Module, experts: nn.Module) -> None:
        """Drop choices over the limit before `experts` see them; `block`, which contains `experts`, sees sequences."""
        block.register_forward_pre_hook(self._note, with_kwargs=True)
        experts.register_forward_pre_hook(self._drop)

    def kept(self, index: Tensor) -> Tensor:
        """Return [tokens, k] bool: whether each choice has room; `index`: [tokens, k] experts, whole sequences."""
        num_choices = index.shape[1]
        limit = math.ceil(self.factor * self._length * num_choices / self.num_experts)
        # [sequences, k * length], in order of priority.
        queue = index.unflatten(0, (-1, self._length)).transpose(1, 2).flatten(1)
        by_expert = queue.argsort(dim=1, stable=True)
        ordered = queue.gather(1, by_expert)
        place = torch.arange(queue.shape[1], device=queue.device) - torch.searchsorted(ordered, ordered)
        has_room = torch.empty_like(queue, dtype=torch.bool).scatter_(1, by_expert, place < limit)
        return has_room.unflatten(1, (num_choices, -1)).transpose(1, 2).flatten(0, 1)

    def _note(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.dim() != 3:
            raise ValueError(
                f"expert_capacity_factor={self.factor} counts the tokens of a sequence, which {type(block).__name__} "
                f"does not tell apart in its {hidden.dim()}-d input; use expert_capacity_factor=None"
            )
        self._length = hidden.shape[1]

    def _drop(self, _: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = args
        over = ~self.kept(index)
        index = index.masked_fill(over, self.num_experts) if self.skips else index
        return hidden, index, weights.masked_fill(over, 0.0)


def _run_experts(experts: ExpertsForward, rows: Tensor, chosen: Tensor) -> Tensor:
    """Run the local experts on [rows, hidden]; `chosen` gives the expert of each row."""
    count = len(rows)
    if count == 0:
        # Run one dummy row and drop its output: the experts must take part in the backward pass, which other ranks
        # wait for, and get zero gradients like any expert without tokens.
        rows, chosen = F.pad(rows, (0, 0, 0, 1)), chosen.new_zeros(1)
    found = experts(rows, chosen.unsqueeze(1), rows.new_ones(len(rows), 1))
    return found if count else found[:0]


def _grouped_forward(experts: nn.Module, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run experts in grouped products: [tokens, hidden], choices and weights [tokens, k], -> [tokens, hidden].

    transformers' own has weighted choices in memory, and gradients by index, which sort once more. Rows that another
    rank has sent, of one choice each, get their weights there.
    Rows of no expert come last, where the products read nothing and leave any values. Nobody reads these, but biases
    and norms, which add up gradients of rows, must not.
    """
    from transformers.integrations.moe import _grouped_linear

    by_expert, order = chosen.reshape(-1).sort(stable=True)
    places, numbers = _inverse(order), torch.arange(experts.num_experts, device=order.device)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    dispatcher = getattr(experts, "dispatcher", None)
    has_rest = dispatcher is not None and dispatcher.has_slots and (experts.has_bias or has_norm)
    rest = (by_expert == len(numbers)).unsqueeze(1) if has_rest else None

    def product(x: Tensor, name: str) -> Tensor:
        bias = getattr(experts, f"{name}_bias")[by_expert.clamp(max=len(numbers) - 1)] if experts.has_bias else None
        weight = getattr(experts, name)
        if dispatcher is not None and dispatcher.late.has(name) and x.dtype == weight.dtype and _has_kernel(x.device):
            out = _grouped_linear(x, weight.detach(), ends, bias, experts.is_transposed)
            x = dispatcher.late.leave(name, out, x, ends, experts.is_transposed)
        else:
            x = _grouped_linear(x, weight, ends, bias, experts.is_transposed)
        return x if rest is None else x.masked_fill(rest, 0.0)

    x = _SentRows.apply(rows, order, places)
    x = experts._apply_gate(product(x, "gate_up_proj")) if experts.has_gate else experts.act_fn(product(x, "up_proj"))
    x = product(x, "down_proj")
    if has_norm:
        x = experts.post_expert_norm(x)
        x = x if rest is None else x.masked_fill(rest, 0.0)
    choices = _ReturnedRows.apply(x.to(rows.dtype), order, places)
    return choices if dispatcher is not None else _combined(choices, weights, rows.dtype)


def _has_kernel(device: torch.device) -> bool:
    """Return whether torch has grouped products for a device, which transformers then calls."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


_KINDS = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate"}
_KINDS |= {"has_post_expert_norm"}


def has_known_forward(experts: nn.Module) -> bool:
    """Return whether these experts can run in grouped products as here: no kind that a later release adds, no own."""
    from transformers.integrations.moe import use_experts_implementation

    is_native = "forward" not in vars(experts) and hasattr(experts.forward, "__wrapped__")
    kinds = inspect.signature(use_experts_implementation).parameters.keys()
    return is_native and hasattr(experts, "has_gate") and kinds <= _KINDS


class SharedExpert:
    """The expert of a block that sees all tokens, which computes while these are on their way to the others.

    So it does in blocks that call it after the others, with their own input. Its result is kept until then.

    Args:
        block: the block, which replaces the shared expert by one that asks here.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block, self.name = block, name
        self._input: Tensor | None = None  # of the block, until the shared expert has seen it
        self._kept: tuple[Tensor, Tensor] | None = None
        block.register_forward_pre_hook(self._note, with_kwargs=True)
        shared = derive(getattr(block, name), _Beside)
        shared.beside = self
        replace_modules(block, {getattr(block, name): shared})

    @staticmethod
    def name_in(block: nn.Module) -> str | None:
        """Return the name of the shared expert that a block calls after its other experts; None if it has none."""
        code = getattr(inspect.unwrap(type(block).forward), "__code__", None)
        names = code.co_names if code is not None else ()  # in the order of their first use
        shared = next((name for name in _SHARED if name in names and _takes_tokens(getattr(block, name, None))), "")
        return shared if "experts" in names[: names.index(shared) if shared else 0] else None

    def compute(self) -> None:
        """Compute it, and keep the result."""
        given, self._input = self._input, None
        self._kept = None if given is None else (given, getattr(self.block, self.name).computed(given))

    def take(self, x: Tensor) -> Tensor | None:
        """Return the result for the block's input, once; None for any other input."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is x else None

    def _note(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._kept = None
        # Compiled layers run it where they call it, within their graph.
        self._input = None if torch.compiler.is_compiling() else next(iter((*args, *kwargs.values())), None)


class _Beside(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        found = None if torch.compiler.is_compiling() else self.beside.take(hidden_states)
        return super().forward(hidden_states) if found is None else found

    def computed(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


_SHARED = ("shared_experts", "shared_expert", "shared_mlp")


def _takes_tokens(module: Any) -> bool:
    """Return whether a module's forward needs hidden states, and nothing else."""
    if not isinstance(module, nn.Module):
        return False
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters) == 1


INDICES = ("top_k_index", "router_indices")
_WEIGHTS = ("top_k_weights", "routing_weights")


def is_experts(module: nn.Module) -> bool:
    """Return whether the module holds stacked experts that are called with tokens, choices and weights."""
    count = getattr(module, "num_experts", None)
    stacked = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(count, int) or not any(each.dim() == 3 for each in stacked):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    is_called_so = len(names) == 3 and names[1] in INDICES and names[2] in _WEIGHTS
    return is_called_so and all(each.dim() > 0 and each.shape[0] == count for each in stacked)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return path and module of the experts of every layer."""
    return ((path, module) for path, module in model.named_modules() if is_experts(module))


def num_experts(experts: nn.Module) -> int:
    """Return the number of experts of a layer, over all ranks."""
    dispatcher = getattr(experts, "dispatcher", None)
    return experts.num_experts if dispatcher is None else dispatcher.num_experts


def shard_experts(model: nn.Module, config: ShardConfig) -> None:
    """Keep this rank's share of the experts, in place, and dispatch tokens to the ranks that hold their experts."""
    size, factor = config.expert_parallel_size, config.expert_capacity_factor
    if size == 1 and factor is None:
        return
    sharded = {}
    for path, experts in list(expert_modules(model)):
        block = model.get_submodule(path.rpartition(".")[0])
        if factor is not None:
            ExpertCapacity(factor, experts.num_experts, skips=size > 1).attach(block, experts)
        if size > 1:
            sharded[experts] = _shard_experts_of(experts, config)
            if name := SharedExpert.name_in(block):
                sharded[experts].dispatcher.meanwhile = SharedExpert(block, name).compute
    replace_modules(model, sharded)


def run_whole_experts(model: nn.Module) -> None:
    """Run layers' experts, all of which this rank has, with fewer passes over their rows."""
    known = (experts for _, experts in expert_modules(model) if has_known_forward(experts))
    replace_modules(model, {experts: derive(experts, _WholeExperts) for experts in known})


class _WholeExperts(nn.Module):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        is_grouped = self.config._experts_implementation == "grouped_mm" and len(hidden_states) > 0
        if not is_grouped or torch.compiler.is_compiling():  # compiled layers fuse these passes themselves
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return _grouped_forward(self, hidden_states, top_k_index, top_k_weights)


class _ShardedExperts(nn.Module):
    """Sends tokens to the ranks of their experts, and runs the native forward, or the object's own, on those here."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        native, weights = self.forward_of_experts or super().forward, {}
        if self.has_known_forward and self.config._experts_implementation == "grouped_mm":
            native = partial(_grouped_forward, self)
            weights = {} if hasattr(self, "kernel") else self._parameters  # products in FP8 have nodes of their own
        self.dispatcher.weights = weights
        return self.dispatcher(native, hidden_states, top_k_index, top_k_weights)


def _shard_experts_of(experts: nn.Module, config: ShardConfig) -> nn.Module:
    """Shard the parameters of `experts`; return the module that replaces it."""
    group, tp_size, count = config.expert_parallel_process_group, config.tensor_parallel_size, experts.num_experts
    tp_rank = dist.get_rank(config.group) if tp_size > 1 else 0
    place, ranks = dist.get_rank(group) * tp_size + tp_rank, dist.get_world_size(group) * tp_size
    # Each tensor-parallel rank sends different tokens, so each has a partial gradient.
    partial = config.group if tp_size > 1 else None
    for name, parameter in list(experts._parameters.items()):
        if parameter is not None:
            spec = ShardSpec(tuple(parameter.shape), 0, (Part(count),), place, ranks, copies=tp_size, axis=EXPERTS)
            setattr(experts, name, shard_parameter(parameter, spec, partial))
    for child in experts.children():  # a norm after all experts
        for parameter in child.parameters():
            annotate(parameter, ShardSpec(tuple(parameter.shape), rank=tp_rank, world_size=tp_size), partial)
    experts.num_experts = count // dist.get_world_size(group)
    sees_same = tp_size > 1 and not config.uses_ulysses
    new = derive(experts, _ShardedExperts)
    new.has_known_forward = has_known_forward(experts)
    new.forward_of_experts = vars(experts).pop("forward", None)
    slots, may_skip = config.expert_rank_capacity_factor, sees_same or config.expert_capacity_factor is not None
    tp_group = config.group if sees_same else None
    new.dispatcher = TokenDispatcher(count, group, tp_group, capacity=slots, may_skip=may_skip)
    return new


_NAMES = ("e_score_correction_bias", "expert_bias")


def router_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the bias of each layer's router, [experts] or [1, experts], by the path of the layer's experts."""
    return {path: getattr(owner, name) for path, (owner, name) in _owners(model).items()}


def keep_biases_from_optimizer(model: nn.Module) -> None:
    """Turn biases that are parameters into fp32 buffers: 16 bits would round small updates away."""
    for owner, name in _owners(model).values():
        if name in owner._parameters:
            value = owner._parameters.pop(name).detach()
            owner.register_buffer(name, value.float() if not value.is_meta else value)


@torch.no_grad()
def update_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move a bias, in place, by `rate` against the sign of each expert's excess load.

    Args:
        bias: [experts] or [1, experts].
        load: tokens of each expert since the last step, over all ranks, [experts].
        rate: step size; the paper uses 0.001.
    """
    excess = load.double() - load.double().mean()
    bias.sub_(rate * excess.sign().to(bias).view_as(bias))


def _owners(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module that holds the bias and the bias's name, by the path of the experts."""
    found = {}
    for path, experts in expert_modules(model):
        inside = {id(each) for each in experts.modules()}
        for owner in model.get_submodule(path.rpartition(".")[0]).modules():
            for name in _NAMES if id(owner) not in inside else ():
                bias = getattr(owner, name, None)
                if isinstance(bias, Tensor) and bias.numel() == num_experts(experts):
                    found[path] = owner, name
    return found


class ExpertLoad:
    """Counts of tokens per expert, of the layers on this rank. Copies of a model share it.

    A token counts once for each of its choices, whether or not the expert has room for it. Padding does not count.

    Args:
        mask_of: inputs of the model's forward -> attention mask of this rank's tokens, or None.

    Attributes:
        sizes: path of the experts of a layer -> number of experts.
        counts: path of the experts of a layer -> [experts], int64; grows with every pass.
    """

    def __init__(self, model: nn.Module, mask_of: Callable[[Mapping[str, Any]], Tensor | None]) -> None:
        self.sizes: dict[str, int] = {}
        self.counts: dict[str, Tensor] = {}
        self._is_counting, self._mask, self._mask_of = False, None, mask_of
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for path, experts in expert_modules(model):
            self.sizes[path] = num_experts(experts)
            # Before a capacity drops choices.
            experts.register_forward_pre_hook(partial(self._count, path), prepend=True, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertLoad:
        return self

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of forward passes in this context, but not of their recomputation."""
        before, self._is_counting = self._is_counting, True
        try:
            yield
        finally:
            self._is_counting = before

    def take(self) -> dict[str, Tensor]:
        """Return the counts, and begin to count from zero."""
        taken, self.counts = self.counts, {}
        return taken

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._is_counting:
            self._mask = self._mask_of(kwargs)

    @untraced
    def _count(self, path: str, experts: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._is_counting or in_backward():
            return
        index = args[1] if len(args) > 1 else next(kwargs[name] for name in INDICES if name in kwargs)
        if path not in self.counts:
            self.counts[path] = torch.zeros(self.sizes[path], dtype=torch.int64, device=index.device)
        weights = torch.ones_like(index, dtype=torch.int64)
        if self._mask is not None and self._mask.numel() == len(index):
            weights = weights * (self._mask.reshape(-1, 1) != 0)  # [tokens, 1]
        self.counts[path].scatter_add_(0, index.reshape(-1).long(), weights.reshape(-1))
