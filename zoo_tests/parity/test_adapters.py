"""Adapters of the peft package train like on the unsharded model, whose weights stay what they were.

What works where is the table of docs/adapters.md; every cell of it is a test here. What breaks here first: a matrix of
an adapter that is not cut like its layer, a gradient that is a partial sum, a tensor that is missing in the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.layers import ParallelDropout
from zoo_tests.harness.adapters import ADAPTER, with_adapters
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import distributed
from zoo_tests.zoo import FAMILIES

_PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
# Column, row, fused, copied and head projections; BERT's classifier is outside of the layers.
_TARGETS = {
    "llama": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "chatglm2": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "bert": ("query", "value", "output.dense", "classifier"),
}
_HEADS = {"llama": "causal_lm", "gpt2": "lm_head", "chatglm2": "generation", "bert": "sequence", "albert": "sequence"}
_LAYERS = _TARGETS["llama"][:-1]


def _slow(*values: str) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _case(family: str, layout: str, targets: tuple[str, ...] | None = None, given: Any = (), **options: Any) -> Case:
    recipe = {name: options.pop(name) for name in ("precision", "head") if name in options}
    if "dp" not in layout:
        recipe["steps"] = 1  # without replicas, a second step of SGD only repeats the first
    recipe = Recipe(
        family=family,
        adapters=_TARGETS[family] if targets is None else targets,
        adapter_options=tuple(dict(given).items()),
        **{"head": _HEADS[family], **recipe},
    )
    return Case(recipe=recipe, layout=layout, **options)


@dataclass(frozen=True)
class _Row:
    """A row of the table: how its model is built, and on which layouts it is refused, and how."""

    family: str
    targets: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    precision: str = "fp64"
    refused: tuple[str, ...] = ()
    message: str = ""


_CUT = ("tp2", "split_gather", "all_to_all")


def _whole(kind: str, targets: tuple[str, ...] = ("q_proj", "v_proj"), **options: Any) -> _Row:
    """A kind of which a stage can hold some layers, but a rank no part of a layer."""
    return _Row(
        "llama", targets, (("kind", kind), *options.items()), refused=_CUT, message="cannot be cut over tp_size=2"
    )


_PARTS = (("modules_to_save", ("lm_head", "embed_tokens", "norm", "mlp", "input_layernorm")),)
_PATTERNS = (("rank_pattern", frozenset({("q_proj", 5)})), ("alpha_pattern", frozenset({("o_proj", 9)})))
_PROMPT = (("num_virtual_tokens", 3), ("task_type", "CAUSAL_LM"))
_ROWS = {
    "LoRA": _Row("llama", _TARGETS["llama"]),
    "`target_modules=\"all-linear\"`, `rank_pattern`, `alpha_pattern`, `use_rslora`, `lora_bias`": _Row(
        "llama", (), (("target_modules", "all-linear"), *_PATTERNS, ("use_rslora", True), ("lora_bias", True))
    ),
    "LoRA on `Conv1D`, `fan_in_fan_out`": _Row("gpt2", _TARGETS["gpt2"], (("fan_in_fan_out", True),)),
    "LoRA on embeddings": _Row("llama", ("q_proj", "embed_tokens")),
    "`bias=\"lora_only\"`": _Row("bert", ("query", "output.dense"), (("bias", "lora_only"),)),
    "`bias=\"all\"`": _Row("bert", ("query", "output.dense"), (("bias", "all"),)),
    "`modules_to_save`": _Row("llama", ("q_proj",), _PARTS),
    "a classifier, by `task_type`": _Row("bert", ("query",), (("task_type", "SEQ_CLS"),)),
    "DoRA": _Row("llama", _LAYERS, (("use_dora", True),)),
    "PiSSA": _Row("llama", _LAYERS, (("init_lora_weights", "pissa"),), precision="fp32"),
    "OLoRA": _Row("llama", _LAYERS, (("init_lora_weights", "olora"),), precision="fp32"),
    "IA³": _Row(
        "llama", ("k_proj", "o_proj", "up_proj", "down_proj"),
        (("kind", "IA3"), ("feedforward_modules", ("up_proj", "down_proj"))),
    ),
    # Padding, whose row gets no gradient, and tokens of the first batch, of which each rank holds some.
    "`trainable_token_indices`": _Row("llama", ("q_proj",), (("trainable_token_indices", (0, 429, 748, 913)),)),
    "LoHa": _whole("LOHA", r=3),
    "LoKr": _whole("LOKR", r=3),
    "OFT": _whole("OFT", oft_block_size=4),
    "BOFT": _whole("BOFT", boft_block_size=4),
    "HRA": _whole("HRA", r=2),
    "VeRA": _whole("VERA", r=3),
    "layer norms": _whole("LN_TUNING", ("input_layernorm", "norm")),
    "AdaLoRA": _Row(
        "llama", ("q_proj",), (("kind", "ADALORA"), ("total_step", 9)), refused=("dp2", "pp2", *_CUT),
        message="of peft's kind ADALORA, which changes the model's forward or reads gradients",
    ),
    "prompt tuning, p-tuning": _Row(
        "llama", (), (("kind", "P_TUNING"), *_PROMPT), precision="fp32",
    ),
    "prefix tuning": _Row(
        "llama", (), (("kind", "PREFIX_TUNING"), *_PROMPT), precision="fp32", refused=("all_to_all",),
        message="peft's PREFIX_TUNING needs keys and values of whole sequences and of this rank's heads",
    ),
}  # fmt: skip
_LAYOUTS = ("dp2", "pp2", "tp2", "split_gather", "all_to_all")
_QUICK = {
    ("LoRA on embeddings", "split_gather"), ("`bias=\"lora_only\"`", "dp2"), ("`modules_to_save`", "split_gather"),
    ("DoRA", "split_gather"), ("IA³", "tp2"), ("`trainable_token_indices`", "tp2"),
}  # fmt: skip
_EXACT = [(name, layout) for name, row in _ROWS.items() for layout in _LAYOUTS if layout not in row.refused]
# Their oracle looks at outputs of labelled tokens alone: tests of their own, in shardformer/peft/test_use.py.
_EXACT = [(name, layout) for name, layout in _EXACT if dict(_ROWS[name].options).get("num_virtual_tokens") is None]


def _case_of(name: str, layout: str) -> Case:
    row = _ROWS[name]
    options: dict[str, Any] = {}
    if layout in ("split_gather", "all_to_all"):
        options = {"sequence_parallel": True, "options": (("sequence_parallelism_mode", layout),)}
        layout = "tp2"
    return _case(row.family, layout, row.targets, row.options, precision=row.precision, **options)


def _marked(number: int, name: str, layout: str) -> Any:
    """Mark every second cell, in turn over rows and columns, for the suite; the campaign has all."""
    marks = pytest.mark.campaign if number % 2 else pytest.mark.slow
    return pytest.param(name, layout, marks=() if (name, layout) in _QUICK else marks)


@pytest.mark.parametrize(("name", "layout"), [_marked(number, *cell) for number, cell in enumerate(_EXACT)])
def test_what_the_table_calls_exact(name: str, layout: str, tmp_path: Path) -> None:
    check_case(_case_of(name, layout), tmp_path)


@pytest.mark.slow
@distributed(2)
def test_what_the_table_calls_refused() -> None:
    for name, row in _ROWS.items():
        for layout in row.refused:
            case = _case_of(name, layout)
            model = case.recipe.model()
            before = {path: type(module) for path, module in model.named_modules()}
            with pytest.raises(ConfigurationError, match=re.escape(row.message)):
                Booster(plugin=HybridParallelPlugin(**case.plugin_options)).boost(model)
            assert {path: type(module) for path, module in model.named_modules()} == before, (name, layout)


def test_the_table_is_what_is_tested() -> None:
    lines = [line for line in _PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    start = next(number for number, row in enumerate(cells) if row[1:] == list(("dp", "pp", "tp", "sp")))
    columns = {"dp": ("dp2",), "pp": ("pp2",), "tp": ("tp2",), "sp": ("split_gather", "all_to_all")}
    found = {row[0]: row[1:] for row in cells[start + 1 : start + 1 + len(_ROWS)]}
    expected = {
        name: ["refused" if set(layouts) & set(row.refused) else "exact" for layouts in columns.values()]
        for name, row in _ROWS.items()
    }
    assert found == expected


@pytest.mark.parametrize("layout", ["tp2pp2", *_slow("tp4", "tp2dp2")])
@pytest.mark.parametrize("family", ["llama", *_slow("gpt2", "chatglm2", "bert")])
def test_adapters_train_like_plain_ones(family: str, layout: str, tmp_path: Path) -> None:
    check_case(_case(family, layout), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["split_gather", "all_to_all"])
@pytest.mark.parametrize("family", ["gpt2", "chatglm2", "bert"])
def test_adapters_on_cut_sequences(family: str, mode: str, tmp_path: Path) -> None:
    options = (("sequence_parallelism_mode", mode),)
    check_case(
        _case(family, "tp4" if family == "chatglm2" else "tp2", sequence_parallel=True, options=options), tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["`modules_to_save`", "DoRA", "IA³", '`bias="all"`', "LoRA on embeddings"])
def test_the_rarer_ones_on_four_ranks(name: str, tmp_path: Path) -> None:
    for layout in ("tp2pp2", "tp2dp2"):
        (tmp_path / layout).mkdir()
    check_case(_case_of(name, "tp2pp2"), tmp_path / "tp2pp2")
    check_case(_case_of(name, "tp2dp2").but(zero_stage=0, max_norm=0.5), tmp_path / "tp2dp2")


@pytest.mark.parametrize("family", _slow("llama", "gpt2", "bert"))
def test_fused_operators_leave_adapters_in(family: str, tmp_path: Path) -> None:
    check_case(_case(family, "tp2", options=(("enable_jit_fused", True),)), tmp_path)


@pytest.mark.slow
def test_adapters_in_sixteen_bit(tmp_path: Path) -> None:
    case = _case("llama", "tp2dp2", options=(("gradient_checkpointing", "full"),))
    check_case(case.but(precision="bf16", optimizer="adamw", steps=2), tmp_path, weights=False)


def test_layers_that_repeat_on_one_stage(tmp_path: Path) -> None:
    check_case(Case(recipe=Recipe(family="albert", head="sequence", adapters=("query", "ffn")), layout="tp2"), tmp_path)


def _with_adapters(family: str, head: str, *targets: str, **options: Any) -> nn.Module:
    return with_adapters(FAMILIES[family].build(head, torch.float32), targets, tuple(options.items()))


def _boost(model: nn.Module, **options: object) -> nn.Module:
    return Booster(plugin=HybridParallelPlugin(**options)).boost(model)


@distributed(2)
def test_only_adapters_are_trained_and_only_features_apart_are_dropped_apart() -> None:
    native = _with_adapters("llama", "causal_lm", "q_proj", "o_proj", lora_dropout=0.5)
    model = _boost(native, tp_size=2)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    attention = model.unwrap().get_base_model().model.layers[0].self_attn
    assert type(attention.q_proj.lora_dropout[ADAPTER]) is nn.Dropout
    assert isinstance(attention.o_proj.lora_dropout[ADAPTER], ParallelDropout)
    assert attention.o_proj.lora_dropout[ADAPTER].training


@pytest.mark.parametrize(("family", "head"), [("llama", "causal_lm"), ("gpt2", "lm_head"), ("chatglm2", "generation")])
@distributed(2)
def test_a_model_with_adapters_generates(family: str, head: str) -> None:
    targets = ("q_proj", "down_proj", "c_attn", "query_key_value", "dense_4h_to_h")
    prompt = FAMILIES[family].batch(head, 0, 3)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    kept = {"input_ids": prompt["input_ids"], "attention_mask": prompt["attention_mask"]}
    native = _with_adapters(family, head, *targets).eval()
    expected = native.generate(**kept, **options)
    assert not torch.equal(expected, FAMILIES[family].build(head, torch.float32).eval().generate(**kept, **options))
    sharded = _boost(_with_adapters(family, head, *targets), tp_size=2).eval()
    assert torch.equal(sharded.generate(**kept, **options).cpu(), expected)


@distributed(2)
def test_adapters_that_peft_ties_by_views_are_refused() -> None:
    recipe = Recipe(family="llama", head="causal_lm", config=(("tie_word_embeddings", True),))
    model = with_adapters(recipe.base_model(), ("embed_tokens", "lm_head"), (("ensure_weight_tying", True),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"lora_embedding_A\.default and .*lm_head\.lora_B.* in one memory.*; use ensure_weight_tying=False"
    with pytest.raises(ConfigurationError, match=message):
        Booster(plugin=HybridParallelPlugin()).boost(model, optimizer)


def _packed_model() -> nn.Module:
    model = FAMILIES["llama"].build("causal_lm", torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    return with_adapters(model, ("q_proj",))


def _with_one_layer_twice() -> nn.Module:
    """The last feed-forward is the first one, with the same adapters."""
    model = FAMILIES["llama"].build("causal_lm", torch.float32)
    model.model.layers[-1].mlp = model.model.layers[0].mlp
    return with_adapters(model, ("up_proj",))


@distributed(2)
def test_what_cannot_be_cut_is_refused_before_anything_is_changed() -> None:
    overlap = {"tp_size": 2, "enable_sequence_parallelism": True, "enable_sequence_overlap": True}
    dropped = _with_adapters("llama", "causal_lm", "q_proj", use_dora=True, lora_dropout=0.5)
    for model, options, message in (
        (_with_adapters("albert", "sequence", "query"), {"pp_size": 2}, "several pipeline stages run are not summed"),
        (_with_adapters("llama", "causal_lm", "q_proj"), overlap, "enable_sequence_overlap=True does not support adap"),
        (dropped, {"tp_size": 2}, "use_dora=True with lora_dropout above 0 multiplies by the whole weight"),
        (_with_adapters("llama", "causal_lm", modules_to_save=("model",), target_modules="lm_head"), {"pp_size": 2},
         "modules_to_save reaches model, whose layers pp_size distributes over stages; name modules inside"),
        (_with_adapters("llama", "causal_lm", kind="P_TUNING", **dict(_PROMPT)), {"cp_size": 2},
         "P_TUNING, whose virtual tokens need whole sequences on each rank, which cp_size=2 cuts"),
        (_with_one_layer_twice(), {"pp_size": 2}, r"layers\.0\.mlp\.up_proj and .* are one object with one adapter"),
        (_packed_model(), {"tp_size": 2}, "quantised LlamaForCausalLM: model.layers.0.mlp.up_proj.weight is of a kind"),
    ):  # fmt: skip
        before = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(ConfigurationError, match=message):
            _boost(model, **options)
        assert {name: type(module) for name, module in model.named_modules()} == before
