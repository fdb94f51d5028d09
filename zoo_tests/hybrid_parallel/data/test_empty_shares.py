"""A replica without samples, a batch without labels: the numbers of plain training, or one sentence on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from booster.errors import ConfigurationError
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.train_sharded import Boosted, boost


def _case(layout: str) -> Case:
    config = (("num_hidden_layers", 2),)
    return Case(recipe=Recipe(family="llama", head="causal_lm", rows=5, config=config), layout=layout)


def _share(boosted: Boosted, case: Case) -> dict[str, Any]:
    """All samples on the first replica, none on the second."""
    batch = case.recipe.batch(0)
    is_empty = boosted.plugin.dp_rank == 1
    return {key: value[:0] if is_empty and isinstance(value, Tensor) else value for key, value in batch.items()}


def _train_and_predict(case: Case) -> dict[str, Any]:
    boosted = boost(case)
    share = _share(boosted, case)
    rows, found = len(share["input_ids"]), {}
    inputs = {key: value for key, value in share.items() if key != "labels"}
    pipeline, model = boosted.booster.execute_pipeline, boosted.model
    model.eval()
    found["evaluated"] = pipeline(iter([share]), model).loss.item()
    predicted = pipeline(iter([inputs]), model, return_loss=False, return_outputs=True).outputs
    assert (predicted is None) == (rows == 0)
    if boosted.plugin.pp_size == 1:
        with torch.no_grad():
            outputs = model(**share)
            assert len(outputs.logits) == len(model(**inputs).logits) == rows
        found["called"] = outputs.loss.item()
        model.train()
        found["trained"] = boosted.ordinary_backward(share).item()
        gradients = boosted.optimizer.full_gradients()
        found["gradients"] = {name: value.clone() for name, value in gradients.items()}
    return found


@pytest.mark.parametrize("layout", ["dp2", "tp2dp2", "pp2dp2"])
@pytest.mark.slow
def test_a_replica_without_samples_changes_nothing(layout: str) -> None:
    case = _case(layout)
    model = case.recipe.model()
    loss = loss_of(model, case.recipe.zoo_head, case.recipe.batch(0))
    loss.backward()
    for found in run_on_ranks(case.sizes.world_size, _train_and_predict, case):
        gradients = found.pop("gradients", {})
        assert all(value == pytest.approx(loss.item(), rel=1e-9) for value in found.values()), found
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def _without_labels(case: Case) -> list[str]:
    boosted, said = boost(case), []
    batch = {key: value for key, value in boosted.share(case.recipe.batch(0)).items() if key != "labels"}
    assert boosted.booster.execute_pipeline(iter([batch]), boosted.model).loss is None
    with pytest.raises(ConfigurationError) as pipeline:
        boosted.pipeline_backward(batch)
    said.append(str(pipeline.value))
    if boosted.plugin.pp_size == 1:
        with pytest.raises(ConfigurationError) as loop:
            boosted.ordinary_backward(batch)
        said.append(str(loop.value))
    return said


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_training_without_labels_is_refused_on_all_ranks(layout: str) -> None:
    case = _case(layout)
    said = run_on_ranks(2, _without_labels, case)
    assert said[0] == said[1]
    assert said[0][0].startswith("the batch has no labels (it has input_ids, attention_mask)")
    assert all("booster.backward got a NoneType for the loss" in sentence for sentence in said[0][1:])
