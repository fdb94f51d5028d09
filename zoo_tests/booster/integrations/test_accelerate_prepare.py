"""What `prepare` takes and returns: any order, several loaders, models without optimizers, two models in one loss.

What breaks here first: an optimizer that is boosted with another model than its own. Look in
`Accelerator._boost_models`.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from booster.errors import ConfigurationError
from booster.integrations.accelerate import Accelerator
from booster.integrations.prepared_loader import PreparedLoader
from plugins.hybrid_parallel import HybridParallelPlugin, guards
from zoo_tests.booster.integrations.accelerate_loop import LAYOUTS, bert, collate, fresh_accelerate, loader, samples
from zoo_tests.harness.ranks import distributed, run_on_ranks

_EXACT = {"rtol": 1e-9, "atol": 1e-11}


def _accelerator(layout: str = "dp2", **options: Any) -> Accelerator:
    return Accelerator(plugin=HybridParallelPlugin(**LAYOUTS[layout][1]), **options)


@distributed(2)
def test_objects_come_back_in_the_order_given() -> None:
    with fresh_accelerate():
        accelerator = _accelerator("tp2")
        model = bert()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler, first, second = StepLR(optimizer, 1, gamma=0.5), loader(9, 2), loader(5, 3)
        given = (scheduler, second, optimizer, "a text", model, first, None)
        found = accelerator.prepare(*given)
        assert [found[3], found[6]] == ["a text", None]
        assert len(found[1]) == 2 and len(found[5]) == 5 and found[4].unwrap().config is not None
        batch = next(iter(found[5]))
        accelerator.backward(found[4](**batch).loss)
        found[2].step()
        found[0].step()
        assert found[2].param_groups[0]["lr"] == 0.05 == found[0].get_last_lr()[0]
        again = accelerator.prepare(*found)
        assert all(one is other for one, other in zip(again, found, strict=True)), "prepared already"
        assert accelerator.prepare(loader(3, 1)) is not None, "one object comes back bare; a loader may come later"


def _only_evaluated(layout: str) -> None:
    with fresh_accelerate():
        accelerator = _accelerator(layout)
        plain = bert(torch.float64).eval()
        for model in (accelerator.prepare(bert(torch.float64)), accelerator.prepare_model(bert(torch.float64))):
            batch = collate(samples(4))
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(**batch).logits, plain(**batch).logits, **_EXACT)
        with pytest.raises(ConfigurationError, match=r"accelerator.backward\(\) finds no optimizer; prepare it"):
            accelerator.backward(model(**batch).loss)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_model_alone_is_evaluated(layout: str) -> None:
    run_on_ranks(2, _only_evaluated, layout)


def _distill(accelerator: Any, batch: dict[str, Tensor], steps: int = 3) -> dict[str, Tensor]:
    """A student learns from a teacher's logits, and a second network from the student's: two losses, two optimizers."""
    student, teacher = bert(torch.float64, seed=1), bert(torch.float64, seed=2, num_hidden_layers=4)
    other = bert(torch.float64, seed=3)
    optimizer, second = SGD(student.parameters(), lr=0.1), SGD(other.parameters(), lr=0.2, momentum=0.9)
    student, teacher, second, optimizer, other = accelerator.prepare(student, teacher, second, optimizer, other)
    teacher.eval()
    for _ in range(steps):
        with torch.no_grad():
            wanted = teacher(**batch).logits.softmax(-1)
        outputs = student(**batch)
        accelerator.backward(outputs.loss + F.kl_div(outputs.logits.log_softmax(-1), wanted, reduction="batchmean"))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(other(**batch).logits, outputs.logits.detach()))
        accelerator.clip_grad_norm_(other.parameters(), 0.1)
        second.step()
        second.zero_grad()
    weights = {"student": student, "teacher": teacher, "other": other}
    return {
        f"{name}.{key}": value.clone()
        for name, model in weights.items()
        for key, value in accelerator.get_state_dict(model).items()
    }


def _distill_boosted(layout: str) -> None:
    batch = collate(samples(4))
    with fresh_accelerate():
        expected = _distill(accelerate.Accelerator(cpu=True), batch)
    with fresh_accelerate():
        accelerator = _accelerator(layout)
        rank, replicas = accelerator.process_index, accelerator.num_processes
        share = {name: value.chunk(replicas)[rank] for name, value in batch.items()}
        found = _distill(accelerator, share)
    torch.testing.assert_close(found, expected, **_EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_teacher_and_student(layout: str) -> None:
    run_on_ranks(2, _distill_boosted, layout)


# ----- losses of loops that undo an average over processes -----


def _causal(rows: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).double()
        ids = torch.randint(50, (rows, 7))
    labels = [each.masked_fill(torch.arange(7) < index % 5, -100) for index, each in enumerate(ids)]
    return model, [{"input_ids": each, "labels": label} for each, label in zip(ids, labels, strict=True)]


def _sum(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def _count(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def _of_the_model(accelerator: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    items = accelerator.gather(_count(batch)).sum().item()
    return model(**batch, num_items_in_batch=items).loss * accelerator.num_processes


def _as_a_tuple(accelerator: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    items = accelerator.gather(_count(batch)).sum().item()
    return model(**batch, num_items_in_batch=items, return_dict=False)[0] * accelerator.num_processes


def _of_a_sum(accelerator: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    items = accelerator.gather(_count(batch)).sum()
    return _sum(model(input_ids=batch["input_ids"]), batch) * accelerator.num_processes / items


def _reduced_mean(accelerator: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return accelerator.reduce(model(**batch).loss, "mean")


def _reduced_sum(accelerator: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return accelerator.reduce(_sum(model(input_ids=batch["input_ids"]), batch)) / accelerator.reduce(_count(batch))


_FORMS = [_of_the_model, _as_a_tuple, _of_a_sum, _reduced_mean, _reduced_sum]


def _trained(accelerator: Any, form: Any, rows: int) -> tuple[list[float], dict[str, Tensor]]:
    model, data = _causal(rows)
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes)
    model, optimizer, batches = accelerator.prepare(model, SGD(model.parameters(), lr=0.5), loader)
    logged = []
    for batch in batches:
        loss = form(accelerator, model, batch)
        accelerator.backward(loss)
        logged.append(accelerator.gather(loss.detach()).sum().item() / accelerator.num_processes)
        optimizer.step()
        optimizer.zero_grad()
    return logged, accelerator.get_state_dict(model)


def _undo_an_average(layout: dict[str, Any], rows: int) -> None:
    for form in _FORMS:
        with fresh_accelerate():
            expected = _trained(accelerate.Accelerator(cpu=True), form, rows)
        with fresh_accelerate():
            found = _trained(Accelerator(plugin=HybridParallelPlugin(**layout)), form, rows)
        # transformers rounds logits to fp32 for its loss
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda text, form=form: f"{form}: {text}")


@pytest.mark.parametrize(
    ("ranks", "layout", "rows"),
    [
        (2, {}, 9),
        pytest.param(2, {"zero_stage": 3}, 11, marks=pytest.mark.slow),
        pytest.param(4, {"tp_size": 2}, 11, marks=pytest.mark.slow),
        pytest.param(4, {"pp_size": 2, "num_microbatches": 2}, 11, marks=pytest.mark.slow),
    ],
)
def test_losses_times_processes_are_those_of_one_process(ranks: int, layout: dict[str, Any], rows: int) -> None:
    """The last batch has one or three rows for two replicas; labels differ from row to row."""
    run_on_ranks(ranks, _undo_an_average, layout, rows)


@distributed(2)
def test_a_number_of_processes_that_no_gradient_needs_is_said() -> None:
    """Recipes of accelerate read it after the model's call."""
    cases: list[tuple[str, Any, bool]] = [
        ("tp2", lambda loss, accelerator, stored: loss * dist.get_world_size() / 3, True),
        ("dp2", lambda loss, accelerator, stored: stored * loss, True),
        ("dp2", lambda loss, accelerator, stored: loss * accelerator.num_processes, False),
        ("tp2", lambda loss, accelerator, stored: loss * 3, False),
    ]
    for layout, times, is_said in cases:
        with fresh_accelerate(), mock.patch.object(guards._log, "warning") as warn:
            accelerator, model = _accelerator(layout), bert()
            stored = accelerator.num_processes
            model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                accelerator.backward(times(model(**collate(samples(6))).loss, accelerator, stored))
            said = [call for call in warn.call_args_list if call.args[0].startswith("the loss is multiplied by")]
            assert len(said) == (is_said and dist.get_rank() == 0)


