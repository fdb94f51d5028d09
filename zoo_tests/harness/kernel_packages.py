"""Stand-ins for optional packages with kernels: the real signatures and refusals, with plain arithmetic on CPUs.

Signatures and limits are those of flash-attn 2.8 (`flash_attn/flash_attn_interface.py`), flash-attn 3
(`hopper/flash_attn_interface.py`), xformers 0.0.3x (`fmha/cutlass.py`), apex (`fused_layer_norm.py`) and Liger-Kernel
0.8 (`ops/rms_norm.py`). An argument that the real function does not take raises here too.
"""

from __future__ import annotations

import importlib.machinery
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

Calls = list[dict[str, Any]]
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def installed(modules: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Let imports find modules (name -> what each defines)."""
    made = {}
    for name, contents in modules.items():
        made[name] = module = ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        vars(module).update(contents)
    with patch.dict(sys.modules, made):
        yield


@contextmanager
def flash_attn(*versions: int, capability: tuple[int, int] | None = None) -> Iterator[Calls]:
    """Install stand-ins of flash-attn; yield the calls of their functions, in order.

    Args:
        versions: 2, 3 or both.
        capability: of the GPU that the library is told of; None for an unknown one.
    """
    import transformers.modeling_flash_attention_utils as flash_utils
    from transformers import utils

    calls: Calls = []
    packages = {2: _flash_2, 3: _flash_3}
    modules = {name: contents for version in versions for name, contents in packages[version](calls).items()}
    answers = {f"is_flash_attn_{each}_available": lambda *_, each=each, **__: each in versions for each in (2, 3)}
    with (
        installed(modules),
        patch.multiple(utils, **answers),
        patch.multiple(flash_utils, **answers, _loaded_implementation=None),
        patch("shardformer.attention.registry.capability_of", lambda device: capability),
    ):
        yield calls


def _flash_2(calls: Calls) -> dict[str, dict[str, Any]]:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        options = {"dropout_p": dropout_p, "causal": causal, "window_size": window_size, "softcap": softcap}
        calls.append({"kernel": "flash 2", "scale": softmax_scale, **options})
        assert not (softcap and dropout_p), "Softcapping does not support dropout for now"
        return _batch(q, k, v, softmax_scale, **options)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        options = {"dropout_p": dropout_p, "causal": causal, "window_size": window_size, "softcap": softcap}
        calls.append({"kernel": "flash 2 varlen", "scale": softmax_scale, **options})
        return _ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, **options)

    def flash_attn_with_kvcache(*_: Any, **__: Any) -> Tensor:
        raise NotImplementedError

    from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

    functions = [flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache]
    return {
        "flash_attn": {"__version__": "2.8.3", **{each.__name__: each for each in functions}},
        "flash_attn.bert_padding": {"pad_input": _pad_input, "unpad_input": _unpad_input},
    }


def _flash_3(calls: Calls) -> dict[str, dict[str, Any]]:
    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Tensor:
        options = {"causal": causal, "window_size": window_size, "softcap": softcap}
        calls.append({"kernel": "flash 3", "scale": softmax_scale, **options})
        assert q.shape[-1] % 8 == 0, "head_size should be a multiple of 8"
        return _batch(q, k, v, softmax_scale, **options)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Tensor:
        options = {"causal": causal, "window_size": window_size, "softcap": softcap}
        calls.append({"kernel": "flash 3 varlen", "scale": softmax_scale, **options})
        return _ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, **options)

    def flash_attn_with_kvcache(*_: Any, **__: Any) -> Tensor:
        raise NotImplementedError

    functions = [flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache]
    return {"flash_attn_interface": {each.__name__: each for each in functions}}


def _ragged(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: Any, **options: Any) -> Tensor:
    """Run on sequences joined in one, [tokens, heads, head_dim]."""
    assert ends_q.dtype == ends_k.dtype == torch.int32 and len(ends_q) == len(ends_k)
    assert ends_q[-1] == len(q) and ends_k[-1] == len(k) == len(v), "lengths must cover the tokens"
    parts = [x.split(ends.diff().tolist()) for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k))]
    return torch.cat([_batch(*(x[None] for x in each), scale, **options)[0] for each in zip(*parts, strict=True)])


def _batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attend; q, k, v: [batch, seq, heads, head_dim]; masks are aligned to the last query and key."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in _HALF, "FlashAttention only supports fp16 and bf16 data type"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[2] % k.shape[2] == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension"
    q_, k_, v_ = (x.transpose(1, 2).float() for x in (q, k, v))
    k_, v_ = (x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in (k_, v_))
    scores = q_ @ k_.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    distance = (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None] - torch.arange(k.shape[1])
    left, right = window_size
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    hidden |= (distance > left) if left >= 0 else False
    hidden |= (-distance > right) if right >= 0 else False
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
    return (F.dropout(weights, dropout_p) @ v_).transpose(1, 2).to(q.dtype)


@contextmanager
def torch_varlen(takes_groups: bool = True) -> Iterator[Calls]:
    """Replace torch's kernel for documents, whose products run on GPUs alone; yield its calls.

    Args:
        takes_groups: False for torch 2.11, which asks for as many key/value heads as heads.
    """
    import torch.nn.attention.varlen as module

    from shardformer.attention import backend

    calls: Calls = []

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        calls.append({"window_size": window_size, "scale": scale, "heads": (query.shape[1], key.shape[1])})
        assert cu_seq_q.dtype == torch.int32 and max_q == cu_seq_q.diff().max()
        options = {"causal": False, "window_size": window_size, "softcap": 0.0}
        return _ragged(query, key, value, cu_seq_q, cu_seq_k, scale, **options)

    def with_groups(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        assert enable_gqa or args[0].shape[1] == args[1].shape[1]
        return varlen_attn(*args, **options)

    backend._takes_groups.cache_clear()
    with patch.object(module, "varlen_attn", with_groups if takes_groups else varlen_attn):
        yield calls
    backend._takes_groups.cache_clear()


@contextmanager
def torch_flash() -> Iterator[Calls]:
    """Replace torch's flash operators, which run on GPUs alone, by their arithmetic; yield calls of the forward one."""
    calls: Calls = []

    def documents(query: Tensor, borders: Tensor) -> Iterator[slice]:
        assert borders.dtype == torch.int32 and borders[-1] == len(query)
        return (slice(start, stop) for start, stop in pairwise(borders.tolist()))

    def scores_of(query: Tensor, key: Tensor, scale: float | None, left: int, right: int) -> Tensor:
        """[tokens, heads, head_dim] -> [heads, queries, keys]."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
        hidden = (distance > left if left >= 0 else False) | (-distance > right if right >= 0 else distance < -len(key))
        return scores.masked_fill(hidden, -math.inf)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Tensor, max_q: int, max_k: int, dropout_p: float,
        is_causal: bool, return_debug_mask: bool, *, scale: float | None, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert max_q == max_k == ends.diff().max() and is_causal == ((window_size_left, window_size_right) == (-1, 0))
        calls.append({"window_size": (window_size_left, window_size_right), "heads": (q.shape[1], k.shape[1])})
        found, logs = [], []
        for tokens in documents(q, ends):
            query, key, value = (x[tokens].double() for x in (q, k, v))
            scores = scores_of(query, key, scale, window_size_left, window_size_right)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
            logs.append(scores.logsumexp(-1))
        precise = torch.promote_types(q.dtype, torch.float32)
        nothing = torch.empty(0)
        return torch.cat(found).to(q.dtype), torch.cat(logs, 1).to(precise), nothing, nothing, nothing

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, ends: Tensor, ends_k: Tensor,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, state: Tensor, unused: Tensor, *,
        scale: float | None, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        found = []
        for tokens in documents(q, ends):
            of, query, key, value, whole = (x[tokens].double() for x in (grad, q, k, v, out))
            groups = query.shape[1] // key.shape[1]
            weights = (scores_of(query, key, scale, window_size_left, window_size_right) - logs[:, tokens, None]).exp()
            through = torch.einsum("qhd,khd->hqk", of, value.repeat_interleave(groups, 1))
            of_scores = weights * (through - (of * whole).sum(-1).t()[..., None])
            of_scores = of_scores * (query.shape[-1] ** -0.5 if scale is None else scale)
            of_key, of_value = (
                torch.einsum("hqk,qhd->khd", by, x).unflatten(1, (-1, groups)).sum(2)
                for by, x in ((of_scores, query), (weights, of))
            )
            of_query = torch.einsum("hqk,khd->qhd", of_scores, key.repeat_interleave(groups, 1))
            found.append((of_query, of_key, of_value))
        return tuple(torch.cat(parts).to(q.dtype) for parts in zip(*found, strict=True))

    names = {"_flash_attention_forward": forward, "_flash_attention_backward": backward}
    with patch.multiple(torch.ops.aten, **names):
        yield calls


@contextmanager
def xformers(has_kernels: bool = True) -> Iterator[Calls]:
    """Install a stand-in of xformers that refuses what its CUTLASS kernels refuse; yield its calls.

    Args:
        has_kernels: whether it says that its kernels are loaded.
    """
    calls: Calls = []

    class LowerTriangularMask:
        """Causal pattern, aligned to the first query and key."""

    def memory_efficient_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Any = None,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: Any = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        calls.append({"bias": type(attn_bias).__name__, "p": p, "scale": scale})
        step = 16 // query.dtype.itemsize
        for x in (query, key, value):
            assert x.shape[-1] % step == 0 and x.stride(-1) == 1, f"head size and {step}"
            assert x.shape[2] == query.shape[2], "heads of queries and keys differ"
        mask = None
        if isinstance(attn_bias, Tensor):
            rows, queries, heads, _ = query.shape
            assert tuple(attn_bias.shape) == (rows, heads, queries, key.shape[1]) and attn_bias.dtype == query.dtype
            assert attn_bias.stride(-1) == 1, "attn_bias.stride(-1) > 1"
            assert attn_bias.stride(-2) % step == 0, f"attn_bias.stride(-2) % {step} != 0"
            mask = attn_bias
        elif attn_bias is not None:
            assert isinstance(attn_bias, LowerTriangularMask)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        is_causal = mask is None and attn_bias is not None
        found = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal, scale=scale)
        return found.transpose(1, 2)

    contents = {each.__name__: each for each in (LowerTriangularMask, memory_efficient_attention)}
    cutlass = SimpleNamespace(FwOp=SimpleNamespace(is_available=lambda: has_kernels))
    modules = {"xformers": {}, "xformers.ops": contents, "xformers.ops.fmha": {"cutlass": cutlass}}
    with installed(modules):
        yield calls


@contextmanager
def apex() -> Iterator[Calls]:
    """Install a stand-in of NVIDIA's apex with its CUDA extension; yield the calls of its layer norm."""
    calls: Calls = []

    def fused_layer_norm_affine(
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: tuple[int, ...],
        eps: float = 1e-6,
        memory_efficient: bool = False,
    ) -> Tensor:
        calls.append({"shape": tuple(normalized_shape), "eps": eps, "memory_efficient": memory_efficient})
        assert input.dtype == weight.dtype == bias.dtype
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    names = ("apex", "apex.normalization", "fused_layer_norm_cuda")
    functions = {"fused_layer_norm_affine": fused_layer_norm_affine}
    with installed({**{name: {} for name in names}, "apex.normalization.fused_layer_norm": functions}):
        yield calls


@contextmanager
def liger(has_in_place: bool = True) -> Iterator[Calls]:
    """Install a stand-in of Liger-Kernel; yield the calls of its RMS norm.

    Args:
        has_in_place: False for an old version, which always works in place.
    """
    calls: Calls = []

    class LigerRMSNormFunction(torch.autograd.Function):
        """In place, the backward pass writes the gradient of its input over that of its output."""

        @staticmethod
        def forward(
            ctx: Any,
            X: Tensor,  # noqa: N803  # the names of the real function
            W: Tensor,  # noqa: N803
            eps: float,
            offset: float = 0.0,
            casting_mode: str = "llama",
            in_place: bool = True,
            row_mode: bool | None = None,
        ) -> Tensor:
            calls.append({"eps": eps, "offset": offset, "casting_mode": casting_mode, "in_place": in_place})
            ctx.save_for_backward(X, W)
            ctx.options = (eps, in_place)
            return F.rms_norm(X, W.shape, W + offset, eps)

        @staticmethod
        def backward(ctx: Any, dY: Tensor) -> tuple[Tensor | None, ...]:  # noqa: N803
            eps, in_place = ctx.options
            x, w = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            with torch.enable_grad():
                grads = torch.autograd.grad(F.rms_norm(x, w.shape, w, eps), (x, w), dY)
            return (dY.copy_(grads[0]) if in_place else grads[0]), grads[1], None, None, None, None, None

    class Old(LigerRMSNormFunction):
        @staticmethod
        def forward(ctx: Any, X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama"):
            return LigerRMSNormFunction.forward(ctx, X, W, eps, offset, casting_mode)

    functions = {"LigerRMSNormFunction": LigerRMSNormFunction if has_in_place else Old}
    with installed({"liger_kernel": {}, "liger_kernel.ops": {}, "liger_kernel.ops.rms_norm": functions}):
        yield calls
