"""Which kernel a block of ring attention gets on a GPU: decided by functions, which run on fake tensors.

What breaks here first: a release of torch that changes what its flash kernel serves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardformer.attention import backend
from shardformer.context_parallel import ring
from shardformer.context_parallel.ring import Block, Softmax, _has_cuda_kernel, attend

_FLASH = "aten._scaled_dot_product_flash_attention.default"
_CAUSAL = Block(slice(None), slice(None), is_causal=True)


@pytest.fixture(autouse=True)
def no_lines_yet() -> Iterator[None]:
    backend._log_once.cache_clear()
    yield
    backend._log_once.cache_clear()


def _tensors(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return queries and keys on a GPU, [batch, heads, seq, head_dim], without values."""
    query = torch.empty(2, 4, 6, size, device="cuda", dtype=dtype)
    return query, torch.empty(2, 2, 6, size, device="cuda", dtype=dtype)


def test_the_flash_kernel_gets_fewer_key_heads_and_the_scale() -> None:
    calls: list[tuple[str, tuple, dict[str, Any]]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            calls.append((str(function), args, kwargs or {}))
            return function(*args, **kwargs or {})

    with FakeTensorMode(), Recorder():
        query, key = _tensors(64, torch.bfloat16)
        found, logs = attend(query, key, key, _CAUSAL, Softmax(0.3))
    assert found.shape == query.shape and logs.shape == query.shape[:-1]
    (args, options) = next(call[1:] for call in calls if call[0] == _FLASH)
    assert [tuple(x.shape) for x in args[:3]] == [(2, 4, 6, 64), *[(2, 2, 6, 64)] * 2]
    assert args[3:] == (0.0, True) and options == {"scale": 0.3}, "dropout, causal; no debug mask"


def test_masks_and_dropout_run_a_plain_kernel(caplog: pytest.LogCaptureFixture) -> None:
    masked = Block(slice(None), slice(None), allowed=torch.ones(1, 1, 6, 6, dtype=torch.bool))
    with FakeTensorMode(), caplog.at_level(logging.WARNING):
        query, key = _tensors(64, torch.bfloat16)
        assert not _has_cuda_kernel(query, key, masked, Softmax(0.1))
        assert not _has_cuda_kernel(query, key, _CAUSAL, Softmax(0.1, dropout=0.1))
    assert not caplog.text, "docs/context_parallelism.md says so"


@pytest.mark.parametrize(
    ("capability", "size", "dtype", "message"),
    [
        ((7, 5), 64, torch.float16, "needs a GPU of compute capability 8.0 (Ampere) or more"),
        ((8, 0), 64, torch.float32, "runs in 16 bit, not in torch.float32"),
        ((8, 0), 20, torch.float16, "equal head sizes up to 256 that 8 divides, not 20, 20"),
        ((8, 9), 208, torch.float16, "no backward pass for heads of size 208 on this GPU"),
        ((8, 0), 208, torch.float16, ""),
    ],
)
def test_what_the_flash_kernel_does_not_serve_is_logged(
    capability: tuple[int, int],
    size: int,
    dtype: torch.dtype,
    message: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "capability_of", lambda device: capability)
    with FakeTensorMode(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert _has_cuda_kernel(*_tensors(size, dtype), _CAUSAL, Softmax(0.1)) == (not message)
    assert caplog.text.count(message) == 1 if message else not caplog.text
