"""Policies: a table that does not fit its model is refused, with all reasons, before anything is changed.

What breaks here first: names of sub-modules in a new release of transformers. Look in the family's table in
`shardformer/policies`, and for the checks in `shardformer/shardformer.py`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Mapping

import pytest
import transformers
from torch import Tensor, nn

from shardformer import (
    ModulePolicyDescription,
    PipelineStageManager,
    Policy,
    ShardConfig,
    ShardFormer,
    StageLayout,
    SubModuleReplacementDescription,
    policy_for,
    register_policy,
)
from shardformer.layers import ColumnParallelLinear, RowParallelLinear
from shardformer.loss.heads import USUAL_HEAD_LOSSES, HeadLossBuilder, own_loss
from shardformer.loss.text import causal_lm, masked_lm
from shardformer.policies import registry
from shardformer.policies.families.decoders import LlamaPolicy
from shardformer.policies.families.encoders import BertPolicy
from shardformer.policies.plans.plan import Plan
from shardformer.policies.plans.stages import stage_layout
from shardformer.stages.stage import Received
from zoo_tests.zoo import FAMILIES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 2)


class RunsAgain(Base):
    """Layers in the middle run several times, as in Dory and Inkling 2 Loop."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:1]:
            x = block(x)
        for _ in range(2):
            for block in self.blocks[1:]:
                x = block(x)
        return x


class RunsChunks(Base):
    """Generation takes a prompt in parts, as in xLSTM."""

    def forward(self, x: Tensor) -> Tensor:
        while not self.training:
            for block in self.blocks:
                x = block(x)
        for block in self.blocks:
            x = block(x)
        return x


def column(suffix: str, **options: object) -> SubModuleReplacementDescription:
    return SubModuleReplacementDescription(suffix, ColumnParallelLinear, **options)


class TablePolicy(Policy):
    """A policy for `Base` with a table to choose."""

    def __init__(self, replacements: list[SubModuleReplacementDescription], stages: StageLayout | None) -> None:
        super().__init__()
        self.replacements, self.stages = replacements, stages

    def head_counts(self) -> Mapping[str, int]:
        return {}

    def check(self) -> list[str]:
        return []

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        return {"Block": ModulePolicyDescription(sub_module_replacement=self.replacements)}


WHOLE_TABLE = [
    column("up"),
    SubModuleReplacementDescription("down", RowParallelLinear),
    SubModuleReplacementDescription("norm", None),
]
LAYOUT = StageLayout(layers="blocks", first={"embed": Received}, last=("head",))


def _shard(policy: Policy, model: nn.Module | None = None, num_stages: int = 1) -> nn.Module:
    config = ShardConfig(pipeline_stage_manager=PipelineStageManager(0, num_stages))
    return ShardFormer(config).optimize(model or Base(), policy)[0]


@pytest.mark.usefixtures("two_fake_ranks")
class TestCompleteness:
    def test_a_complete_table_is_applied(self) -> None:
        model = _shard(TablePolicy(WHOLE_TABLE, LAYOUT))
        for block in model.blocks:
            assert isinstance(block.up, ColumnParallelLinear) and isinstance(block.down, RowParallelLinear)
            assert block.up.weight.shape == (4, 4) and isinstance(block.norm, nn.LayerNorm)
        assert all(hasattr(param, "shard_spec") for param in model.parameters())

    def test_a_missing_sub_module_is_named_with_the_nearest(self) -> None:
        table = [*WHOLE_TABLE, column("upp")]
        with pytest.raises(ValueError, match=r"Block has no sub-module 'upp'; the nearest are \['up'"):
            _shard(TablePolicy(table, LAYOUT))

    def test_an_optional_sub_module_may_be_missing(self) -> None:
        _shard(TablePolicy([*WHOLE_TABLE, column("gate", ignore_if_not_exist=True)], LAYOUT))

    def test_an_unclaimed_module_is_named(self) -> None:
        expected = r"TablePolicy says nothing about blocks.\*.norm \(a LayerNorm\), so that.*use tp_size=1"
        with pytest.raises(ValueError, match=expected):
            _shard(TablePolicy(WHOLE_TABLE[:2], LAYOUT))

    def test_all_reasons_come_together_and_nothing_is_changed(self) -> None:
        model = Base()
        before = {name: (type(module), id(module)) for name, module in model.named_modules()}
        with pytest.raises(ValueError) as caught:
            _shard(TablePolicy([column("up"), column("nothing")], LAYOUT), model)
        for reason in ("no sub-module 'nothing'", "blocks.*.down", "blocks.*.norm"):
            assert reason in str(caught.value)
        assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before

    def test_a_target_of_the_wrong_kind_is_refused(self) -> None:
        table = [*WHOLE_TABLE[:2], column("norm")]
        with pytest.raises(TypeError, match="LayerNorm is not a linear layer; name an nn.Linear or a Conv1D"):
            _shard(TablePolicy(table, LAYOUT))


