"""xformers through the attention registry, against a stand-in that refuses what the real kernels refuse.

What breaks here first: a release of transformers that hands masks to kernels in another form.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shardformer import ShardConfig, ShardFormer
from shardformer.attention import call_kernel
from zoo_tests.harness.kernel_packages import xformers
from zoo_tests.harness.native import known
from zoo_tests.zoo import FAMILIES

_KEYS = 13


def _mask(kind: str) -> dict[str, Tensor | None]:
    seen = torch.arange(_KEYS)[None, :] <= torch.arange(_KEYS)[:, None]
    padded = seen & (torch.arange(_KEYS) < torch.tensor([13, 9])[:, None, None, None])
    bias = known(2, 4, _KEYS, _KEYS).float()
    return {
        "none": {},
        "causal": {"attention_mask": seen[None, None]},
        "one row for all queries": {"attention_mask": padded[:, :, -1:]},
        "of a longer cache": {"attention_mask": torch.zeros(2, 1, _KEYS, 32)[..., :_KEYS]},
        "added": {"attention_mask": torch.zeros(2, 1, _KEYS, _KEYS).masked_fill(~padded, -1e4)},
        "bias of heads": {"position_bias": bias, "attention_mask": padded},
        "bias, features last": {"position_bias": bias.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)},
    }[kind]


@pytest.mark.parametrize("keys", [_KEYS, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "kind",
    ["none", "causal", "one row for all queries", "of a longer cache", "added", "bias of heads", "bias, features last"],
)
def test_masks_are_aligned_and_equal(kind: str, dtype: torch.dtype, keys: int) -> None:
    """Lengths that 8 does and does not divide; the kernel reads rows of a bias in vectors of 8 numbers."""
    masks = {
        name: mask[..., :keys, :keys] if mask.shape[2] > 1 else mask[..., :keys] for name, mask in _mask(kind).items()
    }
    query, key, value = (known(2, heads, keys, 8, seed=heads).to(dtype) for heads in (4, 2, 2))
    with xformers() as calls:
        module = SimpleNamespace(is_causal=False, num_key_value_groups=2)
        masks.setdefault("attention_mask", None)
        found, _ = call_kernel("xformers", module, query, key, value, scaling=0.3, dropout=0.0, **masks)
    bias = torch.zeros(2, 4, keys, keys)
    for mask in filter(lambda mask: mask is not None, masks.values()):
        bias = bias + (mask if mask.dtype != torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -1e4))
    repeated = (x.float().repeat_interleave(2, 1) for x in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query.float(), *repeated, bias, scale=0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found.float(), expected.transpose(1, 2), rtol=tolerance, atol=tolerance)
    assert calls == [{"bias": "NoneType" if kind == "none" else "Tensor", "p": 0.0, "scale": 0.3}]


def test_the_gradient_of_a_bias_passes() -> None:
    bias = known(1, 4, _KEYS, _KEYS).float().requires_grad_()
    query = known(2, 4, _KEYS, 8).float()
    with xformers():
        module = SimpleNamespace(is_causal=True)
        found, _ = call_kernel("xformers", module, query, query, query, None, position_bias=bias)
    found.square().sum().backward()
    assert bias.grad.tril().abs().sum() > 0 and bias.grad.triu(1).abs().sum() < 1e-6, "causal, with a bias too"


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_model_runs_on_it(family: str) -> None:
    members = FAMILIES[family]
    native = members.build(members.main_head, torch.float32)
    heads = native.config.num_attention_heads
    size = getattr(native.config, "head_dim", None) or native.config.hidden_size // heads
    if size % 4:
        pytest.skip(f"heads of size {size} are refused")
    batch = members.batch(members.main_head, 0, 6, torch.float32)
    batch = {name: value[::2].contiguous() for name, value in batch.items()}
    with xformers() as calls:
        config = ShardConfig(
            enable_tensor_parallelism=False, enable_flash_attention="xformers", device=torch.device("cuda")
        )
        model, _ = ShardFormer(config).optimize(copy.deepcopy(native))
        torch.testing.assert_close(model(**batch).loss, native(**batch).loss, rtol=1e-5, atol=1e-6)
    assert calls
