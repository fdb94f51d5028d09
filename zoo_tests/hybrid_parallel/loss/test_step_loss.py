"""The loss of a step: every form of criterion is the mean over the global batch, never a mean of means.

What breaks here first: micro-batches and shares of unequal size, up to an empty one. Look in
`plugins/hybrid_parallel/loss/step_loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from plugins.hybrid_parallel.loss.step_loss import ModelStepLoss
from zoo_tests.harness.ranks import distributed
from zoo_tests.harness.toy import EXACT, Batch, Toy, global_batch, mean_square, share_of, toy


def sum_and_count(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean over positive targets, of which every row has another number."""
    counted = batch["y"] > 0
    return ((outputs - batch["y"]).square() * counted).sum(), counted.sum()


def sum_and_plain_count(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return sum_and_count(outputs, batch)[0], int((batch["y"] > 0).sum())


def _reference(criterion: Callable[[Tensor, Batch], Any], model: nn.Module, batch: Batch) -> Tensor:
    value = criterion(model(batch["x"]), batch)
    return value[0] / value[1] if isinstance(value, tuple) else value


def _check_step(criterion: Callable[[Tensor, Batch], Any], rows: int, **options: Any) -> None:
    """Loss and gradients of a full batch, of a batch of `rows`, and of a full one again."""
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, plain = toy(), toy()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, size in enumerate((8, rows, 8)):
        batch = global_batch(step, size)
        plain.zero_grad()
        expected = _reference(criterion, plain, batch)
        expected.backward()
        result = booster.execute_pipeline(iter([share_of(batch)]), model, criterion, optimizer)
        torch.testing.assert_close(result.loss, expected.detach(), **EXACT)
        for name, gradient in optimizer.full_gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, **EXACT)
        optimizer.zero_grad()
        evaluated = booster.execute_pipeline(iter([share_of(batch)]), model, criterion)
        torch.testing.assert_close(evaluated.loss, expected.detach(), **EXACT)


CRITERIA = [mean_square, sum_and_count, sum_and_plain_count]


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("criterion", CRITERIA)
@distributed(2)
def test_unequal_shares_and_micro_batches(criterion: Callable, rows: int, zero_stage: int) -> None:
    """One row over two ranks: one of them has none; 7 over two in three micro-batches: 1 + 1 + 1 and 2 + 1 + 1."""
    _check_step(criterion, rows, num_microbatches=3, zero_stage=zero_stage)


@pytest.mark.parametrize("criterion", CRITERIA)
@distributed(4)
def test_four_replicas_of_which_some_are_empty(criterion: Callable) -> None:
    _check_step(criterion, 2, microbatch_size=1)


@distributed(2)
def test_a_criterion_that_counts_nothing_makes_no_gradient() -> None:
    booster, model = Booster(plugin=HybridParallelPlugin()), toy()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def nothing(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return outputs.sum() * 0, torch.tensor(0)

    result = booster.execute_pipeline(iter([share_of(global_batch(0))]), model, nothing, optimizer)
    assert result.loss == 0.0
    assert all(torch.count_nonzero(gradient) == 0 for gradient in optimizer.full_gradients().values())


@distributed(2)
def test_loss_and_outputs_only_where_asked_for() -> None:
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=2)), toy()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = share_of(global_batch(0))
    both = booster.execute_pipeline(iter([share]), model, mean_square, optimizer, return_outputs=True)
    torch.testing.assert_close(both.outputs, toy()(share["x"]), **EXACT)
    assert both.loss.dim() == 0 and not both.loss.requires_grad and not both.outputs.requires_grad
    optimizer.zero_grad()
    neither = booster.execute_pipeline(iter([share]), model, mean_square, optimizer, return_loss=False)
    assert neither.loss is None and neither.outputs is None
    assert optimizer.full_gradients(), "it has trained nevertheless"