class TestStages:
    def test_without_a_stage_layout_there_is_no_pipeline(self) -> None:
        with pytest.raises(ValueError, match="cannot be cut into pipeline stages; use pp_size=1"):
            _shard(TablePolicy(WHOLE_TABLE, None), num_stages=2)

    @pytest.mark.parametrize(("cls", "is_cut"), [(RunsAgain, False), (RunsChunks, True), (Base, True)])
    def test_layers_that_run_several_times_are_not_cut(self, cls: type[nn.Module], is_cut: bool) -> None:
        assert (stage_layout(cls(), "blocks") is not None) == is_cut
        # A plan looks at how often its model does it: a Perceiver of one block runs its layers once.
        pipelined = Plan({}, layers="blocks", pipelined=lambda model: cls is not Base)
        assert (pipelined.stages_of(cls()) is not None) == (cls is not Base)

    def test_a_module_without_a_stage_is_named(self) -> None:
        layout = StageLayout(layers="blocks", first={"embed": Received})
        with pytest.raises(ValueError, match=r"modules \['head'\] are neither first, last nor on every stage"):
            _shard(TablePolicy(WHOLE_TABLE, layout), num_stages=2)

    def test_more_stages_than_layers(self) -> None:
        with pytest.raises(ValueError, match="pp_size=4 is larger than the model's 3 layers"):
            _shard(TablePolicy(WHOLE_TABLE, LAYOUT), num_stages=4)

    def test_a_stage_keeps_the_names_of_what_it_holds(self) -> None:
        model = _shard(TablePolicy(WHOLE_TABLE, LAYOUT), num_stages=2)
        held = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        assert held == {"embed", *(f"blocks.{i}.{part}" for i in (0, 1) for part in ("up", "down", "norm"))}


@pytest.mark.parametrize(
    ("family", "config", "tp_size", "message"),
    [
        ("bert", {}, 3, "tp_size=3 does not divide num_attention_heads=4; use 1, 2 or 4"),
        ("gpt2", {}, 8, "tp_size=8 does not divide num_attention_heads=4; use 1, 2 or 4"),
        ("swin", {}, 8, "tp_size=8 does not divide num_heads[0]=4; use 1, 2 or 4"),
        ("clip", {}, 3, "tp_size=3 does not divide vision_config.num_attention_heads=4; use 1, 2 or 4"),
        (
            "gpt_neox",
            {},
            3,
            "tp_size=3 does not divide the 4 heads of 'gpt_neox.layers.4.attention.query_key_value'; use 1, 2 or 4",
        ),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "tp_size=4 neither divides num_key_value_heads=3 nor is a multiple of it; use 1 or 3",
        ),
    ],
)
def test_heads_that_cannot_be_shared_out(
    family: str, config: dict[str, int], tp_size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardConfig, "tensor_parallel_size", tp_size)
    model = FAMILIES[family].build(next(iter(FAMILIES[family].heads)), **config)
    policy = policy_for(model)
    policy.set_model(model)
    policy.set_shard_config(ShardConfig())
    assert policy.check() == [message]


