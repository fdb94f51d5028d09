"""What a call asks of a model - attentions, hidden states, tuples, positions, labels by their place - is what plain
transformers returns, or is refused on every rank.

What breaks here first: heads of one rank, fields that micro-batches leave out, and options that lie in the
configuration. Look in `plugins/hybrid_parallel/boosted/forward_options.py` and `step/outputs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import EncodecConfig, GPT2Config, MusicgenConfig, PreTrainedConfig, PreTrainedModel, T5Config

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.boosted.forward_options import ForwardOptions
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.train_sharded import Boosted, boost

EXACT = {"rtol": 1e-9, "atol": 1e-11}
_HEADS = {"llama": "causal_lm", "bert": "masked_lm", "t5": "generation", "gpt2": "lm_head"}
_ALL = {"output_attentions": True, "output_hidden_states": True}


def _case(family: str, layout: str, config: dict[str, Any] | None = None, **options: Any) -> Case:
    config = {"attn_implementation": "eager", **(config or {})}
    recipe = Recipe(family=family, head=_HEADS[family], config=tuple(config.items()), stages=2)
    return Case(recipe=recipe, layout=layout, options=tuple(options.items()))


def _batch(case: Case) -> dict[str, Tensor]:
    """Padding on the right alone: in fp64 the eager attention of a token that sees nothing is nan."""
    batch = case.recipe.batch(0)
    return batch | {"attention_mask": batch["attention_mask"].sort(descending=True).values}


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of nested outputs, without caches."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}")
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}[{index}]")


def _compare(found: Any, expected: Any, without: str = "no field") -> None:
    assert type(found) is type(expected)
    found, expected = dict(_tensors(found)), dict(_tensors(expected))
    assert set(found) == set(expected) - {without}
    for name, value in found.items():
        # transformers takes the logits of a language model for its loss in fp32.
        tolerance = {"rtol": 1e-6, "atol": 0.0, "check_dtype": False} if name in (".loss", "[0]") else EXACT
        torch.testing.assert_close(value, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def _outputs(boosted: Boosted, batch: Mapping[str, Any]) -> Any:
    """Of two micro-batches."""
    return boosted.booster.execute_pipeline(iter([batch]), boosted.model, return_outputs=True).outputs


class _TakesBatch(PreTrainedModel):
    config_class = PreTrainedConfig

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["input_ids"]


class _Passes(nn.Module):
    """A module of one's own, with the configuration of the model inside and other keyword arguments."""

    config = GPT2Config()

    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        return input_ids


def test_a_module_of_ones_own_is_not_told_of_caches() -> None:
    mesh: Any = SimpleNamespace(size=lambda axis: 1)
    batch = {"input_ids": torch.ones(2)}
    assert ForwardOptions(_Passes(), mesh).inputs(batch, is_microbatch=True) == batch


def test_a_model_may_take_a_dict_or_have_two_texts() -> None:
    """The dict has another name than the main input, which `PreTrainedModel` names for every class."""
    mesh: Any = SimpleNamespace(size=lambda axis: 1)
    options, batch = ForwardOptions(_TakesBatch(PreTrainedConfig()), mesh), {"input_ids": torch.ones(2)}
    assert options.by_name((batch,), {}) == ((), {"batch": batch})
    options.inside.config = MusicgenConfig(text_encoder=T5Config(), audio_encoder=EncodecConfig(), decoder={})
    options.check_positions({"position_ids": torch.zeros(2)}, True)  # although it has two configurations of texts
    assert options.hidden_size == options.inside.config.decoder.hidden_size


@pytest.mark.parametrize("family", ["llama", "bert", pytest.param("t5", marks=pytest.mark.slow)])
@distributed(2)
def test_what_a_call_asks_for_is_whole(family: str) -> None:
    case = _case(family, "tp2")
    boosted, plain, batch = boost(case), case.recipe.model().eval(), _batch(case)
    boosted.model.eval()
    with torch.no_grad():
        expected = plain(**batch, **_ALL)
        _compare(boosted.model(**batch, **_ALL), expected)
        _compare(_outputs(boosted, {**batch, **_ALL}), expected, without=".loss")
        expected = plain(**batch, return_dict=False, output_hidden_states=True)
        _compare(boosted.model(**batch, return_dict=False, output_hidden_states=True), expected)
        # Of micro-batches, fields have names whatever was asked for.
        _compare(_outputs(boosted, {**batch, "return_dict": False}), plain(**batch), without=".loss")
        if family == "llama":
            unlabelled = {key: value for key, value in batch.items() if key != "labels"} | {"logits_to_keep": 3}
            _compare(boosted.model(**unlabelled), plain(**unlabelled))
            _compare(_outputs(boosted, unlabelled), plain(**unlabelled))


