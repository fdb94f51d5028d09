"""What `execute_pipeline` returns: the outputs of plain transformers on every rank, and refusals that say what to do.

What breaks here first: an output class whose tensors are not cut along the samples. Look in
`plugins/hybrid_parallel/step/passes.py` and `data/microbatch.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DogeConfig, DogeForCausalLM, NllbMoeConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe, share_of
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import inputs_of
from zoo_tests.harness.toy import EXACT, toy
from zoo_tests.harness.train_sharded import boost


def _check_outputs(family: str, head: str, layout: str) -> None:
    """Without labels in the batch, and with them; no optimizer."""
    case = Case(recipe=Recipe(family=family, head=head), layout=layout)
    boosted, plain = boost(case), case.recipe.model()
    boosted.model.eval(), plain.eval()
    batch = case.recipe.batch(0)
    with torch.no_grad():
        expected = plain(**inputs_of(case.recipe.zoo_head, batch))
    plugin = boosted.plugin
    unlabelled = {
        key: value for key, value in batch.items() if key in ("input_ids", "attention_mask", "token_type_ids")
    }
    for inputs in (batch, unlabelled):
        result = boosted.booster.execute_pipeline(
            iter([boosted.share(inputs)]), boosted.model, return_outputs=True, return_loss=inputs is batch
        )
        assert type(result.outputs) is type(expected)
        keys = [key for key, value in expected.items() if isinstance(value, torch.Tensor) and value.dim()]
        assert keys and set(result.outputs) == set(keys)
        for key in keys:
            rows = {"attention_mask": batch["attention_mask"], key: expected[key]}
            own = share_of(rows, plugin.dp_rank, plugin.dp_size)[key]
            torch.testing.assert_close(result.outputs[key], own, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "head"),
    [("bert", "pretraining"), ("bert", "question_answering"), ("llama", "sequence"), ("gpt2", "lm_head")],
)
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@distributed(2)
def test_outputs_of_a_head_on_every_rank(family: str, head: str, layout: str) -> None:
    _check_outputs(family, head, layout)


@pytest.mark.slow
@distributed(4)
def test_outputs_on_two_axes() -> None:
    _check_outputs("bert", "masked_lm", "tp2pp2")
    _check_outputs("gpt2", "token", "pp2dp2")


@pytest.mark.parametrize("family", ["llama", "bert"])
@distributed(2)
def test_hidden_states_of_all_layers_are_whole(family: str) -> None:
    head = {"llama": "causal_lm", "bert": "masked_lm"}[family]
    case = Case(recipe=Recipe(family=family, head=head), layout="tp2")
    boosted, plain = boost(case), case.recipe.model()
    batch = {key: value for key, value in case.recipe.batch(0).items() if key != "labels"}
    with torch.no_grad():
        found = boosted.model(**batch, output_hidden_states=True).hidden_states
        expected = plain(**batch, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "is_cut", "message"),
    [
        ("pp2", False, "output_hidden_states=True asks for what lies on 2 pipeline stages; use pp_size=1"),
        ("tp2", True, "output_hidden_states=True finds parts of sequences"),
    ],
)
@distributed(2)
def test_hidden_states_that_no_rank_has_are_refused(layout: str, is_cut: bool, message: str) -> None:
    case = Case(recipe=Recipe(family="llama", head="causal_lm"), layout=layout, sequence_parallel=is_cut)
    boosted = boost(case)
    batch = {**case.recipe.batch(0), "output_hidden_states": True}
    with pytest.raises(ConfigurationError, match=message):
        boosted.booster.execute_pipeline(iter([batch]), boosted.model, return_loss=True)


@distributed(2)
def test_sequences_of_another_length_in_every_batch() -> None:
    case = Case(recipe=Recipe(family="llama", head="causal_lm"), layout="pp2")
    boosted, plain = boost(case), case.recipe.model()
    full = case.recipe.batch(2)
    for length in (17, 3, 9, 17, 1):
        batch = {key: value[:, -length:] for key, value in full.items() if key != "labels"}
        found = boosted.booster.execute_pipeline(iter([batch]), boosted.model, return_outputs=True).outputs.logits
        with torch.no_grad():
            torch.testing.assert_close(found, plain(**batch).logits, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 3}, r"world size 2 is not a multiple of tp_size\*pp_size=3\*1=3; start 3 ranks"),
        ({"tp_size": 2, "dp_size": 2}, "dp_size=2 does not fit world size 2 .* use dp_size=1"),
    ],
)
@distributed(2)
def test_a_layout_that_does_not_fit_the_world(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HybridParallelPlugin(**options)


@distributed(2)
def test_models_that_cannot_be_sharded_are_refused_on_every_rank() -> None:
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2))
    with pytest.raises(ConfigurationError, match="model class Toy has neither a sharding policy nor a plan of its own"):
        booster.boost(toy())
    config = transformers.LlamaConfig(
        hidden_size=12, num_attention_heads=3, num_key_value_heads=1, num_hidden_layers=1, vocab_size=9
    )
    with pytest.raises(ConfigurationError, match="tp_size=2 does not divide num_attention_heads=3; use 1 or 3"):
        booster.boost(transformers.LlamaModel(config))
    pipeline = Booster(plugin=HybridParallelPlugin(pp_size=2))
    with pytest.raises(ConfigurationError, match="pp_size=2 is larger than the model's 1 layers; use a pp_size of at"):
        pipeline.boost(transformers.LlamaModel(config))
    explicit = Booster(plugin=HybridParallelPlugin(pp_size=2, layers_per_stage=[3, 3]))
    recipe = Recipe(family="bert", head="sequence")
    with pytest.raises(ConfigurationError, match=r"layers_per_stage=\[3, 3\] does not split 5 layers over 2 stages"):
        explicit.boost(recipe.model())


@pytest.mark.parametrize(("share", "recomputed"), [(0.5, 3), (0.2, 1), (1.0, 5), ("full", 5)])
@distributed(1)
def test_a_share_of_the_layers_is_recomputed(share: float | str, recomputed: int) -> None:
    recipe, forwards = Recipe(family="bert", head="sequence"), []
    model = recipe.model()
    for layer in model.bert.encoder.layer:
        layer.attention.register_forward_hook(lambda *_: forwards.append(1))
    booster = Booster(plugin=HybridParallelPlugin(gradient_checkpointing=share))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.execute_pipeline(iter([recipe.batch(0)]), model, optimizer=optimizer)
    assert len(forwards) == 5 + recomputed


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@distributed(1)
def test_selective_recomputation_keeps_no_scores_of_attention(attention: str) -> None:
    recipe = Recipe(family="bert", head="sequence", config=(("attn_implementation", attention),))
    batch = recipe.batch(0)
    found = {}
    for choice in (None, "selective"):
        booster, model = Booster(plugin=HybridParallelPlugin(gradient_checkpointing=choice)), recipe.model()
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scores = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=scores: s.append(x.shape) or x, lambda x: x):
            loss = model(**batch).loss
        booster.backward(loss, optimizer)
        length = batch["input_ids"].shape[1]
        # [batch, heads, seq, seq]; masks have one head.
        found[choice] = sum(len(shape) == 4 and shape[1] > 1 and shape[2:] == (length, length) for shape in scores)
        found[choice, "gradients"] = optimizer.full_gradients()
    assert found["selective"] == 0 and (found[None] > 0) == (attention == "eager")
    for name, expected in found[None, "gradients"].items():
        torch.testing.assert_close(found["selective", "gradients"][name], expected, rtol=1e-12, atol=1e-12)


@distributed(1)
def test_selective_recomputation_needs_attention_that_can_be_reached() -> None:
    booster = Booster(plugin=HybridParallelPlugin(gradient_checkpointing="selective"))
    with pytest.raises(ConfigurationError, match="'selective' cannot reach the attention of GPTNeo.*; use 'full'"):
        booster.boost(Recipe(family="gpt_neo", head="causal_lm").model())


@distributed(1)
def test_gradient_checkpointing_needs_a_transformers_model() -> None:
    booster = Booster(plugin=HybridParallelPlugin(gradient_checkpointing="full"))
    with pytest.raises(ConfigurationError, match="gradient_checkpointing='full' needs a transformers model, not a Toy"):
        booster.boost(toy())


@distributed(1)
def test_gradient_checkpointing_needs_a_class_that_transformers_recomputes() -> None:
    booster = Booster(plugin=HybridParallelPlugin(gradient_checkpointing=0.5))
    with pytest.raises(ConfigurationError, match="=0.5 recomputes layers, .* CpmAntForCausalLM"):
        booster.boost(Recipe(family="cpmant", head="causal_lm").model())


@distributed(1)
def test_one_process_alone_is_a_layout_too() -> None:
    """The ordinary loop, `execute_pipeline` and plain transformers give the same numbers."""
    case = Case(recipe=Recipe(family="bert", head="sequence"), layout="single")
    boosted, plain = boost(case), case.recipe.model()
    batch = case.recipe.batch(0)
    expected = plain(**batch).loss
    expected.backward()
    for backward in (boosted.pipeline_backward, boosted.ordinary_backward):
        torch.testing.assert_close(backward(batch), expected.detach(), **EXACT)
        for name, gradient in boosted.optimizer.full_gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, **EXACT)
        boosted.optimizer.zero_grad()


@pytest.mark.parametrize(("num_microbatches", "is_told"), [(1, False), (2, True)])
@distributed(1)
def test_batch_normalisation_is_told_where_the_batch_is_cut(num_microbatches: int, is_told: bool) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("plugins.hybrid_parallel.setup.model")
    logger.addHandler(handler)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    Booster(plugin=HybridParallelPlugin(num_microbatches=num_microbatches)).boost(model)
    logger.removeHandler(handler)
    assert any("Sequential normalises over its batch" in line for line in told) == is_told


def _routed_by_batch(**options: Any) -> nn.Module:
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "pad_token_id": 0}
    return DogeForCausalLM(DogeConfig(**sizes, num_attention_heads=2, num_experts=4, **options))


def _with_capacity(expert_capacity: int) -> nn.Module:
    config = NllbMoeConfig(d_model=8, num_experts=2, encoder_attention_heads=1, expert_capacity=expert_capacity)
    return NllbMoeTop2Router(config)


@pytest.mark.parametrize(
    ("build", "is_refused"),
    [
        (partial(_routed_by_batch, is_moe=True, num_experts_per_tok=2), True),
        (partial(_routed_by_batch, is_moe=False), False),
        (partial(_with_capacity, 64), True),
        (partial(_with_capacity, 1_000_000), False),
    ],
)
@distributed(1)
def test_what_mixes_samples_is_refused_where_the_batch_is_cut(build: Callable[[], nn.Module], is_refused: bool) -> None:
    Booster(plugin=HybridParallelPlugin(num_microbatches=1)).boost(build())
    refused = pytest.raises(ConfigurationError, match="batch.*use one replica and num_microbatches=1")
    with refused if is_refused else nullcontext():
        Booster(plugin=HybridParallelPlugin(num_microbatches=2)).boost(build())