def test_fewer_key_value_heads_than_ranks_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardConfig, "tensor_parallel_size", 4)
    policy = LlamaPolicy()
    policy.set_model(FAMILIES["llama"].build("causal_lm", num_key_value_heads=1))
    policy.set_shard_config(ShardConfig())
    assert policy.check() == []


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize(
    ("family", "head", "options", "message"),
    [
        ("swin", "image", {"sequence": True}, "is not supported for SwinForImageClassification: SwinPolicy does not"),
        ("swinv2", "backbone", {"stages": 2}, "Swinv2Backbone reads hidden states that lie on several pipeline stages"),
        ("beit", "backbone", {"sequence": True}, "leaves BeitBackbone parts of the hidden states that it reads; use"),
        ("bloom", "causal_lm", {"slow_but_exact": True, "pretraining_tp": 2}, "with slow_but_exact=True cannot be"),
        ("mvp", "generation", {"use_prompt": True}, "use use_prompt=False"),
        ("whisper", "audio", {"use_weighted_layer_sum": True, "stages": 2}, "reads hidden states that lie on several"),
    ],
)
def test_what_a_family_cannot_do(family: str, head: str, options: dict[str, int], message: str) -> None:
    fields = {name: value for name, value in options.items() if name not in ("stages", "sequence")}
    model = FAMILIES[family].build(head, **fields)
    policy = policy_for(model)
    policy.set_model(model)
    policy.set_shard_config(
        ShardConfig(
            pipeline_stage_manager=PipelineStageManager(0, options.get("stages", 1)),
            enable_sequence_parallelism=options.get("sequence", False),
        )
    )
    (problem,) = policy.check()
    assert message in problem


class QuietPolicy(Policy):
    """Says nothing but what it has to."""

    def head_counts(self) -> Mapping[str, int]:
        return {}

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        return {"Block": ModulePolicyDescription(sub_module_replacement=WHOLE_TABLE)}


class SayingPolicy(QuietPolicy):
    supports_sequence_parallel = True


class OtherTablePolicy(SayingPolicy):
    """Says nothing about its own table."""

    def module_policy(self) -> Mapping[str, ModulePolicyDescription]:
        return {}


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize(("policy", "may"), [(QuietPolicy, False), (SayingPolicy, True), (OtherTablePolicy, False)])
def test_a_policy_has_to_say_that_the_sequence_may_be_cut(policy: type[Policy], may: bool) -> None:
    asked = policy()
    asked.set_model(Base())
    asked.set_shard_config(ShardConfig(enable_sequence_parallelism=True))
    refusal = f"{policy.__name__} does not say supports_sequence_parallel = True; use enable_sequence_parallelism=False"
    assert [refusal in problem for problem in asked.check()] == ([] if may else [True])


class QuietZambaPolicy(BertPolicy):
    """Declares no losses. Those of its base class are about other heads."""


class ZambaPolicy(BertPolicy):
    """Zamba computes its loss by itself, unlike other heads with its suffix."""

    head_losses = {**USUAL_HEAD_LOSSES, "ForSequenceClassification": masked_lm}


