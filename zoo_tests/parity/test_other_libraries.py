"""Models of diffusers and timm under a TPInfo, and losses of sentence-transformers over a boosted encoder.

What fails here first: a library that splits its heads by another attribute, and the share of a replica in a loss over
pairs of its own batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import TPInfo
from zoo_tests.harness.ranks import distributed

_JOINT = [f"transformer_blocks.*.attn.{name}" for name in ("to_q", "to_k", "to_v")]
_JOINT += [f"transformer_blocks.*.attn.add_{part}_proj" for part in "qkv"]
_JOINT_OUT = ("transformer_blocks.*.attn.to_out.0", "to_add_out", "ff.net.2", "ff_context.net.2")
_HEAD_NORMS = [f"transformer_blocks.*.attn.norm_{name}" for name in ("q", "k", "added_q", "added_k")]
_MODELS: dict[str, tuple[str, dict[str, Any], TPInfo]] = {
    "DiTTransformer2DModel": (
        "diffusers",
        {"out_channels": 8, "patch_size": 2, "num_layers": 3, "sample_size": 8, "num_embeds_ada_norm": 10},
        TPInfo()
        .shard_col("attn1.to_q", "attn1.to_k", "attn1.to_v", "ff.net.0.proj")
        .shard_row("attn1.to_out.0", "ff.net.2")
        .shrink({"attn1": {"heads"}}),
    ),
    "SD3Transformer2DModel": (
        "diffusers",
        {"sample_size": 8, "num_layers": 3, "joint_attention_dim": 24, "caption_projection_dim": 32}
        | {"pooled_projection_dim": 20, "out_channels": 4, "pos_embed_max_size": 8},
        TPInfo()
        .shard_col(*_JOINT, "ff.net.0.proj", "ff_context.net.0.proj")
        .shard_row(*_JOINT_OUT)
        .shrink({"attn": {"heads"}}),
    ),
    "FluxTransformer2DModel": (
        "diffusers",
        {"patch_size": 1, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 24}
        | {"pooled_projection_dim": 20, "axes_dims_rope": (2, 2, 4)},
        TPInfo()
        .shard_col(*_JOINT, "ff.net.0.proj", "ff_context.net.0.proj")
        .shard_row(*_JOINT_OUT)
        .partial_grad(*_HEAD_NORMS)
        .shrink({"transformer_blocks.*.attn": {"heads"}}),
    ),
    "vit_tiny_patch16_224": (
        "timm",
        {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5},
        TPInfo()
        .shard_col({"attn.qkv": {"stride": 3}}, "mlp.fc1")
        .shard_row("attn.proj", "mlp.fc2")
        .shrink({"attn": {"num_heads", "attn_dim"}}),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_a_model_of_another_library_trains_as_it_does_alone(name: str) -> None:
    library = _MODELS[name][0]
    try:
        importlib.import_module(library)
    except Exception as error:  # torchvision, which timm needs, has errors of many types with another torch
        pytest.skip(f"{library} cannot be imported: {error}")
    _trains_like_plain_training(name)


@distributed(2)
def _trains_like_plain_training(name: str) -> None:
    model, batch = _model(name), _batch(name)
    inputs = {key: value for key, value in batch.items() if key not in _criterion.own_entries}
    loss = _criterion(model(**inputs), batch)
    loss.backward()
    whole = {key: param.grad.clone() for key, param in model.named_parameters()}
    num_whole = sum(param.numel() for param in model.parameters())
    model.zero_grad()
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, tp_info=_MODELS[name][2]))
    model, optimizer, criterion = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), _criterion)
    torch.testing.assert_close(booster.execute_pipeline(iter([batch]), model, criterion, optimizer).loss, loss.detach())
    found = optimizer.full_gradients()
    assert found.keys() == whole.keys() and sum(param.numel() for param in model.parameters()) < 0.85 * num_whole
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, whole[key], msg=lambda text, key=key: f"{key}: {text}")


def _model(name: str) -> nn.Module:
    torch.manual_seed(1)
    library, sizes, _ = _MODELS[name]
    if library == "timm":
        model = importlib.import_module(library).create_model(name, **sizes)
    else:
        heads = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4}
        model = getattr(importlib.import_module(library), name)(**heads, **sizes)
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # DiT drops labels of classes at random
            module.dropout_prob = 0.0
    with torch.no_grad():
        for param in model.parameters():  # the last layers start at 0
            param.add_(torch.randn_like(param), alpha=0.05)
    return model.double().train()


def _batch(name: str) -> dict[str, Tensor]:
    """Six samples."""
    torch.manual_seed(3)
    steps = torch.randint(0, 900, (6,))
    if name.startswith("vit"):
        return {"x": torch.randn(6, 3, 16, 16).double(), "labels": torch.randint(0, 5, (6,))}
    if name.startswith("DiT"):
        images = {"hidden_states": torch.randn(6, 4, 8, 8).double(), "target": torch.randn(6, 8, 8, 8).double()}
        return {**images, "timestep": steps, "class_labels": torch.randint(0, 10, (6,))}
    shape = (6, 4, 8, 8) if name.startswith("SD3") else (6, 9, 4)
    places = torch.stack([torch.zeros(9), torch.arange(9) // 3, torch.arange(9) % 3], dim=1)
    return {
        "hidden_states": torch.randn(shape).double(),
        "encoder_hidden_states": torch.randn(6, 5, 24).double(),
        "pooled_projections": torch.randn(6, 20).double(),
        "timestep": steps.double(),
        "target": torch.randn(shape).double(),
        **({} if name.startswith("SD3") else {"img_ids": places, "txt_ids": torch.zeros(5, 3)}),
    }


def _criterion(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    if "labels" in batch:
        return F.cross_entropy(outputs, batch["labels"])
    return F.mse_loss(outputs["sample"], batch["target"])


_criterion.own_entries = ("labels", "target")  # the models do not take them


class _Encoder(nn.Module):
    """The first module of a SentenceTransformer, over any encoder of transformers."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        return features | {"token_embeddings": self.encoder(**inputs).last_hidden_state}


