"""What a `TPInfo` describes trains to the numbers of plain training, for families and for a model of no family.

What breaks here first: a dropout or a number that transformers has renamed (the rules in this file), and a replicated
parameter between cut layers. Look in `shardformer/policies/user_forms.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer import TPInfo
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import distributed

# As in the text that describes TPInfo.
GPT2 = (
    TPInfo()
    .shard_col({"attn.c_attn": {"stride": 3}}, "mlp.c_fc")
    .shard_row("attn.c_proj", "mlp.c_proj")
    .shard_vocab("wte")
    .replic_drop("resid_dropout", "mlp.dropout", "drop")
    .parallel_drop("attn_dropout")
    .shrink({".attn": {"embed_dim", "split_size", "num_heads"}})
)
# The published one for Llama 2; the attributes to shrink are gone from transformers 5.
LLAMA = (
    TPInfo()
    .shard_col("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    .shard_row("o_proj", "down_proj")
    .shard_vocab("embed_tokens")
    .shrink({"self_attn": {"num_heads", "num_key_value_heads", "hidden_size"}})
)
BERT = (
    TPInfo()
    .shard_col("self.query", "self.key", "self.value", "intermediate.dense")
    .shard_row({"output.dense": {}})  # of the attention and behind it
    .shard_vocab("word_embeddings")
    .shrink({"attention.self": {"num_attention_heads", "all_head_size"}})
)
RULES = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT}
HEADS = {"gpt2": "lm_head", "llama": "causal_lm", "bert": "masked_lm"}


def _case(family: str, layout: str, recipe: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case(
        recipe=Recipe(family=family, head=HEADS[family], **(recipe or {})),
        layout=layout,
        options=(("tp_info", RULES[family]), *options.items()),
    )


FAST = [_case("gpt2", "tp2pp2", {"optimizer": "adamw", "max_norm": 0.05}), _case("llama", "tp2"), _case("bert", "tp2")]
SLOW = [
    *(_case(family, layout) for family in ("gpt2", "bert") for layout in ("tp4", "tp2dp2")),
    _case("bert", "tp2pp2", {"optimizer": "momentum", "max_norm": 0.05}),
    _case("llama", "tp2pp2", {"config": (("tie_word_embeddings", True),)}, gradient_checkpointing="full"),
    _case("gpt2", "tp2pp2", pp_style="zbv", num_microbatches=4),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.recipe.family}-{case.layout}") for case in FAST]
    + [
        pytest.param(case, id=f"{number}-{case.recipe.family}-{case.layout}", marks=pytest.mark.slow)
        for number, case in enumerate(SLOW)
    ],
)
def test_trains_like_plain_training(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


# ----- a model of no family -----


class Attention(nn.Module):
    """Two heads, whose queries have a norm that both share."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(4), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, 8]
        q, k, v = (part.unflatten(-1, (self.heads, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = self.drop((self.norm(q) @ k.mT).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Words in, words out, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def _rules() -> TPInfo:
    return (
        TPInfo().shard_col({"qkv": {"stride": 3}}).shard_row("out").shard_vocab("words")
        .parallel_drop("drop").shrink({"layers.0": "heads", "layers.1": {"heads"}})
        .partial_grad("layers.0.norm", "layers.1.norm")
    )  # fmt: skip


def _model() -> Model:
    torch.manual_seed(0)
    return Model().double()


@distributed(2)
def test_a_model_of_no_family() -> None:
    plain, sharded = _model().eval(), _model()
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, tp_info=_rules(), max_norm=0.1))
    model, optimizer = booster.boost(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    model.eval()  # no dropout
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(step))
        loss, expected = (each(ids).log_softmax(-1)[..., 0].square().mean() for each in (model, plain))
        booster.backward(loss, optimizer)
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14, check_device=False)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    kinds = {name: type(module).__name__ for name, module in model.unwrap().named_modules()}
    assert kinds["words"] == "VocabParallelEmbedding" and kinds["head"] == "VocabParallelLMHead"
    assert kinds["layers.0.qkv"] == "ColumnParallelLinear" and kinds["layers.1.out"] == "RowParallelLinear"
    assert kinds["layers.0.drop"] == "ParallelDropout"


def _refusal(tp_info: TPInfo, model: nn.Module) -> str:
    with pytest.raises(ConfigurationError) as error:
        Booster(plugin=HybridParallelPlugin(tp_size=2, tp_info=tp_info)).boost(model)
    return str(error.value)


@distributed(2)
def test_rules_that_do_not_fit_are_refused_with_what_would() -> None:
    model = _model()
    before = {name: param.clone() for name, param in model.named_parameters()}
    assert _refusal(TPInfo().shard_col("qvk").shard_row("out"), model) == (
        "shard_col('qvk') matches no module of Model; use one of ['qkv', '1.qkv', '0.qkv']"
    )
    assert "replic_drop('dropout') matches no module of Model; use one of ['drop'" in _refusal(
        TPInfo().replic_drop("dropout"), model
    )
    assert "shard_vocab: norm is a LayerNorm; name an nn.Embedding" in _refusal(TPInfo().shard_vocab("norm"), model)
    assert "layers.0.out is to be cut by shard_col and by shard_row; name it once" in _refusal(
        TPInfo().shard_col("out").shard_row("out"), model
    )
    assert "stride=5 does not divide the 24 output features of layers.0.qkv" in _refusal(
        TPInfo().shard_col({"qkv": {"stride": 5}}).shard_row("out"), model
    )
    model.layers[1].heads = 3
    assert "tp_size=2 does not divide layers.1.heads=3, which is to shrink" in _refusal(_rules(), model)
    model.layers[1].heads = 2
    open_column = TPInfo().shard_col("qkv").shard_row("layers.0.out").partial_grad("layers.0.norm", "layers.1.norm")
    assert "shard_col leaves the outputs of layers.1.qkv cut, and no layer in layers.1 is cut by shard_row" in _refusal(
        open_column, model
    )
    assert "layers.0.norm lies next to layers that shard_col cuts; say partial_grad('layers.0.norm')" in _refusal(
        TPInfo().shard_col("qkv").shard_row("out"), model
    )
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


class Halves(nn.Module):
    """Two heads, whose number a method of it reads: not shrunk, a rank's share makes two heads of half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.width, self.layer_idx = 2, 4, 2
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, [size for size in (self.n_head, -1)])

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, 8]
        return self.out(self.split(self.q(x)).softmax(-1).flatten(2)) * self.layer_idx


@distributed(2)
def test_numbers_of_heads_that_nobody_shrinks_are_refused() -> None:
    from transformers import GPT2Config, GPT2Model, OPTConfig, OPTModel

    rules = TPInfo().shard_col("q").shard_row("out")
    model = nn.Sequential(nn.Linear(8, 8), Halves()).double()
    assert _refusal(rules, model) == (
        "shard_col cuts 1.q, and 1 computes with n_head=2 as of the whole layer; add .shrink({'1': {'n_head'}}), or "
        ".shrink({'1': set()}) if it is right for a rank's share"
    )
    opt = OPTModel(OPTConfig(vocab_size=16, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=4))
    columns = TPInfo().shard_col("q_proj", "k_proj", "v_proj").shard_row("out_proj")
    assert ".self_attn computes with num_heads=4 as of the whole layer" in _refusal(columns, opt)
    gpt2 = GPT2Model(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    columns = TPInfo().shard_col({"attn.c_attn": {"stride": 3}}).shard_row("attn.c_proj")
    assert "h.0.attn computes with split_size=8 as of the whole layer" in _refusal(columns, gpt2)

    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = model(x).detach()
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, tp_info=rules.shrink({"1": {"n_head"}})))
    torch.testing.assert_close(booster.boost(model)(x).detach(), expected, rtol=1e-12, atol=1e-14, check_device=False)
    said = TPInfo().shard_col("q").shard_row("out").shrink({"0": set()})  # by the user: nothing is refused
    Booster(plugin=HybridParallelPlugin(tp_size=2, tp_info=said)).boost(nn.Sequential(Halves()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TPInfo().shard_col(3), r"shard_col\(3\) is no rule; use a name or {name: {argument: value}}"),
        (lambda: TPInfo().replic_drop({"a": {}}), r"replic_drop\({'a': {}}\) is no rule; use a name"),
        (
            lambda: TPInfo().shard_col({"a": {"strides": 3}}),
            "shard_col knows no argument 'strides' of a; use one of: stride",
        ),
        (
            lambda: TPInfo().shard_vocab({"a": {"stride": 3}}),
            "shard_vocab knows no argument 'stride' of a; use one of: none",
        ),
        (lambda: TPInfo().shrink("attn"), r"shrink\('attn'\) names no attributes; use shrink"),
    ],
)
def test_a_rule_that_is_none(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_whether_the_vocabulary_is_cut_is_asked_by_a_call() -> None:
    assert not TPInfo().shard_col("a").is_vocab_parallelled()
    assert GPT2.is_vocab_parallelled()


@distributed(2)
def test_masks_differ_where_ranks_have_heads_of_their_own() -> None:
    """`parallel_drop` draws a mask a rank, `replic_drop` one for all."""
    from shardformer.distributed.process_groups import all_gather_json

    model = _model()
    model.layers[0].drop, model.layers[1].drop = nn.Dropout(0.5), nn.Dropout(0.5)
    rules = _rules()
    rules.rules["parallel_drop"] = {"layers.0.drop": {}}
    rules.replic_drop("layers.1.drop")
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, tp_info=rules))
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    masks: dict[int, list] = {}

    def look(number: int, layer: nn.Module) -> None:
        def keep(_: nn.Module, __: tuple, out: Tensor) -> None:
            masks[number] = (out == 0).tolist()

        layer.drop.register_forward_hook(keep)

    for number, layer in enumerate(model.unwrap().layers):
        look(number, layer)
    model(torch.arange(10).view(2, 5))
    for number, alike in ((0, False), (1, True)):
        first, second = all_gather_json(masks[number])
        assert (first == second) is alike