@pytest.mark.parametrize(("policy", "builder"), [(QuietZambaPolicy, None), (ZambaPolicy, masked_lm)])
def test_a_policy_has_to_declare_the_losses_of_its_heads(
    policy: type[Policy], builder: HeadLossBuilder | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = transformers.ZambaForSequenceClassification  # has neither a policy nor a plan
    with monkeypatch.context() as patched:
        patched.setattr(registry, "family_policy_of", lambda _: policy)
        assert registry.head_loss_builder(head) is builder
    with monkeypatch.context() as patched:
        patched.setattr(
            registry, "_REGISTERED", {f"{head.__module__}.{head.__name__}": f"{__name__}.{policy.__name__}"}
        )
        assert registry.head_loss_builder(head) is builder
    model = head.__new__(head)
    registry.keep_head_losses(model, policy())
    assert registry.head_loss_builder(head, getattr(model, "declared_head_losses", None)) is builder


def test_the_longest_declared_name_counts() -> None:
    class BaseForCausalLM(Base):
        def forward(self) -> None:
            """Compute a loss of its own."""

    declared = {"ForCausalLM": causal_lm, "BaseForCausalLM": masked_lm, "LM": own_loss}
    derived = type("DerivedFromBase", (BaseForCausalLM,), {})
    assert registry.head_loss_builder(BaseForCausalLM) is None
    assert registry.head_loss_builder(BaseForCausalLM, declared) is masked_lm
    assert registry.head_loss_builder(derived, declared) is masked_lm, "the forward is that of BaseForCausalLM"
    assert registry.head_loss_builder(type("NewForward", (derived,), {"forward": Block.forward}), declared) is None


# ----- the registry -----


def test_every_class_of_the_registry_exists_and_has_its_policy() -> None:
    for qualified_name, policy in registry.supported_classes().items():
        module, _, name = qualified_name.rpartition(".")
        model_class = getattr(importlib.import_module(module), name)
        assert type(policy_for(model_class.__new__(model_class))) is policy


def test_an_unsupported_class_is_told_the_ways_to_describe_it() -> None:
    unknown = type("BertForSomethingElse", (nn.Module,), {})
    ways = r"neither a .* policy nor .*; tp_size=1 .* sharding_dim=-1 .* a Policy .*, a TPInfo or slots.*--propose"
    with pytest.raises(ValueError, match=f"model class BertForSomethingElse has {ways}"):
        policy_for(unknown())


def test_a_style_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardConfig, "tensor_parallel_size", 2)
    model = FAMILIES["phi3"].build("causal_lm")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp": "colwise_of_tomorrow"}
    policy = policy_for(model)
    policy.set_model(model)
    policy.set_shard_config(ShardConfig())
    (problem,) = policy.check()
    assert "tensor-parallel style 'colwise_of_tomorrow' in the plan of Phi3ForCausalLM is not known" in problem


def test_a_subclass_and_remote_code_of_the_same_name_are_found() -> None:
    derived = type("MyClassifier", (transformers.BertForSequenceClassification,), {})
    remote = type("LlamaForCausalLM", (nn.Module,), {"__module__": "transformers_modules.someone"})
    assert isinstance(policy_for(derived.__new__(derived)), BertPolicy)
    assert isinstance(policy_for(remote.__new__(remote)), LlamaPolicy)


def test_a_policy_of_a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_policy(f"{Base.__module__}.Base", f"{__name__}.BertPolicy")
    assert isinstance(policy_for(Base()), BertPolicy)


# ----- ShardConfig -----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
            "sequence_parallelism_mode='ring_attn' does not shard over the tensor-parallel ranks; use 'split_gather'",
        ),
        ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by=0 must be positive"),
    ],
)
def test_shard_config_refuses_what_it_cannot_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardConfig(**options)


@pytest.mark.usefixtures("two_fake_ranks")
def test_enable_all_optimization_switches_on_what_there_is() -> None:
    config = ShardConfig(enable_all_optimization=True)
    assert config.enable_fused_normalization and config.enable_sequence_parallelism and config.sequence is not None


def test_a_family_is_a_description() -> None:
    modules = {inspect.getmodule(policy) for policy in registry.family_policies().values()}
    classes = [node for each in modules for node in ast.walk(ast.parse(inspect.getsource(each)))]
    lines = sorted(node.end_lineno - node.lineno + 1 for node in classes if isinstance(node, ast.ClassDef))
    assert lines[len(lines) // 2] <= 40 and lines[-1] < 110, lines