class OwnLoss(Toy):
    """Computes a mean over its samples by itself, as an unknown model does."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> SimpleNamespace:
        outputs = super().forward(x)
        return {"loss": None if y is None else mean_square(outputs, {"y": y}), "outputs": outputs}


@distributed(2)
def test_a_model_that_computes_its_own_loss() -> None:
    model, plain = OwnLoss().double(), toy()
    model.load_state_dict(plain.state_dict())
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = global_batch(0)
    expected = mean_square(plain(batch["x"]), batch)
    expected.backward()
    with mock.patch("plugins.hybrid_parallel.loss.choice.log_once") as logged:
        assert model(**{"x": share_of(batch)["x"]})["loss"] is None and not logged.called
        model(**share_of(batch))
        assert logged.call_args.args[1].startswith("computes its loss itself")
    optimizer.zero_grad()
    found = booster.execute_pipeline(iter([share_of(batch)]), model, optimizer=optimizer).loss
    torch.testing.assert_close(found, expected.detach(), **EXACT)
    for name, gradient in optimizer.full_gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, **EXACT)
    with pytest.raises(ConfigurationError, match="the model returned no loss; give labels in the batch or a criterion"):
        booster.execute_pipeline(iter([{"x": batch["x"]}]), model)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"criterion returned a tensor of shape \(3,\); return a 0-d tensor"),
        ("text", "criterion returned a str"),
        ((1.0, 2), "criterion returned a float"),
    ],
)
@distributed(1)
def test_a_criterion_that_returns_something_else(value: Any, message: str) -> None:
    booster = Booster(plugin=HybridParallelPlugin())
    model = booster.boost(toy())
    with pytest.raises(ConfigurationError, match=message):
        booster.execute_pipeline(iter([global_batch(0)]), model, lambda outputs, batch: value)


@distributed(2)
def test_batch_sizes_that_never_fill_the_micro_batches() -> None:
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=4)), toy()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8)), batch_size=3)
    with pytest.raises(ConfigurationError, match=r"batch_size=3 has fewer samples than num_microbatches=4; use batch"):
        booster.boost(loader)
    with pytest.raises(ConfigurationError, match="batch_size=3 has fewer samples"):
        booster.plugin.prepare_dataloader(loader.dataset, 3)
    orders = [booster.plugin.prepare_dataloader(range(8), 4, shuffle=True, seed=seed) for seed in (3, 3, 4)]
    first, again, other = ([batch.tolist() for batch in each] for each in orders)
    assert first == again != other
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="the batch has 3 samples, fewer than num_microbatches=4; use batches"):
        booster.execute_pipeline(iter([global_batch(0, 3)]), model, mean_square, optimizer)
    with pytest.raises(ConfigurationError, match="a batch is a list; use a mapping"):
        booster.execute_pipeline(iter([[1, 2]]), model, mean_square)
    assert dist.get_world_size() == booster.plugin.dp_size


@pytest.mark.slow
@distributed(2)
def test_a_first_batch_that_is_short_on_one_replica_is_refused_on_both() -> None:
    booster, model = Booster(plugin=HybridParallelPlugin(num_microbatches=4)), toy()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="the first batch has fewer samples than the 2 replicas"):
        booster.execute_pipeline(iter([global_batch(0, 1 - dist.get_rank())]), model, mean_square, optimizer)
    share = global_batch(0, 4 - dist.get_rank())
    with pytest.raises(ConfigurationError, match="the batch has 3 samples, fewer than num_microbatches=4; use batches"):
        booster.execute_pipeline(iter([share]), model, mean_square, optimizer)
    loss = booster.execute_pipeline(iter([global_batch(0, 4)]), model, mean_square, optimizer).loss
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("GLPNForDepthEstimation", [{}, {}], "because it is the root of a mean over all pixels"),
        ("Wav2Vec2ForPreTraining", [{}, {}], "because it compares the codes of all masked frames"),
        ("CsmForConditionalGeneration", [{"labels": 7}, {"labels": -101}], "they have 3 to 6 labels a sample"),
        ("SpeechT5ForTextToSpeech", [{"labels": 0.5}, {"labels": -100.0}], "they have 3 to 6 labels a sample"),
        ("InformerForPrediction", [{"future_observed_mask": 1.0}, {"future_observed_mask": 0.0}], "0 to 6 values of"),
        ("Own", [{"text_labels": 1}, {"text_labels": -100}], "they have 3 to 6 labels a sample"),
        ("Own", [{"labels": 0.5}, {"labels": -100.0}], None),
    ],
)
def test_a_mean_of_the_models_own_is_refused_where_parts_do_not_tell_it(
    name: str, parts: list[dict[str, float]], message: str | None
) -> None:
    """Each part has two samples of six values, half of which have the value in `parts`."""
    model = type(name, (nn.Module,), {"forward": lambda self, labels=None, text_labels=None: None})()
    ids = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}
    batches = [
        ids | {key: torch.tensor([[abs(value)] * 3 + [value] * 3] * 2) for key, value in part.items()} for part in parts
    ]
    mesh = SimpleNamespace(size=lambda axis: 1, device=torch.device("cpu"))
    with nullcontext() if message is None else pytest.raises(ConfigurationError, match=message):
        ModelStepLoss(batches, mesh, batches[0], "its forward", None, model)
