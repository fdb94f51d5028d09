"""What libraries ask of a model before and around its calls: the answers of the plain model, or one sentence.

What breaks here first: an answer of this rank's part alone. Look in `plugins/hybrid_parallel/boosted/model_api.py`.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.adapters import with_adapters
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.train_sharded import Boosted, boost

_ANSWERS = ("device", "dtype", "main_input_name", "base_model_prefix", "is_gradient_checkpointing", "name_or_path")
_SIZES = [(), (True,), (False, True), (True, True)]


def _boosted(layout: str) -> tuple[Boosted, nn.Module, Recipe]:
    recipe = Recipe(family="llama", head="causal_lm", precision="fp32", steps=1)
    return boost(Case(recipe=recipe, layout=layout)), recipe.model(), recipe


def _answers(layout: str) -> None:
    boosted, plain, _ = _boosted(layout)
    model = boosted.model
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.forward is model.forward, "made once: a call of the model reads it"
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    assert [getattr(model, name) for name in _ANSWERS] == [getattr(plain, name) for name in _ANSWERS]
    assert model.can_generate() == plain.can_generate()
    assert [model.num_parameters(*size) for size in _SIZES] == [plain.num_parameters(*size) for size in _SIZES]
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_what_libraries_ask_is_answered_as_by_the_plain_model(layout: str) -> None:
    run_on_ranks(LAYOUTS[layout].world_size, _answers, layout)


@distributed(2)
def test_embeddings_of_another_stage_are_not_used() -> None:
    boosted, plain, _ = _boosted("pp2")
    found = {"input": boosted.model.get_input_embeddings(), "output": boosted.model.get_output_embeddings()}
    here, there = ("input", "output") if boosted.plugin.stage_index == 0 else ("output", "input")
    assert found[here].weight.shape == plain.get_input_embeddings().weight.shape
    with pytest.raises(AttributeError, match=f"{there} embedding .* lies on another pipeline stage"):
        _ = found[there].weight
    with pytest.raises(ConfigurationError, match="lies on another pipeline stage"):
        found[there].register_forward_hook(lambda module, inputs, output: output)


@distributed(2)
def test_the_signature_of_a_model_with_adapters_is_that_of_the_model_inside() -> None:
    plain = Recipe(family="llama", head="causal_lm").model()
    expected = inspect.signature(plain.forward)
    model = Booster(HybridParallelPlugin(tp_size=2)).boost(with_adapters(plain, ("q_proj", "v_proj")))
    assert inspect.signature(model.forward) == expected


def _histograms(layout: str, directory: str) -> None:
    boosted, _, recipe = _boosted(layout)
    boosted.pipeline_backward(boosted.share(recipe.batch(0)))
    with SummaryWriter(directory) as writer:
        for name, param in boosted.model.named_parameters():
            writer.add_histogram(name, param, 0)
            with pytest.raises(ConfigurationError, match=r"param.grad cannot be read .* look optimizer.full_gradients"):
                writer.add_histogram(f"{name}.grad", param.grad, 0)
        for name, gradient in boosted.optimizer.full_gradients().items():
            writer.add_histogram(f"{name}.grad", gradient, 0)


def test_histograms_of_tensorboard(tmp_path: Path) -> None:
    run_on_ranks(2, _histograms, "pp2", str(tmp_path))


class _Unnamed(nn.Module):
    """As wrappers that pass on what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.inner(*args)


@distributed(2)
def test_a_forward_without_names_shows_none() -> None:
    model = Booster(HybridParallelPlugin()).boost(_Unnamed())
    assert list(inspect.signature(model.forward).parameters) == ["args", "kwargs"]
    assert model(torch.ones(2, 3)).shape == (2, 3)
