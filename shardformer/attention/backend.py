"""Attention backends: what this package has to know of a kernel, the kernels, and the choice among them for a model.

transformers calls flash-attn 2 and 3 itself, and torch's SDPA, which chooses among its flash, cuDNN, memory-efficient
and plain kernels; only the plain one is logged. SDPA gets padding, causal, windowed and cross-attention masks, ALiBi
and relative biases as transformers builds them. Grouped heads are repeated only if a mask keeps its kernels from them.

torch's own flash kernel for sequences of any lengths in one row (`torch.nn.attention.varlen`) runs where a pass says
which documents its rows hold, and then sees no pair of tokens of two documents. Everything else (padding, caches, rows
of one document) runs through SDPA with the masks of SDPA.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.attention.packed_documents import FlashWithSinks, window_of
from shardformer.matmul.kernel import autocast
from shardformer.utils.untraced import constant_in_graphs

HALF = (torch.float16, torch.bfloat16)
AMPERE, HOPPER = (8, 0), (9, 0)
FLASH_4, FLASH_3, FLASH_2 = "flash_attention_4", "flash_attention_3", "flash_attention_2"
FLASH_4_HEADS = (64, 96, 128)
LARGEST_HEAD = 256
SDPA = "sdpa_fast"  # transformers' SDPA, plus a check of which kernel it gets

_log = logging.getLogger("shardformer.attention.backend")

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What the attention of a model needs from its kernel."""

    # supports_flash, supports_sdpa: what the model's class declares (a bias on scores excludes flash-attn)
    supports_flash: bool
    supports_sdpa: bool
    # the flash kernels that the class is restricted to (attention sinks); None for any
    flash_kernels: tuple[str, ...] | None = None
    has_sinks: bool = False  # whether attentions have sinks, which SDPA would ignore
    takes_arguments: bool = True  # whether the model hands arguments that it does not know on to its attention
    soft_caps: bool = False  # whether scores are soft-capped (Gemma 2), which SDPA silently ignores
    dropout: float = 0.0  # probability that training drops an attention weight; 0.0 for none
    head_dims: tuple[int, ...] = ()
    device: str  # type of the device that the model will run on
    capability: Capability | None = None  # compute capability of that GPU, (major, minor); None if unknown
    dtype: torch.dtype  # dtype that the model will run in

    @property
    def gpu(self) -> str:
        """The compute capability of the GPU, as people write it."""
        return ".".join(map(str, self.capability or ()))


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """One kernel."""

    name: str  # as a value of `enable_flash_attention`
    package: str = "torch"  # the module that must be there
    distribution: str = ""  # what it must be of, where several have that module; empty for any
    # needs -> why it does not serve a model, as the rest of a sentence; empty if it does
    limits: Callable[[AttentionNeeds], str] = lambda needs: ""
    # () -> why the package cannot be used though it is there; empty if it can
    not_usable: Callable[[], str] = lambda: ""
    entry: str = ""  # its name in the registries; that of the backend if empty
    # the function for the registry of kernels; None if transformers has one under the name
    kernel: Callable[..., Any] | None = None
    # the function for the registry of masks, or the name of the kernel whose masks it takes; None if transformers has
    # one under the name
    masks: Callable[..., Any] | str | None = None
    is_automatic: bool = False  # whether `enable_flash_attention=True` may choose it
    # whether it does what SDPA does: no caps of scores, and only models that have an SDPA path
    is_like_sdpa: bool = False
    takes_sinks: bool = False  # whether it adds sinks all the same

    @property
    def is_optional(self) -> bool:
        """Whether it is a package of its own."""
        return self.package.partition(".")[0] != "torch"


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of a GPU, (major, minor); None if there is none here."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def has_backward_of_large_heads(size: int, capability: Capability | None, dropout: float = 0.0) -> bool:
    """Return whether flash kernels have a backward pass for a head size: shared memory limits that of large heads.

    Up to 192 all GPUs have one; above 224 without dropout too; the rest only the GPUs of data centers, 8.0 and 9.0.
    """
    is_large = 192 < size <= 224 or (size > 224 and bool(dropout))
    return not is_large or capability in (None, AMPERE, HOPPER)


@constant_in_graphs
def log_once(name: str, what: str) -> None:
    """Log a warning, once per process; not while logging is switched off."""
    if _log.isEnabledFor(logging.WARNING):
        _log_once(name, what)


@cache
def _log_once(name: str, what: str) -> None:
    _log.warning("%s %s", name, what)


