"""ChatGLM2, which transformers has not: its names, its positions, its masks and its cache.

There is no reference to compare with here: what is tested is what the published description says.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardformer.models.chatglm2 import ChatGLMForConditionalGeneration, ChatGLMRotary, rotate
from zoo_tests.zoo import FAMILIES

_NAMES = (
    "transformer.embedding.word_embeddings.weight",
    "transformer.encoder.final_layernorm.weight",
    "transformer.encoder.layers.0.input_layernorm.weight",
    "transformer.encoder.layers.0.mlp.dense_4h_to_h.weight",
    "transformer.encoder.layers.0.mlp.dense_h_to_4h.weight",
    "transformer.encoder.layers.0.post_attention_layernorm.weight",
    "transformer.encoder.layers.0.self_attention.dense.weight",
    "transformer.encoder.layers.0.self_attention.query_key_value.bias",
    "transformer.encoder.layers.0.self_attention.query_key_value.weight",
    "transformer.output_layer.weight",
)


def _model() -> ChatGLMForConditionalGeneration:
    return FAMILIES["chatglm2"].build("generation", torch.float32).eval()


def test_a_checkpoint_in_the_layout_of_the_original_opens(tmp_path: Path) -> None:
    model = _model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert {name for name in tensors if ".layers." not in name or ".layers.0." in name} == set(_NAMES)
    save_file({**tensors, "transformer.rotary_pos_emb.inv_freq": torch.zeros(4)}, file, {"format": "pt"})
    again, info = ChatGLMForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.arange(2, 9)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_half_of_a_head_turns_by_its_position() -> None:
    x = torch.randn(1, 1, 3, 16)
    turned = rotate(x, *ChatGLMRotary(16)(torch.tensor([[0, 1, 5]])))
    assert torch.equal(turned[..., 8:], x[..., 8:]) and torch.equal(turned[:, :, 0], x[:, :, 0])
    for pair, frequency in enumerate(10000.0 ** -(torch.arange(0, 8, 2) / 8)):
        even, odd = x[0, 0, 2, 2 * pair].item(), x[0, 0, 2, 2 * pair + 1].item()
        cos, sin = math.cos(5 * frequency), math.sin(5 * frequency)
        assert turned[0, 0, 2, 2 * pair].item() == pytest.approx(even * cos - odd * sin, abs=1e-5)
        assert turned[0, 0, 2, 2 * pair + 1].item() == pytest.approx(odd * cos + even * sin, abs=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_token_sees_later_ones_or_padding(implementation: str) -> None:
    model = _model()
    model.set_attn_implementation(implementation)
    ids = torch.randint(1, 100, (1, 8))
    changed = ids.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(model(ids).logits[:, :5], model(changed).logits[:, :5])
    padded, mask = torch.cat([torch.zeros_like(ids[:, :3]), ids], 1), torch.tensor([[0] * 3 + [1] * 8])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_generation_with_a_cache_finds_the_same_tokens() -> None:
    model, ids = _model(), torch.randint(1, 100, (2, 6))
    with_cache = model.generate(ids, max_new_tokens=8, do_sample=False)
    without = ids
    for _ in range(8):
        without = torch.cat([without, model(without, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize(("field", "value"), [("rope_ratio", 50), ("original_rope", False), ("pre_seq_len", 128)])
def test_what_would_change_the_result_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}={value} is not computed by this ChatGLM2; use a checkpoint with"):
        FAMILIES["chatglm2"].build("generation", torch.float32, **{field: value})


def test_padded_prompts_generate_like_each_by_itself() -> None:
    model, ids = _model(), torch.randint(1, 100, (1, 6))
    alone = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[:, 6:]
    padded = torch.cat([torch.zeros_like(ids[:, :3]), ids], 1)
    mask = (padded != 0).long()
    found = model.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)[:, 9:]
    assert torch.equal(found, alone)
