"""Sharded entries in transformers' attention and mask registries, and what their kernels read of a module.

One function wraps every attention of a sharded model that goes through the registry: it does the sequence exchange of
`all_to_all`, gives dropout a random stream per rank, and calls the kernel. The mask function is registered under the
same name, because transformers silently drops the padding mask for a name that has no mask function. Flash kernels
find their package by `module.config._attn_implementation`, so they get a module with the kernel's own name there.
Sinks (arXiv 2309.17453) are learned scores [heads] without a value: an argument `s_aux`, or `module.sinks` if eager.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from shardformer.attention.backend import (
    BACKEND_OF_ENTRY,
    FLASH_2,
    FLASH_3,
    SDPA,
    AttentionNeeds,
    capability_of,
    choose_backend,
    keeps_scores,
    log_once,
)
from shardformer.distributed.blocks import joined_blocks
from shardformer.distributed.collectives import gather_from_region
from shardformer.distributed.random import in_parallel_region
from shardformer.distributed.sequence_parallel import UlyssesAllToAll
from shardformer.matmul.kernel import runs_on

PARAMETER = "sinks"
_ARGUMENT = "s_aux"


def with_own_sinks(kernel: Callable[..., Any], arguments: Mapping[str, Any], rank: int) -> Callable[..., Any]:
    """Return a kernel that takes the sinks of this rank's heads, where heads were exchanged for parts of sequences.

    Args:
        kernel: (module, query, ...), query: [batch, heads of this rank, seq, head_dim].
        arguments: with which it will be called; without sinks it is returned as it is.
    """
    return kernel if arguments.get(_ARGUMENT) is None else partial(_call_with_sinks, kernel, rank)


def _call_with_sinks(
    kernel: Callable[..., Any], rank: int, module: nn.Module, query: Tensor, *args: Any, s_aux: Tensor, **kwargs: Any
) -> Any:
    heads = query.shape[1]
    own = s_aux.narrow(0, rank * heads, heads)
    return kernel(View(module, sinks=own), query, *args, s_aux=own, **kwargs)


Kernel = Callable[..., Any]


def reads_its_name(implementation: str) -> bool:
    """Return whether the named kernel looks itself up by name: flash kernels and those of the hub (owner/kernel)."""
    return ("flash" in implementation or "/" in implementation) and not implementation.startswith("context_")


def under_its_name(kernel: Kernel, implementation: str) -> Kernel:
    """Return `kernel` for modules whose configuration may have another name than `implementation`."""
    return partial(_call, kernel, implementation)


def _call(kernel: Kernel, implementation: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if implementation == FLASH_3 and kwargs.get("dropout"):
        log_once(type(module).__name__, f"drops no attention weights: {FLASH_3} has no dropout; use {FLASH_2}")
    return kernel(View(module, config=View(module.config, _attn_implementation=implementation)), *args, **kwargs)


class View:
    """An object with some attributes replaced; the object itself stays as it is."""

    def __init__(self, viewed: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed"], name)


_PREFIX = "sharded_"


class RegisteredName(str):
    """Name of an entry of this package in the registries, which also equals the name of the kernel that it runs.

    Models compare the configured name, to apply what that kernel cannot: sparse attention masks scores for "sdpa" and
    "eager" alone. They must decide as with the kernel itself. Registries find the entry by its hash.

    Args:
        prefix: marks the names that this package registers.
        implementation: the name that the model had, which may be of this package too.

    Attributes:
        kernel: the name of the kernel.
        entry: this name, as a plain string.
    """

    kernel: str
    entry: str

    def __new__(cls, prefix: str, implementation: str) -> RegisteredName:
        """Create the name; a str gets its characters here."""
        name = super().__new__(cls, prefix + implementation)
        name.kernel, name._arguments = getattr(implementation, "kernel", implementation), (prefix, implementation)
        name.entry = prefix + implementation  # a plain str: torch.compile traces no method of a derived one
        return name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and (self.entry == other or self.kernel == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __getnewargs__(self) -> tuple[str, str]:
        return self._arguments


def use_sharded_attention(
    model: nn.Module,
    tp_rank: int | None,
    exchange: UlyssesAllToAll | None = None,
    exchanging: Iterable[nn.Module] = (),
) -> None:
    """Route every attention of `model` that goes through the registry to a kernel with per-rank dropout.

    Args:
        tp_rank: whose dropout masks this rank draws; None to draw from the model's own stream, as without sharding.
        exchange: of heads for parts of the sequence; None for none.
        exchanging: the layers whose attention does so.

    The kernel stays the one the model was built with (SDPA by default). Models that do not use the registry stay
    unchanged: their policies say how their attention dropout is made parallel.
    """
    within = {module for layer in exchanging for module in layer.modules()}
    for module in routed_modules(model, _PREFIX, _register):
        module.sharded_attention_rank, module.sequence_exchange = tp_rank, None
        if exchange is not None and module in within:
            exchange.attach(module)


def recompute_attention(model: nn.Module) -> None:
    """Recompute attention selectively: do not keep what grows with the square of the sequence length.

    Attention kernels that would keep their scores for the backward pass run again there; fused kernels keep none. See
    arXiv 2205.05198, section 5.
    """
    for module in routed_modules(model, _PREFIX, _register):
        module.recomputes_attention = True


def routed_modules(
    model: nn.Module,
    prefix: str,
    register: Callable[[str, str], None],
    within: Collection[nn.Module] | None = None,
) -> Iterator[nn.Module]:
    """Yield the modules that choose a kernel by name, after replacing the name by one with `prefix`.

    Args:
        prefix: marks the names that this package registers.
        register: (new name, the model's name) -> None; enters the new name in the registries.
        within: the modules that are routed, where others keep their kernel; None for all.
    """
    configs: dict[int, tuple[Any, str]] = {}  # an outer configuration overwrites the names of those inside it
    modules = []
    for module in model.modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation is None or not uses_registry(module):
            continue
        configs.setdefault(id(config), (config, implementation))
        if within is None or module in within:
            modules.append(module)
    routed = {id(module.config) for module in modules}
    for key, (config, implementation) in configs.items():
        if key in routed and not implementation.startswith(prefix):
            name = RegisteredName(prefix, implementation)
            register(name.entry, implementation)
            configs[key] = config, name
    name_kernels(model, configs.values())
    yield from modules


def name_kernels(model: nn.Module, names: Iterable[tuple[Any, str]]) -> None:
    """Set the names of kernels in copies of configurations: the script may build other models from its own objects.

    Args:
        names: configurations and the names for them, outer ones first: these set the names inside them too.
    """
    from transformers import PreTrainedConfig

    names = list(names)
    if all(config._attn_implementation is name for config, name in names):
        return
    copies: dict[int, Any] = {}  # id of an object -> its copy; models and their parts share configurations
    for module in model.modules():
        for attribute, value in module.__dict__.items():
            if isinstance(value, PreTrainedConfig):
                module.__dict__[attribute] = copy.deepcopy(value, copies)
    for config, name in names:
        copies[id(config)]._attn_implementation = name


def uses_registry(module: nn.Module) -> bool:
    """Return whether the module uses the registry; others compare the configured name, which must not change."""
    return getattr(module, "attends_by_registry", False) or hasattr(
        sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"
    )


def _register(name: str, implementation: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _sharded(implementation))
    AttentionMaskInterface.register(name, masks_of(implementation))


def masks_of(implementation: str) -> Callable[..., Any]:
    """Return a function that builds masks as the one that transformers has for a kernel when it is called."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    entry = _entry_of(implementation)
    backend = BACKEND_OF_ENTRY.get(entry)
    own = None if backend is None else backend.masks
    if callable(own):
        return own
    return lambda *args, **kwargs: ALL_MASK_ATTENTION_FUNCTIONS[own or entry](*args, **kwargs)


def _sharded(implementation: str) -> Any:
    def sharded_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """query, key, value: [batch, local heads, seq, head_dim]; output: [batch, seq, local heads, head_dim]."""
        exchange = getattr(module, "sequence_exchange", None)
        if exchange is None:
            return call_kernel(implementation, module, query, key, value, attention_mask, **kwargs)
        query, key, value = exchange.to_heads(query, key, value)
        attention_mask = exchange.own_heads(attention_mask, query.shape[1])
        if hasattr(module, "num_key_value_groups"):  # key/value heads may have been repeated
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        if "position_bias" in kwargs:  # T5's cross-attention has one of zeros, for its slices
            is_cross = exchange.memory_length is not None
            kwargs["position_bias"] = None if is_cross else exchange.own_heads(kwargs["position_bias"], query.shape[1])
        if kwargs.get("position_ids") is not None:  # flash-attn finds packed documents by them, in the whole sequence
            kwargs["position_ids"] = exchange.region.positions
        found, weights = call_kernel(implementation, module, query, key, value, attention_mask, **kwargs)
        return exchange.to_sequence(found), weights

    return sharded_attention


def call_kernel(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    around: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a kernel, or `around` it; dropout draws from a per-rank stream if ranks hold different heads."""
    kernel = kernel_named(implementation, module)
    if (exchange := getattr(module, "sequence_exchange", None)) is not None:
        kernel = with_own_sinks(kernel, kwargs, exchange.rank)
    if around is not None:
        kernel = partial(around, kernel)
    recomputes = getattr(module, "recomputes_attention", False) and torch.is_grad_enabled()
    if recomputes and keeps_scores(implementation, query, attention_mask, **kwargs):
        kernel = partial(checkpoint, kernel, use_reentrant=False, preserve_rng_state=bool(kwargs.get("dropout")))
    # If all ranks run all heads, their dropout masks must be equal; a single rank keeps using its own stream.
    rank = getattr(module, "sharded_attention_rank", None)
    if not kwargs.get("dropout") or rank is None or getattr(module, "attention_is_replicated", False):
        return kernel(module, query, key, value, attention_mask, **kwargs)

    def of_query(query: Tensor) -> tuple[Tensor, Tensor | None]:
        return kernel(module, query, key, value, attention_mask, **kwargs)

    return in_parallel_region(rank, of_query, query)


def kernel_named(implementation: str, module: nn.Module) -> Any:
    """Return the kernel for a name; `eager` is not in the registry but in the module of the model's class."""
    entry = _entry_of(implementation)
    if entry == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    backend = BACKEND_OF_ENTRY.get(entry)
    if backend is not None and backend.kernel is not None:
        return backend.kernel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernel = ALL_ATTENTION_FUNCTIONS[entry]
    return under_its_name(kernel, entry) if reads_its_name(entry) else kernel


def _entry_of(implementation: str) -> str:
    """Return the name of the very entry: one of this package also equals the name of the kernel that it runs."""
    return getattr(implementation, "entry", implementation)


def trace_lookups() -> None:
    """Have `torch.compile` trace how layers find their attention: torch 2.11 hashes no class derived from `str`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    find = type(ALL_ATTENTION_FUNCTIONS).get_interface

    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return find(ALL_ATTENTION_FUNCTIONS, _entry_of(name), default)

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface


# Names of the dropout of attention weights and of the size of a head, in configurations and modules of transformers.
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout", "dropout_rate")
_HEAD_DIMS = ("head_dim", "attention_head_size", "qk_head_dim", "v_head_dim")


def use_backend(
    model: nn.Module, request: bool | str, device: torch.device, dtype: torch.dtype, trains: bool = True
) -> None:
    """Set the backend of every attention of `model` that goes through transformers' registry; log slow ones.

    Args:
        request: True for the fastest backend that fits, or the name of one.
        trains: whether dropout will be active.

    Raises:
        ValueError: see `choose_backend`.
    """
    name, found = type(model).__name__, list(_configured(model))
    chosen = []
    for config, modules in found:
        backend = choose_backend(request, needs_of(model, config, modules, device, dtype, trains))
        if backend.implementation is None:
            log_once(name, f"keeps its own attention: {backend.reason}")
        elif backend.reason:
            runs = "torch's SDPA" if backend.implementation == SDPA else backend.implementation
            log_once(name, f"runs {runs}: {backend.reason}")
        chosen.append(backend.implementation or config._attn_implementation)
    name_kernels(model, zip([config for config, _ in found], chosen, strict=True))
    if not found:
        log_once(name, "keeps its own attention: it is written out in the model's modules")


def _configured(model: nn.Module) -> Iterator[tuple[Any, list[nn.Module]]]:
    """Yield each configuration that names a kernel, with the modules that read it, outer configurations first."""
    readers: dict[int, tuple[Any, list[nn.Module]]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None and uses_registry(module):
            readers.setdefault(id(config), (config, []))[1].append(module)
    yield from readers.values()


def needs_of(
    model: nn.Module, config: Any, modules: list[nn.Module], device: torch.device, dtype: torch.dtype, trains: bool
) -> AttentionNeeds:
    """Return what the attentions of one configuration need; `modules`: that read it, and declare support."""
    routed = all(getattr(module, "attends_by_registry", False) for module in modules)  # what the model says is its own
    owners = [*([] if routed else [model]), *(module for module in modules if hasattr(module, "_supports_sdpa"))]
    restricted = [getattr(owner, "_compatible_flash_implementations", None) for owner in owners]
    return AttentionNeeds(
        supports_flash=all(getattr(owner, "_supports_flash_attn", False) for owner in owners),
        supports_sdpa=all(getattr(owner, "_supports_sdpa", False) for owner in owners),
        flash_kernels=next((tuple(names) for names in restricted if names is not None), None),
        has_sinks=any(getattr(module, PARAMETER, None) is not None for module in modules),
        takes_arguments=any(each.kind is each.VAR_KEYWORD for each in signature(model.forward).parameters.values()),
        soft_caps=getattr(config, "attn_logit_softcapping", None) is not None,
        dropout=max((_number(config, name) for name in _DROPOUTS), default=0.0) if trains else 0.0,
        head_dims=_head_dims(config, modules),
        device=runs_on(device),
        capability=capability_of(device),
        dtype=dtype,
    )


def _head_dims(config: Any, modules: list[nn.Module]) -> tuple[int, ...]:
    """Return the sizes of heads that the modules name; if they name none, that of the configuration."""
    named = {int(_number(module, name)) for module in modules for name in _HEAD_DIMS} - {0}
    if not named:
        heads = _number(config, "num_attention_heads")
        size = _number(config, "head_dim") or (_number(config, "hidden_size") // heads if heads else 0)
        named = {int(size)} - {0}
    return tuple(sorted(named))


def _number(owner: Any, name: str) -> float:
    value = getattr(owner, name, None)
    return value if isinstance(value, int | float) else 0


_FIELDS = "attentions"  # attentions, cross_attentions, encoder_attentions, ...


def return_whole_scores(model: nn.Module, head_counts: Collection[int], group: ProcessGroup) -> None:
    """Let `model` return the scores of all heads if asked; `head_counts`: of the whole model's attentions."""
    counts = frozenset(head_counts)

    def gather(_: nn.Module, __: tuple, outputs: Any) -> Any:
        return whole_scores(outputs, counts, group)

    for module in _returning(model):
        module.register_forward_hook(gather)


def _returning(model: nn.Module) -> list[nn.Module]:
    """Return the modules that return scores: both halves of an encoder-decoder, since `generate` calls one alone."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return [model]
    halves = [getattr(model, f"get_{half}", lambda: None)() for half in ("encoder", "decoder")]
    is_known = all(isinstance(half, nn.Module) and half is not model for half in halves) and halves[0] is not halves[1]
    return halves if is_known else [model]


def whole_scores(outputs: Any, head_counts: Collection[int], group: ProcessGroup) -> Any:
    """Gather the scores of all heads in `outputs`, in place; ValueError if shards do not add up to them."""
    if not isinstance(outputs, Mapping):
        return outputs
    for name, value in outputs.items():
        if name.endswith(_FIELDS):
            outputs[name] = _ScoreGather(name, head_counts, group).of(value)
        elif isinstance(value, Mapping):  # outputs of a tower
            whole_scores(value, head_counts, group)
    return outputs


class _ScoreGather:
    """Gathers the scores of one field: tensors [batch, heads, queries, keys] in tuples."""

    def __init__(self, name: str, head_counts: Collection[int], group: ProcessGroup) -> None:
        self.name, self.head_counts, self.group = name, head_counts, group

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._whole(value)
        return type(value)(map(self.of, value)) if isinstance(value, tuple | list) else value

    def _whole(self, scores: Tensor) -> Tensor:
        scores = joined_blocks(scores, 1) if scores.dim() == 4 else scores
        heads = scores.shape[1] if scores.dim() == 4 else 0
        parts = torch.zeros(dist.get_world_size(self.group), dtype=torch.int64, device=scores.device)
        parts[dist.get_rank(self.group)] = heads
        dist.all_reduce(parts, group=self.group)
        parts = parts.tolist()
        if sum(parts) in self.head_counts:
            most = max(parts)
            padded = F.pad(scores, (0, 0, 0, 0, 0, most - heads))
            held = [rank * most + head for rank, count in enumerate(parts) for head in range(count)]
            whole = gather_from_region(padded, 1, self.group)
            return whole if len(held) == whole.shape[1] else whole[:, held]
        if set(parts) <= set(self.head_counts):  # all ranks run all heads
            return scores
        raise ValueError(
            f"{self.name} has {parts} heads on the ranks that share a layer, which do not make up "
            f"{sorted(self.head_counts)}; use output_attentions=False, or tp_size=1"
        )