def flash_limits(name: str, needs: AttentionNeeds) -> str:
    """Return why flash-attn, or torch's copy of it, does not serve a model; empty if it does."""
    if needs.device != "cuda" or needs.dtype not in HALF:
        return f"runs on GPUs in 16 bit, not on {needs.device} in {needs.dtype}"
    is_excluded = needs.flash_kernels is not None and name not in needs.flash_kernels
    if not needs.supports_flash or is_excluded:
        return "cannot do what the model's masks or biases need"
    # Kernels for Hopper (sm90a) run on no later GPU, those for Ampere run on later ones.
    if name == FLASH_3 and needs.capability is not None and needs.capability[0] != HOPPER[0]:
        return f"needs a GPU of compute capability 9.0 (Hopper), not {needs.gpu}"
    if name == FLASH_4 and needs.capability is not None and needs.capability < HOPPER:
        return f"needs a GPU of compute capability 9.0 (Hopper) or more, not {needs.gpu}"
    if name == FLASH_4 and needs.soft_caps:
        return "has no backward pass for soft-capped scores"
    if needs.capability is not None and needs.capability < AMPERE:
        return f"needs a GPU of compute capability 8.0 (Ampere) or more, not {needs.gpu}"
    if needs.dropout and name != FLASH_2:
        return f"has no dropout, and the model drops attention weights with probability {needs.dropout}"
    if needs.dropout and needs.soft_caps:
        return f"cannot both cap scores and drop attention weights with probability {needs.dropout}"
    for size in needs.head_dims:
        if name == FLASH_4 and size not in FLASH_4_HEADS:
            return f"takes head sizes {', '.join(map(str, FLASH_4_HEADS))}, not {size}"
        if size > LARGEST_HEAD:
            return f"takes head sizes up to {LARGEST_HEAD}, not {size}"
        if name != FLASH_2 and size % 8:  # flash-attn 2 pads heads itself
            return f"takes head sizes that 8 divides, not {size}"
        if not has_backward_of_large_heads(size, needs.capability, needs.dropout):
            return f"has no backward pass for heads of size {size} on a GPU of compute capability {needs.gpu}"
    return ""


def _flash_not_usable(name: str) -> str:
    """Ask transformers, which otherwise looks for the kernel on the hub in the first forward pass."""
    from transformers import utils

    available = {
        FLASH_4: utils.is_flash_attn_4_available,
        FLASH_3: utils.is_flash_attn_3_available,
        FLASH_2: utils.is_flash_attn_2_available,
    }[name]
    return "" if available() else "is no version that transformers takes"


def _flash(name: str, package: str, distribution: str = "") -> AttentionBackend:
    limits, not_usable = partial(flash_limits, name), partial(_flash_not_usable, name)
    return AttentionBackend(
        name=name,
        package=package,
        distribution=distribution,
        limits=limits,
        not_usable=not_usable,
        is_automatic=True,
    )


FLASH_ATTENTION_4 = _flash(FLASH_4, "flash_attn", "flash-attn-4")
FLASH_ATTENTION_3, FLASH_ATTENTION_2 = _flash(FLASH_3, "flash_attn_interface"), _flash(FLASH_2, "flash_attn")


def slow_reason(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    has_mask: bool,
    mask_needs_grad: bool,
    dropout: float = 0.0,
    capability: Capability | None = None,
) -> str:
    """Return why SDPA will run its plain kernel on such inputs; empty if a fused kernel takes them."""
    if mask_needs_grad:
        return "the bias on attention scores needs a gradient, which torch's fused kernels do not compute"
    if device == "cpu" and dropout:
        return "torch's fused kernel for CPUs has no dropout"
    if device == "cpu":
        return "" if dtype.is_floating_point else f"torch has no fused kernel for {dtype} on CPUs"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"torch has no fused kernel for {dtype} on {device}"
    if dtype == torch.bfloat16 and capability is not None and capability < AMPERE:
        return f"torch's fused kernels take {dtype} on GPUs of compute capability 8.0 (Ampere) or more"
    if head_dim > 256:
        return f"torch's fused kernels take head sizes up to 256, not {head_dim}"
    if dtype == torch.float32 and has_mask and head_dim % 4:
        return f"torch's memory-efficient kernel takes head sizes that 4 divides, not {head_dim}"
    return ""


