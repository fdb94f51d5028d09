"""Plans derived from what linear layers read: which regions are found, and which look like one and are none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.policies.plans.plan import declared_plans, proposed_plans
from shardformer.policies.plans.propose import ProposedPlan, propose_plan
from shardformer.policies.plans.regions import Region, find_regions, local_choices, record
from shardformer.policies.plans.styles import STYLES
from shardformer.policies.registry import family_policies, policy_for
from zoo_tests.harness.case import Recipe

_WIDTH, _HEADS = 16, 4


class Attention(nn.Module):
    """Attention of an unusual kind: one weight for all three projections, a bias per head, mixed heads if asked."""

    def __init__(self, mixes_heads: bool = False) -> None:
        super().__init__()
        self.h, self.width, self.mixes_heads = _HEADS, _WIDTH, mixes_heads
        self.all_three, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.drop, self.drop_out = nn.Dropout(0.1), nn.Dropout(0.1)
        self.bias = nn.Parameter(torch.randn(_HEADS, 1, 1))
        self.head_scale = nn.Parameter(torch.randn(_WIDTH // _HEADS))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.all_three(x).split(self.width, dim=-1)
        query, key, value = (each.unflatten(-1, (self.h, -1)).transpose(1, 2) for each in (query, key, value))
        scores = query * self.head_scale @ key.mT + self.bias * torch.arange(x.shape[1])
        if self.mixes_heads:
            scores = scores - scores.mean(1, keepdim=True)
        mixed = self.drop(scores.softmax(-1)) @ value
        return self.drop_out(self.out(mixed.transpose(1, 2).flatten(2)))


class Gated(nn.Module):
    """A gated pair of layers, whose product is normalised if asked."""

    def __init__(self, is_normalised: bool = False) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(_WIDTH, 24), nn.Linear(12, _WIDTH)
        self.norm = nn.LayerNorm(12) if is_normalised else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(self.norm(torch.relu(gate) * up))


class Model(nn.Module):
    """Two blocks between an embedding and a large head."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(70, _WIDTH), nn.Linear(_WIDTH, 70)
        mixes, normalised = (options.get(name, False) for name in ("mixes_heads", "is_normalised"))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(mixes), "mlp": Gated(normalised)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block["attention"](self.norm(x))
            x = x + block["mlp"](self.norm(x))
        return self.head(self.norm(x))


def _regions(model: nn.Module, **batch: Tensor) -> list[Region]:
    return find_regions(model, record(model, lambda: model(**batch)))


def _tokens() -> Tensor:
    return torch.arange(14).view(2, 7)


def test_the_regions_of_a_model_that_nobody_has_seen() -> None:
    model = Model()
    attention, mlp = _regions(model, tokens=_tokens())
    at = "blocks.*.attention"
    assert attention.styles == {
        f"{at}.all_three": "fused_colwise",
        f"{at}.bias": "first_dim",
        f"{at}.head_scale": "replicated_with_grad_allreduce",
        f"{at}.out": "rowwise",
        f"{at}.drop": "dropout",
    }
    assert mlp.styles == {"blocks.*.mlp.both": "packed_colwise", "blocks.*.mlp.down": "rowwise"}
    choices = local_choices(model, attention)
    assert choices[0] == {at: ("h",)} and {at: ("h", "width")} in choices and {} in choices


def test_what_mixes_the_halves_is_no_region() -> None:
    [mlp] = _regions(Model(mixes_heads=True), tokens=_tokens())
    assert mlp.rows == {"blocks.*.mlp.down"}
    [attention] = _regions(Model(is_normalised=True), tokens=_tokens())
    assert attention.rows == {"blocks.*.attention.out"}