@distributed(2)
def test_what_a_configuration_asks_for_is_whole() -> None:
    case = _case("bert", "tp2", _ALL | {"return_dict": False})
    boosted, plain, batch = boost(case), case.recipe.model().eval(), _batch(case)
    with torch.no_grad():
        _compare(boosted.model.eval()(**batch), plain(**batch))
        _compare(_outputs(boosted, batch), plain(**batch, return_dict=True), without=".loss")


@pytest.mark.parametrize("mode", ["split_gather", "all_to_all"])
@distributed(2)
def test_scores_of_whole_sequences_by_parts_of_them(mode: str) -> None:
    case = _case("llama", "tp2", enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    boosted, plain, batch = boost(case), case.recipe.model().eval(), _batch(case)
    with torch.no_grad():
        found, expected = (model(**batch, output_attentions=True) for model in (boosted.model.eval(), plain))
    _compare(found, expected)


@pytest.mark.slow
@distributed(4)
def test_scores_of_heads_that_ranks_share_unevenly() -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    case = _case("llama", "tp4", heads)
    boosted, plain, batch = boost(case), case.recipe.model(), _batch(case)
    found, expected = (model.eval()(**batch, output_attentions=True) for model in (boosted.model, plain))
    _compare(found, expected)
    # A loss of the scores has the gradients of the plain one.
    for model in (boosted.model, plain):
        scores = model(**batch, output_attentions=True).attentions
        loss = sum((score * torch.linspace(0, 1, score.shape[1])[:, None, None]).sum() for score in scores)
        if model is boosted.model:
            boosted.booster.backward(loss, boosted.optimizer)
        else:
            loss.backward()
    for name, gradient in boosted.optimizer.full_gradients().items():
        expected = plain.get_parameter(name).grad
        expected = torch.zeros_like(gradient) if expected is None else expected  # of what scores do not depend on
        torch.testing.assert_close(gradient, expected, **EXACT)


_PLACES = {
    "llama": ("input_ids", "attention_mask", None, None, None, "labels"),
    "bert": ("input_ids", "attention_mask", "token_type_ids", None, None, None, None, "labels"),
}


@pytest.mark.parametrize("family", list(_PLACES))
@distributed(2)
def test_arguments_by_their_place(family: str) -> None:
    """The loss and the gradients of labels that have no name in the call."""
    for layout in ("tp2", "dp2"):
        case = _case(family, layout, {"attn_implementation": "sdpa"})
        boosted, plain, batch = boost(case), case.recipe.model(), case.recipe.batch(0)
        share = boosted.share(batch)
        expected = loss_of(plain, case.recipe.zoo_head, batch)
        expected.backward()
        loss = boosted.model(*(share.get(name) for name in _PLACES[family])).loss
        torch.testing.assert_close(loss, expected, **EXACT)
        boosted.booster.backward(loss, boosted.optimizer)
        for name, gradient in boosted.optimizer.full_gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, **EXACT)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        boosted.model(share["input_ids"], **share)


_STAGES = "asks for what lies on 2 pipeline stages; use pp_size=1"
_PARTS = "finds parts of sequences under cp_size=2; leave that out"


@pytest.mark.parametrize(
    ("layout", "asked", "message"),
    [
        ("pp2", {"output_attentions": True}, f"output_attentions=True {_STAGES} or output_attentions=False"),
        ("pp2", {"use_cache": True}, "use_cache is in the batch, and a pipeline neither fills nor reads"),
        ("cp2", {"output_attentions": True}, f"output_attentions=True {_PARTS}"),
        ("cp2", {"logits_to_keep": 2}, "logits_to_keep counts tokens of whole sequences, which cp_size=2 cuts"),
        ("cp2", {"use_cache": True}, "use_cache"),
    ],
)
@distributed(2)
def test_what_no_rank_has_whole_is_refused(layout: str, asked: dict[str, Any], message: str) -> None:
    boosted = boost(_case("llama", layout, {"attn_implementation": "sdpa"}))
    batch = {key: value for key, value in Recipe(family="llama", head="causal_lm").batch(0).items() if key != "labels"}
    with pytest.raises(ConfigurationError, match=message):
        _outputs(boosted, {**batch, **asked})
    if layout == "cp2":
        with pytest.raises(ConfigurationError, match=message):
            boosted.model(**batch, **asked)
        assert "past_key_values" not in boosted.model(**batch), "a cache of parts"