@distributed(2)
def test_ranks_without_a_common_seed_draw_alike() -> None:
    with fresh_accelerate():
        torch.manual_seed(dist.get_rank())
        accelerator = _accelerator("tp2")
        model = bert(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
        model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(**collate(samples(6))).loss)  # compares the losses of ranks


@distributed(2)
def test_an_optimizer_without_its_model_is_refused() -> None:
    with fresh_accelerate():
        accelerator = _accelerator()
        model, stranger = bert(), nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match=r"prepare\(\) got a SGD without its model; give both in one call"):
            accelerator.prepare(SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigurationError, match="SGD without its model"):
            accelerator.prepare(model, SGD(stranger.parameters(), lr=0.1))


# ----- loaders -----


def _seen(batches: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def _numbers(length: int, batch_size: int | None, **options: Any) -> DataLoader:
    data = [{"x": number} for number in range(length)]
    return DataLoader(data, **({"batch_size": batch_size} if batch_size else {}), **options)


@distributed(2)
def test_batches_of_replicas_are_those_of_plain_processes() -> None:
    """Consecutive batches go to consecutive replicas; a short last one is shared out, and no sample is repeated."""
    with fresh_accelerate():
        config = DataLoaderConfiguration(even_batches=False, dispatch_batches=True)  # which gives out the same batches
        accelerator = _accelerator(dataloader_config=config)
        rank = accelerator.process_index
        assert _seen(accelerator.prepare(_numbers(11, 2))) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9, 10]]][rank]
        assert _seen(accelerator.prepare(_numbers(11, 2, drop_last=True))) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][rank]
        with accelerator.join_uneven_inputs([], even_batches=False):
            assert len(_seen(accelerator.prepare(_numbers(9, 2)))) == 3, "one batch is empty on a replica"


