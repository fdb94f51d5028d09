"""Models whose later layers read more than the hidden state, cut into two pipeline stages or parts of sequences.

What breaks here first: a value that does not travel, and one of the whole sequence that meets a part of it.
docs/results/coverage.md counts many more classes of this kind.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed

_VOCABULARY = 33


def _gemma4() -> nn.Module:
    """Layers read embeddings of their own; the last two reuse the keys and values of the second and third."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=_VOCABULARY,
        vocab_size_per_layer_input=_VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=8,
        hidden_size_per_layer_input=6,
        sliding_window=4,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    return Gemma4ForCausalLM(config)


def _funnel() -> nn.Module:
    """Blocks of layers that pool tokens; the decoder reads the output of the first block again."""
    from transformers import FunnelConfig, FunnelForMaskedLM

    sizes = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 40, "num_decoder_layers": 1}
    return FunnelForMaskedLM(FunnelConfig(vocab_size=_VOCABULARY, block_sizes=[2, 2], **sizes))


def _qwen3_vl() -> nn.Module:
    """Features of three layers of the tower are added behind the first three layers of text (DeepStack)."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    heads = {"hidden_size": 32, "intermediate_size": 40}
    text = {**heads, "vocab_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 8, "rope_parameters": rope, "pad_token_id": 0}
    vision = {**heads, "depth": 3, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32, "temporal_patch_size": 1}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1, 2]}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **tokens))


def _images() -> dict[str, Tensor]:
    """Texts of different lengths with one image, of 4 tokens, or two in a row."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 80, (4, 17), generator=generator)
    ids[:, 2], ids[:, 3:7], ids[::3, 9:13] = 92, 90, 90
    mask = torch.arange(17) < torch.tensor([17, 9, 12, 15])[:, None]
    count = int((ids == 90).sum())  # each image has 4 x 4 patches
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill((ids == 90) | ~mask, -100),
        "mm_token_type_ids": (ids == 90).long(),
        "pixel_values": torch.randn(4 * count, 48, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * (count // 4)),
    }


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, _VOCABULARY, (5, 11), generator=generator)
    mask = torch.arange(11) < torch.tensor([11, 7, 9, 11, 4])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


@distributed(2)
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (_gemma4, {"layers_per_stage": (3, 2)}),
        (_gemma4, {"layers_per_stage": (1, 1, 1, 2), "pp_style": "zbv"}),
        (_funnel, {"layers_per_stage": (2, 1, 1, 1), "pp_style": "zero_bubble"}),  # between two blocks
        (_funnel, {"layers_per_stage": (3, 2)}),
        (_qwen3_vl, {"layers_per_stage": (1, 3)}),
        (_qwen3_vl, {"layers_per_stage": (1, 1, 1, 1), "pp_style": "zbv"}),
    ],
)
def test_what_later_stages_read_travels(build: Any, options: dict[str, Any]) -> None:
    _compare(build, {"pp_size": 2, "num_microbatches": 2, **options})


@distributed(2)
@pytest.mark.parametrize(
    "options",
    [
        {"cp_size": 2},
        {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"},
        {"tp_size": 2, "enable_sequence_parallelism": True},
        {"tp_size": 2, "enable_sequence_parallelism": True, "gradient_checkpointing": "full"},
    ],
)
def test_features_of_tokens_meet_the_parts_of_their_sequences(options: dict[str, Any]) -> None:
    _compare(_qwen3_vl, options)


def _compare(build: Any, options: dict[str, Any]) -> None:
    batch = _images() if build is _qwen3_vl else _batch()
    torch.manual_seed(7)
    plain = build().eval()
    torch.manual_seed(7)
    model = build().eval()
    expected = plain(**batch).loss
    expected.backward()
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.train("gradient_checkpointing" in options)  # without dropout, then
    result = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    torch.testing.assert_close(result.loss, expected.detach())
    gradients = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    for name, gradient in optimizer.full_gradients().items():
        if name in gradients:
            torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-4, msg=name)
