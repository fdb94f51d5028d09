"""What a plan leaves whole: cut only where the modules are of the classes that were seen, and ranks get whole heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import transformers

from shardformer import ShardConfig
from shardformer.policies.plans.plan import completion_of, region_of
from shardformer.policies.registry import policy_for
from zoo_tests.harness.ranks import distributed

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32, "image_size": 8, "patch_size": 4}
_TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 9}


def _model(vision_heads: int) -> transformers.LlavaForConditionalGeneration:
    vision = transformers.CLIPVisionConfig(**_SIZES, num_attention_heads=vision_heads)
    text = transformers.LlamaConfig(**_TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=8)
    with torch.device("meta"):
        return transformers.LlavaForConditionalGeneration(config)


def _tower_styles(
    model: transformers.PreTrainedModel, start: str = "model.vision_tower.encoder.layers.*."
) -> Mapping[str, str]:
    """The styles of the layers of the tower, by the end of their path."""
    policy = policy_for(model)
    policy.set_shard_config(ShardConfig(tensor_parallel_process_group=dist.group.WORLD))
    policy.set_model(model)
    assert not policy.check()
    return {path.removeprefix(start): style for path, style in policy.plan.items() if path.startswith(start)}


@distributed(2)
def test_heads_of_a_tower() -> None:
    """Three heads stay whole on two ranks, together with what is behind them; the feed-forward layer does not."""
    even, odd = _tower_styles(_model(4)), _tower_styles(_model(3))
    assert even["self_attn.q_proj"] == "colwise" and even["self_attn.out_proj"] == "rowwise"
    assert odd == {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
    assert even.items() > odd.items()


@distributed(2)
def test_a_class_that_was_not_seen() -> None:
    """A tower with other attention at the same path, whose forward nobody has looked at."""
    model = _model(4)
    attention = model.model.vision_tower.encoder.layers[1].self_attn
    attention.__class__ = type("OtherAttention", (type(attention),), {})
    assert _tower_styles(model) == {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}


@pytest.mark.parametrize("has_norms", [True, False])
@distributed(2)
def test_norms_of_queries_and_keys_over_all_heads(has_norms: bool) -> None:
    """Their attention stays whole: a rank's queries do not tell the norm."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 4}
    vision = {**sizes, "image_size": [8, 8], "patch_size": [4, 4], "use_qk_norm": has_norms}
    config = transformers.InternVLConfig(vision_config=vision, text_config={"model_type": "qwen2", **_TEXT})
    with torch.device("meta"):
        model = transformers.InternVLForConditionalGeneration(config)
    styles = _tower_styles(model, "model.vision_tower.encoder.layer.*.")
    assert styles["mlp.fc1"] == "colwise" and ("attention.q_proj" in styles) is not has_norms


@distributed(2)
def test_key_heads_fewer_than_ranks_are_copied() -> None:
    sizes = {**_TEXT, "num_key_value_heads": 1, "num_hidden_layers": 1, "attn_layer_indices": [0], "mamba_n_heads": 4}
    with torch.device("meta"):
        model = transformers.BambaForCausalLM(transformers.BambaConfig(**sizes, pad_token_id=0))
    policy = policy_for(model)
    policy.set_shard_config(ShardConfig(tensor_parallel_process_group=dist.group.WORLD))
    policy.set_model(model)
    assert not policy.check() and policy.plan["model.layers.*.self_attn.k_proj"] == "colwise"


@distributed(2)
def test_a_parameter_that_was_not_seen() -> None:
    """The bias of a convolution of which only the kernels are in the plan."""
    config = transformers.Lfm2Config(**_TEXT, conv_bias=True, layer_types=["conv", "full_attention"])
    with torch.device("meta"):
        model = transformers.Lfm2ForCausalLM(config)
    policy = policy_for(model)
    policy.set_shard_config(ShardConfig(tensor_parallel_process_group=dist.group.WORLD))
    found = completion_of(type(model))
    cut = {f"model.{path}": style for path, style in found.derived.styles.items()}
    assert found.fitting(model, policy).styles == cut and cut.pop("model.layers.*.conv.conv.bias") == "first_dim"
    assert replace(found, derived=replace(found.derived, styles=cut)).fitting(model, policy).styles == {}


@pytest.mark.parametrize(
    ("path", "region"),
    [
        ("layer.*.attention.self.query", "layer.*.attention"),  # columns and rows in different modules
        ("layer.*.attention.output.dense", "layer.*.attention"),
        ("layer.*.attention.self", "layer.*.attention"),
        ("layer.*.mlp", "layer.*.mlp"),
        ("layer.*.mlp.norm", "layer.*.mlp"),
        ("table", "table"),
    ],
)
def test_what_stays_whole_together(path: str, region: str) -> None:
    styles = {
        "layer.*.attention.self.query": "colwise",
        "layer.*.attention.self": "draws_per_rank",
        "layer.*.attention.output.dense": "rowwise",
        "layer.*.mlp.up": "packed_colwise",
        "layer.*.mlp.down": "rowwise",
        "layer.*.mlp.norm": "replicated_with_grad_allreduce",
        "layer.*.mlp": "all_reduce",
        "table": "embedding_rowwise",
    }
    assert region_of(path, styles) == region