@distributed(2)
def test_split_batches_are_parts_of_the_given_ones() -> None:
    with fresh_accelerate():
        accelerator = _accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        model, optimizer = bert(), SGD([torch.zeros(1)], lr=1.0)
        assert (
            _seen(accelerator.prepare(_numbers(8, 4)))
            == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][accelerator.process_index]
        )
        optimizer = SGD(model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.backward(model(**collate(samples(2))).loss)
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [0.5], "one batch is one step of the schedule"
        with pytest.raises(ConfigurationError, match="split_batches=True cannot split batch_size=3 into 2 equal parts"):
            accelerator.prepare(_numbers(8, 3))


def _seedable_order(accelerator: Any) -> list[list[list[int]]]:
    replicas = getattr(accelerator, "replicas", None)
    batches = accelerator.prepare(_numbers(8, 4 // replicas.size if replicas else 4, shuffle=True))
    orders = [_seen(batches) for _ in range(2)]
    batches.set_epoch(5)
    return [*orders, _seen(batches)]


@distributed(2)
def test_a_seedable_sampler_orders_as_in_plain_accelerate() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    with fresh_accelerate():
        expected = _seedable_order(accelerate.Accelerator(cpu=True, dataloader_config=config))
    with fresh_accelerate():
        accelerator = _accelerator(dataloader_config=config)
        found = _seedable_order(accelerator)
        rank = accelerator.process_index
    assert found == [[batch[2 * rank : 2 * rank + 2] for batch in epoch] for epoch in expected]
    assert expected[0] != expected[1] != expected[2]


class _Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([{"x": number + 10 * self.epoch} for number in range(7)])


@distributed(2)
def test_a_dataset_without_length_has_a_last_batch() -> None:
    with fresh_accelerate():
        accelerator = _accelerator(gradient_accumulation_steps=3)
        batches = accelerator.prepare(DataLoader(_Stream(), batch_size=2))
        for epoch in range(2):  # which accelerate's loaders tell the dataset
            last, seen = [], []
            for batch in batches:
                last.append(accelerator.gradient_state.end_of_dataloader)
                seen += accelerator.gather_for_metrics(batch["x"]).tolist()
            assert last == [False, True] and seen == list(range(10 * epoch, 10 * epoch + 7))


@distributed(2)
def test_batches_are_skipped_once() -> None:
    with fresh_accelerate():
        accelerator = _accelerator()
        batches = accelerator.prepare(_numbers(12, 2))
        whole = _seen(batches)
        assert _seen(accelerator.skip_first_batches(batches, 2)) == whole[2:]
        assert _seen(batches) == whole, "the next epoch is whole"
        other = DataLoader(TensorDataset(torch.arange(4)), batch_size=1)
        assert len(list(accelerator.skip_first_batches(other, 3))) == 1, "a loader that is not prepared"


@distributed(2)
def test_each_sample_is_evaluated_once() -> None:
    """Whatever shares out the samples: short last batches, dropped ones, batches of a sampler's own."""
    sampler = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    cases = {
        "short": (_numbers(9, 2), 9),
        "one sample more": (_numbers(5, 2), 5),
        "full": (_numbers(8, 2), 8),
        "fewer than replicas": (_numbers(1, 2), 1),
        "dropped": (_numbers(10, 2, drop_last=True), 8),
        "own batches": (DataLoader([{"x": number} for number in range(5)], batch_sampler=sampler), 5),
        "groups of one length": (_numbers(5, None, batch_sampler=[[0], [1, 2], [3, 4]]), 5),
        "drawn by a sampler": (_numbers(9, 2, sampler=[0, 1, 2, 3, 4, 5, 6]), 7),
    }
    with fresh_accelerate():
        accelerator = _accelerator()
        for name, (batches, expected) in cases.items():
            prepared = accelerator.prepare(batches)
            assert isinstance(prepared, PreparedLoader)
            seen: list[int] = []
            texts: list[str] = []
            for batch in prepared:
                found = accelerator.gather_for_metrics({"x": batch["x"], "twice": (batch["x"] * 2, None)})
                assert found["twice"][1] is None and torch.equal(found["twice"][0], found["x"] * 2)
                seen += found["x"].tolist()
                texts += accelerator.gather_for_metrics([str(number) for number in batch["x"].tolist()])
            assert seen == list(range(expected)) and texts == [str(number) for number in seen], name


@distributed(2)
def test_an_iteration_that_is_left_early_does_not_count_any_more() -> None:
    with fresh_accelerate():
        accelerator = _accelerator()
        outer, inner = accelerator.prepare(_numbers(8, 2), _numbers(4, 2))
        for _ in outer:
            for _ in inner:
                assert accelerator.gradient_state.end_of_dataloader, "of the inner one"
                break
            assert not accelerator.gradient_state.end_of_dataloader
            break
        assert accelerator.gradient_state.active_dataloader is None


@distributed(1)
def test_a_prepared_loader_can_be_looked_into() -> None:
    with fresh_accelerate():
        accelerator = _accelerator()
        prepared = accelerator.prepare(_numbers(7, 3))
        assert (len(prepared), prepared.total_batch_size, prepared.total_dataset_length, prepared.batch_size) == (
            3,
            3,
            7,
            3,
        )
        assert len(prepared.dataset) == 7
        with pytest.raises(AttributeError):
            _ = copy.copy(prepared).nothing_of_this_name