def sdpa_without_slow_kernels(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Call transformers' SDPA; log once per module class if no fused kernel takes its inputs."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if reason := slow_inputs(query, attention_mask, **kwargs):
        log_once(type(module).__name__, f"runs SDPA's plain kernel: {reason}")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def slow_inputs(
    query: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> str:
    """Return why SDPA will run its plain kernel on these inputs; empty if a fused kernel takes them."""
    masks = [mask for mask in (attention_mask, position_bias) if mask is not None]
    needs_grad = torch.is_grad_enabled() and any(mask.requires_grad for mask in masks)
    capability = capability_of(query.device)
    return slow_reason(query.device.type, query.dtype, query.shape[-1], len(masks) > 0, needs_grad, dropout, capability)


SDPA_FAST = AttentionBackend(
    name="sdpa", entry=SDPA, kernel=sdpa_without_slow_kernels, masks="sdpa", is_automatic=True, is_like_sdpa=True
)


VARLEN = "flash_varlen"  # models ask by the name whether a kernel is told of documents, as flash-attn is


class MaskIfRead:
    """A mask for SDPA, [batch, 1, seq, seq], that is made by the first layer that reads it.

    By `function`, and `padding`: [batch, seq], true for tokens, or None for none.
    """

    def __init__(self, make: Callable[[], Tensor | None], function: Any = None, padding: Tensor | None = None) -> None:
        self._make, self._function, self._padding = make, function, padding

    @cached_property
    def window(self) -> int | None:
        """How many keys a query sees, up to itself, if the mask says nothing else; the first layer waits for that."""
        window = None if self._function is None else window_of(self._function)
        return window if window is None or self._padding is None or bool(self._padding.all()) else None

    @cached_property
    def mask(self) -> Tensor | None:
        """The mask; None if SDPA needs none."""
        return self._make()


def varlen_masks(*args: Any, **given: Any) -> Any:
    """Return the masks of SDPA, those that hide more than later tokens without making them."""
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        bidirectional_mask_function,
        causal_mask_function,
    )

    make = partial(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], *args, **given)
    is_plain = given.get("mask_function") in (None, causal_mask_function, bidirectional_mask_function)
    padding, is_whole = given.get("attention_mask"), given.get("q_length") == given.get("kv_length")
    if args or is_plain or not is_whole or (padding is not None and window_of(given["mask_function"]) is None):
        return make()
    return MaskIfRead(make, given["mask_function"], padding)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskIfRead | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within the documents of rows; query, key, value: [batch, heads, seq, head_dim].

    Args:
        s_aux: sinks [heads], scores whose values are zero; rows are then documents unless places alone hide no token.
        cu_seq_lens_q, cu_seq_lens_k: where documents start in all rows, one behind the other; None for no documents.
        max_length_q, max_length_k: tokens of the longest.

    Returns:
        [batch, seq, heads, head_dim], None.

    Raises:
        TypeError: there are documents, and the kernel cannot run.
    """
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    borders = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if s_aux is not None and cu_seq_lens_q is None:
        borders, sliding_window = _borders_of_rows(query, key, attention_mask, sliding_window)
        if borders[0] is None:
            return _eager(module, query, key, value, attention_mask, causal, scaling=scaling, s_aux=s_aux, **kwargs)
    if borders[0] is None:
        mask = attention_mask.mask if isinstance(attention_mask, MaskIfRead) else attention_mask
        return sdpa_without_slow_kernels(
            module, query, key, value, mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
    query, key, value = autocast(query, key, value)
    dtype, size = value.dtype, value.shape[-1]
    if dtype not in HALF or kwargs.get("dropout"):
        raise TypeError(
            f"{type(module).__name__} has packed documents in {dtype}, with dropout {kwargs.get('dropout', 0.0)}, and "
            f"{VARLEN} takes them in 16 bit, without dropout; use enable_flash_attention='sdpa'"
        )
    if size != query.shape[-1]:  # latent attention (MLA) has smaller values
        value = F.pad(value, (0, query.shape[-1] - size))
    if not _takes_groups():
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    tokens = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value))  # [all tokens, heads, head_dim]
    before = -1 if sliding_window is None else sliding_window - 1
    window = (before, 0 if causal else before)
    if s_aux is not None:
        found = FlashWithSinks.apply(*tokens, s_aux, borders, scaling, window)
        return found.unflatten(0, (len(query), -1)).narrow(-1, 0, size), None
    options = {"scale": scaling, "window_size": window, **({"enable_gqa": True} if _takes_groups() else {})}
    found = torch.nn.attention.varlen.varlen_attn(*tokens, *borders, **options)
    return found.unflatten(0, (len(query), -1)).narrow(-1, 0, size), None


def _borders_of_rows(query: Tensor, key: Tensor, mask: Any, sliding_window: int | None) -> tuple[tuple, int | None]:
    """Return whole rows as documents, and the window of their mask; None for borders where a mask says more."""
    window = mask.window if isinstance(mask, MaskIfRead) else None
    is_plain = mask is None or (window is not None and window == sliding_window)
    rows, length = len(query), query.shape[2]
    if not is_plain or length != key.shape[2] or query.dtype not in HALF:
        return (None, None, None, None), sliding_window
    ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    return (ends, ends, length, length), window


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Run the model's own code, which adds a mask; no mask, of SDPA, may mean a causal one."""
    mask = mask.mask if isinstance(mask, MaskIfRead) else mask
    if mask is None and is_causal:
        queries, keys = query.shape[2], key.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    mask = None if mask is None else _additive(mask, query.dtype)
    code = sys.modules[type(getattr(module, "_viewed", module)).__module__]
    return code.eager_attention_forward(module, query, key, value, mask, **{"dropout": 0.0, **kwargs})


