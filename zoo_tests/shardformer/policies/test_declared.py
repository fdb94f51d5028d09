"""Plans that are declared here: which end of a path counts, what the tree tells of stages, what is refused.

What breaks here first: an end that fits more than it means, a layer that returns another tuple. Look in
`shardformer/policies/plans/plan.py` and `stage_inference.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from shardformer import PipelineStageManager, ShardConfig
from shardformer.layers import ColumnParallelLinear
from shardformer.policies.mixers import DeltaNet, LatentAttention, change_of
from shardformer.policies.plans.plan import Plan, completions, declared_plans
from shardformer.policies.plans.policy import PlanPolicy
from shardformer.policies.plans.propose import ProposedPlan
from shardformer.policies.plans.stages import num_outputs
from shardformer.policies.plans.styles import STYLES
from shardformer.policies.registry import policy_for
from shardformer.stages.placeholders import LayerInputPlaceholder, Skipped, StageInput
from shardformer.stages.stage import Received, ZeroEmbedding
from zoo_tests.harness.ranks import distributed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = nn.Module(), nn.Module()
        self.attention.output = nn.Module()
        self.attention.output.dense, self.output.dense = nn.Linear(4, 4), nn.Linear(6, 4)
        self.num_heads = 4

    def forward(self, hidden_states: torch.Tensor, bias: torch.Tensor) -> tuple:
        outputs = (hidden_states, bias)
        outputs = outputs + (None,)
        return outputs


class Model(nn.Module):
    base_model_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.embed_positions = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.table, self.token = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(4)


def test_the_longest_end_of_a_path_counts() -> None:
    plan = Plan({"output.dense": "rowwise", "attention.output.dense": "replicate"})
    assert plan.styles_of(Model()) == {
        "layers.*.output.dense": "rowwise",
        "layers.*.attention.output.dense": "replicate",
    }


def test_attributes_that_count_heads_are_shared_out() -> None:
    plan = Plan({}, local={"layers.*": ("num_heads", "not_there")})
    assert plan.local_values("layers.2", Layer(), 2) == {"num_heads": 2}


def test_the_tree_tells_the_stages() -> None:
    layout = Plan({"output.dense": "rowwise"}, every=("table",), carried_inputs=("bias",)).stages_of(Model())
    assert layout.layers == "layers" and layout.carried_inputs == ("bias",) and layout.tuple_output == 2
    assert layout.first == {"embeddings": Received, "embed_positions": ZeroEmbedding}
    assert layout.every == ("token", "table") and layout.last == ("norm",)


def test_a_plan_tells_what_runs_before_the_layers_though_it_is_registered_after_them() -> None:
    model = Model()
    model.token_type, model.late = nn.Embedding(2, 4), nn.Embedding(9, 4)
    layout = Plan({"output.dense": "rowwise"}, first={"late": Received}).stages_of(model)
    assert layout.first["late"] is Received
    assert "late" not in layout.last and layout.last[-1] == "token_type"


@pytest.mark.parametrize(
    ("layer", "count"),
    [("llama.LlamaDecoderLayer", 0), ("t5.T5Block", 3), ("xlnet.XLNetLayer", 2), ("luke.LukeLayer", 2)],
)
def test_what_a_layer_returns_is_read_from_its_source(layer: str, count: int) -> None:
    family, name = layer.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert num_outputs(getattr(module, name).__new__(getattr(module, name))) == count


def test_layers_of_other_stages_return_what_is_carried() -> None:
    hidden, bias = torch.ones(2, 3), torch.zeros(3)
    stage_input = StageInput()
    stage_input.begin((hidden, bias), ["bias"])
    skipped, entered = Skipped(3, ["bias"]), LayerInputPlaceholder()
    skipped.stage_input = entered.stage_input = stage_input
    output = skipped(torch.zeros(2, 3))
    assert len(output) == 3 and output[1] is bias and output[2] is None
    torch.testing.assert_close(entered(torch.zeros(2, 3)), hidden)
    entered(torch.zeros(2, 3)).mul_(5)  # models scale in place
    assert hidden.max() == 1


@pytest.mark.parametrize(
    ("model_class", "config", "message"),
    [
        ("BigBirdModel", {"attention_type": "block_sparse"}, "use attention_type='original_full'"),
        ("Wav2Vec2Model", {"layerdrop": 0.1}, "Wav2Vec2Model with layerdrop=0.1 cannot be sharded; use layerdrop=0.0"),
        ("OPTModel", {"layerdrop": 0.1}, "layerdrop=0.1 skips layers at random, which a pipeline cannot"),
        ("Speech2TextModel", {"encoder_layerdrop": 0.1}, "use encoder_layerdrop=0.0"),
    ],
)
def test_a_configuration_that_cannot_be_sharded(model_class: str, config: dict, message: str) -> None:
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    cls = getattr(transformers, model_class)
    with torch.device("meta"):
        policy = policy_for(model := cls(cls.config_class(**small, **config)))
    policy.set_shard_config(ShardConfig(pipeline_stage_manager=PipelineStageManager(0, 2)))
    policy.set_model(model)
    assert any(message in problem for problem in policy.check())


def test_every_declared_style_is_known() -> None:
    plans = [*declared_plans().values(), *(each.derived for each in completions().values())]
    declared = {style for each in completions().values() for style in each.declared.values()}
    assert {style for plan in plans for style in (plan.styles or {}).values()} | declared <= set(STYLES)


_SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}


def _plan_of(family: str, **config: Any) -> Mapping[str, str]:
    with torch.device("meta"):
        model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**_SMALL, **config))
    policy = policy_for(model)
    policy.set_model(model)
    return policy.plan


def test_what_a_plan_leaves_whole_is_completed() -> None:
    """transformers has no plan of Bamba, and one of the experts alone for AFMoE; that of a user is left as it is."""
    bamba = _plan_of("Bamba", attn_layer_indices=[1], mamba_n_heads=8)
    assert bamba["layers.*.self_attn.o_proj"] == "rowwise" and bamba["layers.*.feed_forward.up_proj"] == "colwise"
    afmoe = _plan_of("Afmoe", num_dense_layers=1, num_local_experts=4)
    assert afmoe["layers.*.self_attn.gate_proj"] == "colwise"
    assert afmoe.get("layers.*.mlp.experts", "moe_tp_experts") == "moe_tp_experts"  # named since 5.21
    gemma = _plan_of("Gemma4Text", num_key_value_heads=2, head_dim=8, vocab_size=8, vocab_size_per_layer_input=8)
    assert gemma["embed_tokens_per_layer"] == "embedding_rowwise"
    for policy in (ProposedPlan({"fc": "colwise"}).policy(), PlanPolicy(Plan({"fc": "colwise"}))):
        policy.set_model(transformers.BambaModel(transformers.BambaConfig(**_SMALL, mamba_n_heads=8)))
        assert not policy.plan


def test_heads_of_latent_attention_are_cut() -> None:
    """Not those of one with an indexer, which the plan of transformers cuts: it reads parts that stay whole."""
    plan = _plan_of("DeepseekV3", first_k_dense_replace=1)
    parts = ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert {plan[f"layers.*.self_attn.{part}"] for part in parts} == {"attention_heads"}
    assert "layers.*.self_attn.q_a_proj" not in plan
    with torch.device("meta"):
        indexed = transformers.DeepseekV32Model(transformers.DeepseekV32Config(**_SMALL, first_k_dense_replace=1))
    assert not LatentAttention().styles(indexed, {})


def test_every_style_of_transformers_is_known() -> None:
    tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    # Styles of another plan, for expert parallelism.
    of_experts = {"grouped_gemm", "ep_dispatch_experts", "ep_router", "megamoe_router", "megamoe_experts"}
    assert set(tensor_parallel.ALL_PARALLEL_STYLES) - of_experts <= set(STYLES)


@distributed(2)
def test_heads_that_ranks_do_not_divide_are_gathered_or_whole() -> None:
    """Three heads on two ranks: projections are divided and gathered, or as they are; so it is in blocks."""
    config, sizes = ShardConfig(tensor_parallel_process_group=dist.group.WORLD), {**_SMALL, "head_dim": 8}
    of_qwen = {"linear_num_value_heads": 3, "layer_types": ["linear_attention", "full_attention"]}
    with torch.device("meta"):
        qwen = transformers.Qwen3_5TextModel(
            transformers.Qwen3_5TextConfig(**sizes, linear_num_key_heads=3, **of_qwen, vocab_size=8, pad_token_id=0)
        ).layers[0]
        olmo = transformers.OlmoHybridModel(
            transformers.OlmoHybridConfig(**_SMALL, linear_num_key_heads=3, **of_qwen, vocab_size=8, pad_token_id=0)
        ).layers[0]
    assert not DeltaNet().local_counts(qwen.linear_attn, config)
    assert change_of(qwen.linear_attn, "in_proj_qkv", config).kwargs == {"gather_output": True}
    assert change_of(olmo.linear_attn, "q_proj", config) is None
    olmo.linear_attn.num_k_heads = olmo.linear_attn.num_v_heads = 4
    assert DeltaNet().local_counts(olmo.linear_attn, config)["num_k_heads"] == 2
    assert change_of(olmo.linear_attn, "q_proj", config).target_module is ColumnParallelLinear
