"""Models whose later layers read more than the hidden state, cut into two pipeline stages.

What breaks here first: a value that does not travel. docs/results/coverage.md counts many more classes of this kind.
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
    ],
)
def test_what_later_stages_read_travels(build: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    plain = build().eval()
    torch.manual_seed(7)
    model = build().eval()
    expected = plain(**_batch()).loss
    expected.backward()
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, **options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    result = booster.execute_pipeline(iter([_batch()]), model, optimizer=optimizer)
    torch.testing.assert_close(result.loss, expected.detach())
    gradients = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    for name, gradient in optimizer.full_gradients().items():
        if name in gradients:
            torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-4, msg=name)
