"""A forward that computes a loss of its own keeps it, on every layout.

What breaks here first: a head that is taken for another's because of its name.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    ReformerForMaskedLM,
)

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from shardformer.loss.heads import USUAL_HEAD_LOSSES, matching_key
from shardformer.policies.registry import head_loss_builder, head_loss_of, supported_classes
from zoo_tests.harness.case import LAYOUTS, Recipe
from zoo_tests.harness.ranks import run_on_ranks


class SmoothedBert(BertForSequenceClassification):
    """Label smoothing in the place of the head's loss."""

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits, labels, label_smoothing=0.3)
        return output


class UnshiftedLlama(LlamaForCausalLM):
    """Labels that are already those of the next token, each sample with the same number of them."""

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        if labels is not None:
            output.loss = nn.functional.cross_entropy(output.logits[:, :4].flatten(0, 1), labels[:, :4].flatten())
        return output


class RenamedLlama(LlamaForCausalLM):
    """Another name, the same forward."""


_MODELS = {"bert": ("sequence", SmoothedBert), "llama": ("causal_lm", UnshiftedLlama)}


def _model(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    head, cls = _MODELS[family]
    recipe = Recipe(family=family, head=head)
    native = recipe.model()
    model = cls(native.config).to(recipe.dtype).train()
    model.load_state_dict(native.state_dict())
    batch = recipe.batch(0)
    batch["labels"] = batch["labels"].clamp(min=0)
    return model, batch


def _loss_and_gradients(family: str, layout: str) -> tuple[float, dict[str, Tensor]]:
    sizes = LAYOUTS[layout]
    plugin = HybridParallelPlugin(tp_size=sizes.tp_size, pp_size=sizes.pp_size, num_microbatches=3)
    booster = Booster(plugin=plugin)
    model, batch = _model(family)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss.item()
    return loss, {name: value.clone() for name, value in optimizer.full_gradients().items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "tp2", "tp2pp2"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_users_forward_keeps_its_loss(family: str, layout: str) -> None:
    model, batch = _model(family)
    expected = model(**batch).loss
    expected.backward()
    runs = run_on_ranks(LAYOUTS[layout].world_size, _loss_and_gradients, family, layout)
    for loss, gradients in runs:
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def test_losses_are_known_by_their_forward_and_not_by_a_name() -> None:
    llama = Recipe(family="llama", head="causal_lm").model()
    assert head_loss_of(RenamedLlama(llama.config)) is not None
    for cls in (UnshiftedLlama, ReformerForMaskedLM):
        assert head_loss_of(cls.__new__(cls)) is None, f"{cls.__name__} computes a loss of its own"


@pytest.mark.slow
def test_every_head_with_a_policy_has_a_loss() -> None:
    for qualified_name in supported_classes():
        module, _, name = qualified_name.rpartition(".")
        is_head = matching_key(name, USUAL_HEAD_LOSSES) is not None
        assert not is_head or head_loss_builder(getattr(importlib.import_module(module), name)) is not None, name