def test_what_something_else_reads_too_is_no_column() -> None:
    class Leaking(nn.Module):
        def __init__(self, leak: str) -> None:
            super().__init__()
            self.leak = leak
            self.first, self.second, self.other = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            out = self.second(hidden.cumsum(-1) if self.leak == "sums" else hidden)
            if self.leak == "weight":
                return out + self.first.weight.sum()
            more = {
                "none": lambda: out,
                "sums": lambda: out,
                "output": lambda: hidden,
                "sum": lambda: hidden.sum(-1, keepdim=True),
                "layer": lambda: self.other(hidden.flip(-1)),
            }
            return {"out": out, "more": (more[self.leak](),)}

    x = torch.randn(3, 6)
    assert len(_regions(Leaking("none"), x=x)) == 1
    assert [len(_regions(Leaking(leak), x=x)) for leak in ("output", "sum", "sums", "layer", "weight")] == [0] * 5


def test_of_a_chain_without_norms_the_first_two_are_a_pair() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)))
    found = _regions(model, input=torch.randn(2, 8))
    assert all(region.columns.isdisjoint(region.rows) for region in found)


def test_a_plan_has_what_is_cut_by_itself_and_travels_as_json(tmp_path: Path) -> None:
    model = Model()
    before = [param.clone() for param in model.parameters()]
    plan = propose_plan(model, {"tokens": _tokens()})
    assert plan.styles["head"] == "colwise_gather_output" and plan.styles["table"] == "embedding_rowwise"
    assert all(torch.equal(old, new) and new.grad is None for old, new in zip(before, model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    plan.save(tmp_path / "plan.json")
    assert ProposedPlan.load(tmp_path / "plan.json") == plan
    policy = plan.policy()
    policy.set_model(model)
    assert pickle.loads(pickle.dumps(policy)).declared == policy.declared


def test_dropout_by_a_function_draws_on_each_rank_or_stops_the_cut() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(nn.functional.dropout(torch.relu(self.first(x)), 0.1, self.training))

    assert propose_plan(Dropping(), {"x": torch.randn(3, 6)}).styles == {}
    bart = Recipe(family="bart", head="generation", rows=3)
    styles = propose_plan(bart.model(), bart.batch(0)).styles
    assert styles["model.decoder.layers.*"] == "activation_dropout"


def test_an_attribute_that_the_ranks_cannot_share_is_refused() -> None:
    policy = ProposedPlan({}, {"attention": ("h",)}).policy()
    policy.set_model(Model())
    with mock.patch.object(type(policy), "tp_size", 3):
        assert policy.check() == ["tp_size=3 does not divide blocks.0.attention.h=4; use 1, 2 or 4"]


def test_families_with_a_policy_get_its_columns_and_rows() -> None:
    recipe = Recipe(family="gpt2", head="lm_head", rows=3)
    attention, mlp = _regions(recipe.model(), **recipe.batch(0))
    assert {attention.styles[path] for path in attention.columns} == {"fused_colwise"}
    assert (mlp.columns, mlp.rows) == ({"transformer.h.*.mlp.c_fc"}, {"transformer.h.*.mlp.c_proj"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "holds no plan"),
        ("[]", 'a plan is an object with "styles"'),
        ({"styles": {"a": "colwize"}}, "style 'colwize' of 'a' is not known; use one of activation_dropout"),
        ({"styles": {}, "lokal": {}}, "'lokal' is no key of a plan; use one of styles, local"),
        ({"styles": {}, "cut_vocabulary": 1}, "cut_vocabulary=1 is not a truth value; use true or false"),
        ({"styles": {}, "local": {"a": "num_heads"}}, '"local" does not map paths to lists'),
    ],
)
def test_a_mistake_in_an_edited_plan_is_one_sentence(text: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ValueError) as caught:
        ProposedPlan.load(file)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_shipped_plans_are_for_families_without_another() -> None:
    families = proposed_plans()
    assert len(families) > 50 and not families.keys() & declared_plans().keys() & family_policies().keys()
    assert {style for plan in families.values() for style in plan.styles.values()} <= STYLES.keys()
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(hidden_sizes=[4], depths=[1]))
    policy = policy_for(model)
    assert (policy.declared, policy.head_losses) == (families["resnet"], {})
