"""What is read from forwards: inputs between layers, and positions that are counted by the length of an input."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partialmethod, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.utils.source import counts_positions, inputs_between_layers


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("qwen3_vl", "Qwen3VLTextModel", ("visual_pos_masks", "deepstack_visual_embeds")),
        ("granite4_vision", "Granite4VisionTextModel", ("vision_mask", "deepstack_features")),
        ("mllama", "MllamaTextModel", ("cross_attention_states",)),
        ("llama", "LlamaModel", ()),
        ("gemma4", "Gemma4TextModel", ("logits_to_keep",)),  # `per_layer_inputs` is made anew, on every stage
    ],
)
def test_inputs_that_are_read_between_layers(family: str, name: str, expected: tuple[str, ...]) -> None:
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    found = inputs_between_layers(getattr(module, name), "layers")
    assert set(found) - {"logits_to_keep"} == set(expected) - {"logits_to_keep"}  # which not every release has


class _Unpacked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _, length, _ = x.shape
        return x * torch.arange(length)[:, None]


def _renamed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def call(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x)

    return call


class _Decorated(nn.Module):
    @_renamed
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1])[:, None]


class _Hidden(nn.Module):
    @partialmethod
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1])[:, None]


class _AndHeads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1])[:, None] + torch.arange(4)


class _Features(nn.Module):
    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return x * torch.arange(x.shape[-1])


def test_positions_that_a_forward_counts() -> None:
    llama4 = importlib.import_module("transformers.models.llama4.modeling_llama4")
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    assert counts_positions(llama4.Llama4TextAttention) is True  # under the decorator of transformers 5.24, too
    assert counts_positions(_Decorated) is True and counts_positions(_Hidden) is None
    assert counts_positions(_Unpacked) is True
    assert counts_positions(_AndHeads) is None  # which of the two is a position cannot be told
    assert not counts_positions(_Features)
    assert not counts_positions(llama.LlamaAttention)
