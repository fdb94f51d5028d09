"""Fused norms equal the native ones.

What breaks here first: a release of transformers that renames an attribute of its norms. Look in
`shardformer/layers/norm.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shardformer.layers import FusedLayerNorm, FusedRMSNorm, ParallelModule, norm
from zoo_tests.harness.kernel_packages import apex, installed, liger
from zoo_tests.harness.native import fill, known

NORMS = [
    (FusedLayerNorm, lambda: nn.LayerNorm(7, eps=1e-3)),
    (FusedLayerNorm, lambda: nn.LayerNorm(7, bias=False)),
    (FusedRMSNorm, lambda: LlamaRMSNorm(7, eps=1e-3)),
]


@pytest.mark.parametrize(("fused", "make"), NORMS, ids=["layer", "layer-no-bias", "rms"])
def test_output_and_gradients(fused: type[ParallelModule], make: object) -> None:
    native = fill(make()).float()  # Llama's norm computes in fp32 whatever its dtype
    layer = fused.from_native_module(copy.deepcopy(native), None)
    x, plain_x = (known(3, 5, 7).float().requires_grad_() for _ in range(2))
    weights = known(3, 5, 7, seed=1).float()
    expected, found = native(plain_x), layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-6)
    for (name, param), (_, other) in zip(native.named_parameters(), layer.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, param.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("fused", [FusedLayerNorm, FusedRMSNorm])
def test_parameters_are_taken_over_not_copied(fused: type[ParallelModule]) -> None:
    native = nn.LayerNorm(4) if fused is FusedLayerNorm else LlamaRMSNorm(4)
    assert fused.from_native_module(native, None).weight is native.weight


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of compute capability 8.0, and no kernels from the tests before or for those after."""
    caches = (norm._apex_layer_norm, norm._liger_rms_norm, norm._log_once)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def _on_gpu(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return known(3, 5, 8).to(dtype).as_subclass(OnGPU)


def _layer_norm() -> FusedLayerNorm:
    return FusedLayerNorm.from_native_module(fill(nn.LayerNorm(8, eps=1e-3)).float(), None)


def _rms_norm() -> FusedRMSNorm:
    return FusedRMSNorm.from_native_module(fill(LlamaRMSNorm(8, eps=1e-3)).float(), None)


@pytest.mark.usefixtures("gpu")
def test_apex_gets_its_arguments_and_what_it_serves(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = _layer_norm(), _on_gpu()
    with apex() as calls:
        torch.testing.assert_close(layer(x).as_subclass(torch.Tensor), layer(x.as_subclass(torch.Tensor)))
        assert calls == [{"shape": (8,), "eps": 1e-3, "memory_efficient": False}]
        layer(_on_gpu(torch.bfloat16))
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
        layer(x)
    assert len(calls) == 1
    assert "FusedLayerNorm runs torch's kernel: under autocast apex's rounds to 16 bit" in caplog.text
    assert "apex's takes weights of its input's torch.bfloat16, not torch.float32" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_compiled_layers_call_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with apex() as of_apex, liger() as of_liger:
        _layer_norm()(_on_gpu())
        _rms_norm()(_on_gpu())
    assert of_apex == of_liger == []


@pytest.mark.usefixtures("gpu")
def test_packages_that_are_not_what_they_seem(caplog: pytest.LogCaptureFixture) -> None:
    """PyPI's apex is another package, and NVIDIA's may lack its extension or be built for another torch."""
    layer, x = _layer_norm(), _on_gpu()
    with installed({"apex": {}}):
        assert layer(x) is not None and not caplog.text, "another package, and no fault"
    norm._apex_layer_norm.cache_clear()
    with installed({"apex": {}, "fused_layer_norm_cuda": {}}):
        layer(x)
        layer(x)
    assert caplog.text.count("FusedLayerNorm runs torch's kernel: apex cannot be imported (") == 1
    with installed({"liger_kernel": {}}):
        _rms_norm()(x)
    assert "FusedRMSNorm runs torch's kernel: liger-kernel cannot be imported (" in caplog.text
    norm._liger_rms_norm.cache_clear()
    with liger(has_in_place=False) as calls:
        _rms_norm()(x)
    assert not calls and "this liger-kernel has no in_place option; install a newer one" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_liger_leaves_the_gradient_of_a_residual_alone() -> None:
    """`norm(x) + f(norm(x))` reads the gradient of the norm's output twice, which in place is overwritten."""
    native = fill(LlamaRMSNorm(8, eps=1e-3)).float()
    layer = FusedRMSNorm.from_native_module(copy.deepcopy(native), None)
    x = known(3, 5, 8).float()
    with liger() as calls:
        residual, seen = torch.zeros(3, 5, 8, requires_grad=True), x.clone().requires_grad_()
        loss = (layer(seen.as_subclass(OnGPU)).as_subclass(torch.Tensor) + residual).mul(known(3, 5, 8, seed=1).float())
        loss.sum().backward()
    assert calls == [{"eps": 1e-3, "offset": 0.0, "casting_mode": "llama", "in_place": False}]
    expected = x.clone().requires_grad_()
    native(expected).mul(known(3, 5, 8, seed=1).float()).sum().backward()
    torch.testing.assert_close(seen.grad, expected.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, native.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(residual.grad, known(3, 5, 8, seed=1).float())


@pytest.mark.parametrize(
    ("dtype", "capability", "message"),
    [
        (torch.float64, (8, 0), "not inputs in torch.float64 and weights in torch.float32"),
        (torch.float32, (6, 1), "needs compute capability 7.0 for torch.float32, not 6.1"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_what_liger_does_not_serve_runs_in_torch(
    dtype: torch.dtype,
    capability: tuple[int, int],
    message: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with liger() as calls:
        _rms_norm()(_on_gpu(dtype))
        _rms_norm()(_on_gpu(dtype))
    assert not calls and caplog.text.count(message) == 1