def _pair_loss(name: str, encoder: nn.Module) -> Callable[[list[dict[str, Tensor]], Tensor], Tensor]:
    from sentence_transformers import SentenceTransformer, losses
    from sentence_transformers.models import Pooling

    return getattr(losses, name)(SentenceTransformer(modules=[_Encoder(encoder), Pooling(32)], device="cpu"))


def _pairs(rows: slice) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Six pairs of ragged sentences, cut to some rows, and their labels."""
    torch.manual_seed(4)
    sides = []
    for length in (7, 9):
        mask = (torch.arange(length) < torch.randint(3, length + 1, (6, 1))).long()
        ids = torch.randint(1, 50, (6, length)) * mask
        sides.append({"input_ids": ids[rows], "attention_mask": mask[rows]})
    return sides, torch.tensor([1.0, 0, 1, 1, 0, 0])[rows]


def _encoder() -> nn.Module:
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertModel(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes, **drops), add_pooling_layer=False)


_LOSSES = ("MultipleNegativesRankingLoss", "CosineSimilarityLoss", "ContrastiveLoss")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("name", _LOSSES)
def test_losses_over_pairs(name: str, layout: str) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    _pair_loss_is_exact(name, layout)


@distributed(2)
def _pair_loss_is_exact(name: str, layout: str) -> None:
    """A replica has negatives of its own batch, as with DDP: gradients are the mean of those of both halves."""
    parts = [slice(0, 3), slice(3, 6)] if layout == "dp2" else [slice(0, 6)]
    encoder = _encoder().double()
    whole = [_pair_loss(name, encoder)(*_pairs(part)) for part in parts]
    (sum(whole) / len(whole)).backward()
    expected = {key: param.grad.clone() for key, param in encoder.named_parameters()}
    encoder.zero_grad()
    plugin = HybridParallelPlugin(tp_size=2 if layout == "tp2" else 1, zero_stage=1)
    booster = Booster(plugin=plugin)
    boosted, optimizer = booster.boost(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    loss = _pair_loss(name, boosted)(*_pairs(parts[plugin.dp_rank]))
    torch.testing.assert_close(loss, whole[plugin.dp_rank])
    booster.backward(loss, optimizer)
    for key, gradient in optimizer.full_gradients().items():
        torch.testing.assert_close(gradient, expected[key], msg=lambda text, key=key: f"{key}: {text}")


def test_diffusers_models_are_refused_under_a_pipeline() -> None:
    pytest.importorskip("diffusers")
    _are_refused_under_a_pipeline()


@distributed(2)
def _are_refused_under_a_pipeline() -> None:
    name = "DiTTransformer2DModel"
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, tp_info=_MODELS[name][2])
    with pytest.raises(ConfigurationError, match="cannot be cut into pipeline stages; use pp_size=1"):
        Booster(plugin=plugin).boost(_model(name))