@cache
def _takes_groups() -> bool:
    """Return whether this torch's kernel takes fewer key/value heads than heads; 2.11 asks for equal numbers."""
    import torch.nn.attention.varlen

    return "enable_gqa" in inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters


def _varlen_limits(needs: AttentionNeeds) -> str:
    if needs.soft_caps:
        return "cannot cap attention scores, which the model needs"
    if not needs.takes_arguments:
        return "is told of documents by arguments, which the model does not hand on"
    if not (needs.supports_sdpa or needs.has_sinks):
        return "runs rows of one document by SDPA, for which the model has no path"
    return flash_limits(VARLEN, replace(needs, flash_kernels=None) if needs.has_sinks else needs)


def _varlen_not_usable() -> str:
    is_lacking = torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available()
    return "needs a build of torch with flash kernels" if is_lacking else ""


FLASH_VARLEN = AttentionBackend(
    name=VARLEN,
    package="torch.nn.attention.varlen",
    limits=_varlen_limits,
    not_usable=_varlen_not_usable,
    kernel=varlen_attention,
    masks=varlen_masks,
    is_automatic=True,
    is_like_sdpa=True,
    takes_sinks=True,
)


_BYTES_OF_LOAD = 16  # what one vector load of the CUTLASS kernels reads
_ALIGNED_KEYS = 8  # xformers reads a bias in vectors of up to 8 numbers: its rows must start at multiples of them


def xformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run xformers' kernel with SDPA's masks: [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim]."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    masks = [mask for mask in (attention_mask, kwargs.get("position_bias")) if mask is not None]
    bias: Any = LowerTriangularMask() if attention_mask is None and causal and query.shape[2] > 1 else None
    if masks and bias is not None:  # xformers takes a bias or a pattern, not both
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        masks.append(seen[None, None])
    if masks:
        bias = _aligned(sum(_additive(mask, query.dtype) for mask in masks), query, key)
    heads_last = [x.transpose(1, 2) for x in (query, key, value)]
    return memory_efficient_attention(*heads_last, attn_bias=bias, p=dropout, scale=scaling), None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask or bias to an additive one in `dtype`."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask.to(dtype)


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return `bias` as [batch, heads, queries, keys], in rows of which each starts at a multiple of 8 numbers."""
    keys = key.shape[2]
    rows = F.pad(bias, (0, -keys % _ALIGNED_KEYS)).contiguous()[..., :keys]
    return rows.expand(*query.shape[:3], keys)


def _xformers_limits(needs: AttentionNeeds) -> str:
    if needs.device != "cuda" or needs.dtype not in (*HALF, torch.float32):
        return f"runs on GPUs in fp32, fp16 or bf16, not on {needs.device} in {needs.dtype}"
    if needs.dtype == torch.bfloat16 and needs.capability is not None and needs.capability < AMPERE:
        return f"needs a GPU of compute capability 8.0 (Ampere) or more for bf16, not {needs.gpu}"
    step = _BYTES_OF_LOAD // needs.dtype.itemsize
    for size in needs.head_dims:
        if size % step:
            return f"takes head sizes that {step} divides in {needs.dtype}, not {size}"
    return ""


def _xformers_not_usable() -> str:
    """Ask xformers, whose Python part can be imported without its kernels."""
    from xformers.ops.fmha import cutlass

    lacks = "has no kernels that load here (built for another torch or Python, or for CPUs)"
    return "" if cutlass.FwOp.is_available() else f"{lacks}; install a build for torch {torch.__version__}"


XFORMERS = AttentionBackend(
    name="xformers",
    package="xformers",
    limits=_xformers_limits,
    not_usable=_xformers_not_usable,
    kernel=xformers_attention,
    masks="sdpa",
    is_like_sdpa=True,
)


# The first that is there and serves the model is the fastest; SDPA serves all that have a path for it.
_FLASH = (FLASH_ATTENTION_3, FLASH_ATTENTION_4, FLASH_ATTENTION_2, FLASH_VARLEN)
BACKENDS: tuple[AttentionBackend, ...] = (*_FLASH, XFORMERS, SDPA_FAST)
NAMES = tuple(backend.name for backend in BACKENDS)
_BY_NAME = {backend.name: backend for backend in BACKENDS}
# By the name in the attention registry, in which kernels of transformers alone have names too.
BACKEND_OF_ENTRY = {backend.entry or backend.name: backend for backend in BACKENDS}


@dataclass(frozen=True)
class Choice:
    """The attention kernel of a model."""

    implementation: str | None  # name in the attention registry; None to keep the model's own
    reason: str = ""  # why no faster backend was chosen, for the log; empty if there is no reason to log


def is_installed(name: str) -> bool:
    """Return whether the package of a backend is installed; torch always is."""
    backend = _BY_NAME[name]
    if backend.distribution and not list(importlib.metadata.Distribution.discover(name=backend.distribution)):
        return False
    return importlib.util.find_spec(backend.package) is not None


def reason_not_usable(name: str) -> str:
    """Return why the installed package of a backend cannot be used, as the rest of a sentence; empty if it can."""
    backend = _BY_NAME[name]
    try:
        importlib.import_module(backend.package)
    except (ImportError, OSError) as error:  # built for another torch or CUDA: undefined symbols, missing libraries
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return f"cannot be imported ({first_line}); install a build for torch {torch.__version__}"
    return backend.not_usable()


def choose_backend(
    request: bool | str,
    needs: AttentionNeeds,
    installed: Callable[[str], bool] = is_installed,
    not_usable: Callable[[str], str] = reason_not_usable,
) -> Choice:
    """Choose the attention backend of a model.

    Args:
        request: True for the fastest backend that fits, or the name of one.
        installed: name -> whether its package is installed.
        not_usable: name -> why the installed package cannot be used; empty if it can.

    Raises:
        ValueError: the named backend is unknown, not installed, or cannot do what the model needs.
    """
    if isinstance(request, str):
        wanted = f"enable_flash_attention='{request}'"
        if request not in NAMES:
            raise ValueError(f"{wanted} is not an attention backend; use True, False or one of {', '.join(NAMES)}")
        backend = _BY_NAME[request]
        if not installed(request):
            raise ValueError(
                f"{wanted} needs the package {backend.package}, which is not installed; use True or 'sdpa'"
            )
        if reason := backend.limits(needs) or not_usable(request):
            raise ValueError(f"{wanted} {reason}; use True or 'sdpa'")
        if needs.soft_caps and backend.is_like_sdpa:
            raise ValueError(f"{wanted} cannot cap attention scores, which the model needs; use True or False")
        adds_sinks = needs.has_sinks and backend.takes_sinks
        if not needs.supports_sdpa and backend.is_like_sdpa and not adds_sinks:
            raise ValueError(f"{wanted} cannot do what the model's attention needs; use True or False")
        return Choice(backend.entry or request)
    passed_over = []
    for backend in BACKENDS if needs.device == "cuda" else ():
        if not backend.is_automatic or backend is SDPA_FAST or not installed(backend.name):
            continue
        reason = backend.limits(needs) or not_usable(backend.name)
        if not reason:
            return Choice(backend.name, "; ".join(passed_over))
        if backend.is_optional:  # it was installed to be used
            passed_over.append(f"{backend.name} {reason}")
    if needs.soft_caps:
        capped = "its attention scores are soft-capped, which only flash-attn and its own code do"
        return Choice(None, "; ".join([capped, *passed_over]))
    if not needs.supports_sdpa:
        return Choice(None, "; ".join(["transformers has no SDPA path for it", *passed_over]))
    return Choice(SDPA_FAST.entry, "; ".join(passed_over))


def keeps_scores(implementation: str, query: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> bool:
    """Return whether the named kernel keeps scores [batch, heads, seq, seq] for its backward pass on such inputs."""
    if implementation in ("sdpa", SDPA_FAST.entry):
        return bool(slow_inputs(query, attention_mask, **kwargs))
    return (
        implementation not in BACKEND_OF_ENTRY
        and not implementation.startswith(("context_", "flex"))
        and ("flash" not in implementation)
    )
