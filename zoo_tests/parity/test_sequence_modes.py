"""All-to-all sequence parallelism trains like plain training: whole weights, cut sequences, exchanged heads.

What breaks here first: positions that a layer takes for those of its slice, padding that reaches the kernel, gradients
of whole weights that are not summed over the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES

_MODE = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}


def _case(family: str, layout: str, config: dict[str, Any] | None = None, **options: Any) -> Case:
    members = FAMILIES[family]
    recipe = Recipe(
        family=family,
        head=members.main_head,
        precision=members.precision,
        config=tuple((config or {}).items()),
        max_norm=0.05,
        optimizer="momentum",
    )
    return Case(recipe=recipe, layout=layout, options=tuple({**_MODE, **options}.items()))


FAST = [_case("bert", "tp2"), _case("llama", "tp2pp2"), _case("gpt2", "tp2dp2")]
SLOW = [
    _case("llama", "tp4", {"num_key_value_heads": 1}),
    _case("llama", "tp2", gradient_checkpointing="full"),
    _case("bert", "tp4", gradient_checkpointing="full"),
    _case("gpt2", "tp2pp2"),
    _case("qwen3", "tp2"),
    _case("mistral", "tp2pp2"),
    _case("vit", "tp2pp2"),
    _case("distilbert", "tp4"),
    _case("electra", "tp2"),
    _case("chatglm2", "tp2"),
    _case("bert", "tp2", {"attn_implementation": "eager"}),
    _case("gemma3", "tp2pp2"),  # by its own plan
]


def _parameters() -> list:
    fast = [pytest.param(case, id=str(case)) for case in FAST]
    return fast + [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("case", _parameters())
def test_all_to_all_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


_RING, _HEADS = {"cp_size": 2}, {"cp_size": 2, "sequence_parallelism_mode": "all_to_all"}


@pytest.mark.slow  # and complex numbers, which the simulated device has not
@distributed(2)
@pytest.mark.parametrize(
    "options", [_RING, {**_RING, "gradient_checkpointing": "full"}, _HEADS, {"tp_size": 2, **_MODE}]
)
def test_positions_that_attention_counts_are_those_of_whole_sequences(options: dict[str, Any]) -> None:
    """Llama 4 scales the queries of every second layer here by positions that it counts by the length of its input."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    sizes |= {"intermediate_size": 40, "intermediate_size_mlp": 40, "num_hidden_layers": 2, "num_local_experts": 2}
    temperature = {
        "no_rope_layer_interval": 2,
        "floor_scale": 3,
        "attn_scale": 0.5,
        "attention_chunk_size": 6,
        "initializer_range": 0.2,
    }

    def build() -> Llama4ForCausalLM:
        torch.manual_seed(7)
        return Llama4ForCausalLM(Llama4TextConfig(vocab_size=33, **sizes, **temperature)).double()

    ids = torch.randint(1, 33, (3, 19), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(19) < torch.tensor([19, 12, 15])[:, None]
    batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    plain, model = build(), build()
    expected = plain(**batch).loss
    expected.backward()
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
    torch.testing.assert_close(result.loss, expected.detach(), check_dtype=False)  # transformers computes it in fp32
    gradients = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    for name, gradient in optimizer.full_gradients().items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-7, rtol=1e-5, msg=name)


@distributed(2)
def test_a_length_that_rotary_embeddings_of_a_text_model_read_is_not_shared() -> None:
    """The text model's configuration says so, which is a part of that of a model with images."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    text = LlamaConfig(vocab_size=33, max_position_embeddings=8, rope_parameters=rope, **sizes)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=32))
    booster = Booster(plugin=HybridParallelPlugin(**_RING))
    with pytest.raises(ConfigurationError, match="rotary embedding depends on the length"):
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
