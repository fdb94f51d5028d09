"""Whole training states: saved in the middle of training, opened under other layouts, as if nothing had happened.

What breaks here first: optimizer states of cut, tied and padded parameters, and what is easily forgotten (loss scale,
position in the epoch, random streams). Look in `plugins/hybrid_parallel/checkpoint`.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import train_reference
from zoo_tests.harness.toy import global_batch, mean_square, share_of, toy
from zoo_tests.harness.train_sharded import Boosted, boost

HEADS = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head"}


def _step(boosted: Boosted, case: Case, step: int) -> float:
    loss = boosted.pipeline_backward(boosted.share(case.recipe.batch(step))).item()
    boosted.finish_step()
    return loss


def _states(boosted: Boosted) -> dict[str, Any]:
    return {"model": boosted.model, "optimizer": boosted.optimizer, "lr_scheduler": boosted.scheduler}


def _train_one_step(case: Case, step: int, directory: Path) -> float:
    """Continue from the checkpoint of the step before, train a step, save the next checkpoint."""
    boosted = boost(case)
    if step:
        extra = boosted.booster.load_checkpoint(directory / str(step), **_states(boosted))
        assert extra == {"done": step, "note": ["any", {"JSON": True}]}
    loss = _step(boosted, case, step)
    note = ["any", {"JSON": True}]
    boosted.booster.save_checkpoint(directory / str(step + 1), **_states(boosted), done=step + 1, note=note)
    return loss


JOURNEYS = [
    ("bert", "adamw", {}, ("tp2", "pp2", "dp2", "single")),
    ("llama", "momentum", {"tie_word_embeddings": True}, ("pp2", "tp2", "single", "dp2")),
    ("gpt2", "adamw", {}, ("dp2", "tp2", "pp2", "single")),
    ("gpt2", "momentum", {}, ("tp2pp2", "dp4", "tp4", "pp2dp2")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "optimizer", "config", "layouts"), JOURNEYS)
def test_training_goes_on_under_another_layout(
    family: str, optimizer: str, config: dict[str, Any], layouts: tuple[str, ...], tmp_path: Path
) -> None:
    """Every step on another layout; the losses are those of uninterrupted plain training."""
    recipe = Recipe(
        family=family,
        head=HEADS[family],
        optimizer=optimizer,
        steps=len(layouts),
        max_norm=0.5,
        config=tuple(config.items()),
    )
    losses = [
        run_on_ranks(LAYOUTS[layout].world_size, _train_one_step, Case(recipe=recipe, layout=layout), step, tmp_path)[0]
        for step, layout in enumerate(layouts)
    ]
    # Adam divides by the root of a gradient that is zero but for rounding (key biases).
    assert losses == pytest.approx(train_reference(recipe).losses, rel=1e-12 if optimizer == "momentum" else 1e-9)


def _interrupt(case: Case, directory: Path) -> None:
    """Two steps, a save, two more; then again from the save: the very same bits."""
    boosted = boost(case)
    for step in range(2):
        _step(boosted, case, step)
    boosted.booster.save_checkpoint(directory / "checkpoint", **_states(boosted))
    expected = [_step(boosted, case, step) for step in (2, 3)]
    other = boost(case)
    _step(other, case, 5)  # whatever happened before loading is forgotten
    other.booster.load_checkpoint(directory / "checkpoint", **_states(other))
    assert [_step(other, case, step) for step in (2, 3)] == expected
    for param, reference in zip(other.model.parameters(), boosted.model.parameters(), strict=True):
        assert torch.equal(param, reference)


DROPOUT = (("hidden_dropout_prob", 0.2), ("attention_probs_dropout_prob", 0.2))


# In the suite each layout and each precision.
_RESUMED = [("tp2", "bf16"), ("tp2", "fp16"), ("pp2", "bf16"), ("dp2", "fp32")]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in _RESUMED else pytest.mark.campaign)
        for case in itertools.product(("tp2", "pp2", "dp2"), ("fp32", "bf16", "fp16"))
    ],
)
def test_resuming_on_the_same_layout_gives_the_same_bits(layout: str, precision: str, tmp_path: Path) -> None:
    """With dropout: random streams, fp32 masters and the loss scale are part of the state."""
    recipe = Recipe(family="bert", head="sequence", optimizer="adamw", precision=precision, config=DROPOUT)
    options = (("growth_interval", 3),) if precision == "fp16" else ()
    run_on_ranks(2, _interrupt, Case(recipe=recipe, layout=layout, options=options), tmp_path)


# ----- other optimizers, the loader -----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adafactor", "NAdam", "Rprop", "Adagrad", "SGD"])
def test_states_of_other_optimizers_between_one_and_two_replicas(name: str, tmp_path: Path) -> None:
    """Scalars, rows and columns of matrices, missing states of unused parameters."""
    losses = run_on_ranks(2, _toy_steps, name, (0, 1), None, tmp_path / "two")[0]
    losses += run_on_ranks(1, _toy_steps, name, (2,), tmp_path / "two", tmp_path / "one")[0]
    losses += run_on_ranks(2, _toy_steps, name, (3, 4), tmp_path / "one", tmp_path / "end")[0]
    assert losses == pytest.approx(run_on_ranks(1, _toy_steps, name, range(5), None, tmp_path / "all")[0], rel=1e-11)


def _toy_steps(name: str, steps: tuple[int, ...], load: Path | None, save: Path) -> list[float]:
    model, booster = toy(), Booster(plugin=HybridParallelPlugin(zero_bucket_size_in_mb=1e-4))
    model, optimizer = booster.boost(model, getattr(torch.optim, name)(model.parameters(), lr=0.05))
    if load is not None:
        booster.load_checkpoint(load, model=model, optimizer=optimizer)
    losses = []
    for step in steps:
        batches = iter([share_of(global_batch(step))])
        losses.append(booster.execute_pipeline(batches, model, mean_square, optimizer).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    booster.save_checkpoint(save, model=model, optimizer=optimizer)
    return losses


def _collate(samples: list[tuple[Tensor]]) -> dict[str, Tensor]:
    return {"x": torch.stack([sample[0] for sample in samples])}


def _loader(booster: Booster, batch_size: int = 2) -> DataLoader:
    return booster.boost(
        DataLoader(TensorDataset(torch.arange(18)), batch_size=batch_size, shuffle=True, collate_fn=_collate)
    )


@distributed(2)
def test_the_position_in_an_epoch_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    booster = Booster(plugin=HybridParallelPlugin(seed=3))
    loader = _loader(booster)
    for _ in loader:
        pass
    batches = iter(loader)
    seen = [next(batches)["x"].tolist() for _ in range(2)]
    booster.save_checkpoint(tmp_path / "state", dataloader=loader)
    expected = [batch["x"].tolist() for batch in batches]
    again = Booster(plugin=HybridParallelPlugin(seed=3))  # loaders of one plugin draw from the same numbers
    other = _loader(again)
    again.load_checkpoint(tmp_path / "state", dataloader=other)
    found = [batch["x"].tolist() for batch in other]
    assert found == expected and len(seen) + len(found) == len(loader) == 5
    assert [b["x"].tolist() for b in other] == [b["x"].tolist() for b in loader], "and so is the epoch"


def _rest_of_an_epoch(load: Path | None, save: Path | None, batch_size: int) -> list[list[int]]:
    """Two batches and a save; or a load and what is left."""
    booster = Booster(plugin=HybridParallelPlugin(seed=3))
    loader = _loader(booster, batch_size)
    if load is not None:
        booster.load_checkpoint(load, dataloader=loader)
        return [batch["x"].tolist() for batch in loader]
    batches = iter(loader)
    seen = [next(batches)["x"].tolist() for _ in range(2)]
    booster.save_checkpoint(save, dataloader=loader)
    return seen


@pytest.mark.parametrize("batch_size", [4, 2])
def test_the_position_counts_samples_under_another_number_of_replicas(batch_size: int, tmp_path: Path) -> None:
    """2 of 5 global batches of 4 on two ranks; the other 10 samples on one, in the same batches or in smaller ones."""
    seen = run_on_ranks(2, _rest_of_an_epoch, None, tmp_path / "state", 2)
    rest = run_on_ranks(1, _rest_of_an_epoch, tmp_path / "state", None, batch_size)[0]
    samples = [index for rank in seen for batch in rank for index in batch]
    samples += [index for batch in rest for index in batch]
    assert sorted(samples) == list(range(18))


@distributed(2)
def test_a_position_between_two_batches_is_refused(tmp_path: Path) -> None:
    booster = Booster(plugin=HybridParallelPlugin(seed=3))
    loader = _loader(booster, batch_size=3)
    next(iter(loader))
    booster.save_checkpoint(tmp_path / "state", dataloader=loader)
    with pytest.raises(
        ConfigurationError, match=r"left after 6 samples, which batch_size\*dp_size=4 does not divide; use .*=6"
    ):
        booster.load_checkpoint(tmp_path / "state", dataloader=_loader(booster, batch_size=2))


# ----- interrupted and wrong -----


@distributed(2)
def test_a_save_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    case = Case(recipe=Recipe(family="bert", head="sequence"), layout="dp2")
    boosted, path = boost(case), tmp_path / "checkpoint"
    for done in range(2):
        boosted.booster.save_checkpoint(path, **_states(boosted), done=done)
    assert boosted.booster.load_checkpoint(path, **_states(boosted)) == {"done": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    assert len(list(path.iterdir())) == 3, "the files of the save before are gone"


@pytest.mark.slow
@distributed(2)
def test_what_is_refused(tmp_path: Path) -> None:
    case = Case(recipe=Recipe(family="bert", head="sequence", optimizer="adamw"), layout="tp2")
    boosted, path = boost(case), tmp_path / "checkpoint"
    with pytest.raises(ConfigurationError, match="has no manifest.json: it is no checkpoint"):
        boosted.booster.load_checkpoint(path, **_states(boosted))
    with pytest.raises(ConfigurationError, match=r"note\['by'\] is a builtin_function_or_method, which a checkpoint"):
        boosted.booster.save_checkpoint(path, **_states(boosted), note={"by": print})
    boosted.pipeline_backward(boosted.share(case.recipe.batch(0)))
    with pytest.raises(ConfigurationError, match=r"the gradients since the last optimizer.step\(\) are no part"):
        boosted.booster.save_checkpoint(path, **_states(boosted))
    assert not path.exists(), "a refused save leaves nothing behind"
    boosted.finish_step()
    boosted.booster.save_checkpoint(path, **_states(boosted))

    schedule = torch.optim.lr_scheduler.ConstantLR(boosted.optimizer)
    boosted.booster.save_checkpoint(tmp_path / "schedule", lr_scheduler=schedule)
    with pytest.raises(
        ConfigurationError, match="is that of another lr_scheduler than this ChainedScheduler: .* 'base_lrs'"
    ):
        chained = torch.optim.lr_scheduler.ChainedScheduler([schedule])
        boosted.booster.load_checkpoint(tmp_path / "schedule", lr_scheduler=chained)
    other = boost(case.but(optimizer="momentum"))
    with pytest.raises(ConfigurationError, match="holds the state of AdamW, not of SGD; make a AdamW"):
        other.booster.load_checkpoint(path, **_states(other))
    boosted.booster.save_checkpoint(tmp_path / "model", model=boosted.model)
    with pytest.raises(ConfigurationError, match="was saved without an optimizer; load it without one"):
        boosted.booster.load_optimizer(boosted.optimizer, tmp_path / "model")
    another = boost(case.but(head="token"))
    with pytest.raises(ConfigurationError, match="does not fit the model"):
        another.booster.load_checkpoint(path, model=boost(case.but(head="masked_lm")).model)
    booster, model = Booster(plugin=HybridParallelPlugin()), toy()
    _, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(
        ConfigurationError, match="holds 2 parameter groups, the optimizer has 1; make it with the same"
    ):
        booster.load_optimizer(optimizer, path)


@distributed(1)
def test_groups_that_are_not_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    """Options and states belong to the members of a group, not to its number."""

    def optimizer_of(*groups: Sequence[int], **options: float) -> Any:
        model = toy()
        every = list(model.parameters())
        made = [{"params": [every[index] for index in group]} for group in groups]
        return booster.boost(model, torch.optim.AdamW(made, **options))[1]

    booster = Booster(plugin=HybridParallelPlugin())
    count = len(list(toy().parameters()))
    first, *others = range(count)
    saved = optimizer_of([first], others)
    saved.param_groups[0]["rate"] = 2.0
    booster.save_optimizer(saved, tmp_path)
    for groups, sentence in {
        (tuple(others), (first,)): r"is in group 0 of the checkpoint's optimizer and in group 1 of this one",
        ((first, others[0]), tuple(others[1:])): r"is in group 1 of the checkpoint's optimizer and in group 0",
        ((first,), tuple(others[1:])): r"is in group 1 of the checkpoint's optimizer and in no group of this one",
        ((first,), tuple(others)): r"group 0 of the checkpoint has the option 'rate', which this AdamW does not know",
    }.items():
        other = optimizer_of(*groups)
        if "rate" not in sentence:
            other.param_groups[0]["rate"] = 2.0
        with pytest.raises(ConfigurationError, match=sentence):
            booster.load_optimizer(other, tmp_path)
    same = optimizer_of([first], reversed(others), lr=torch.tensor(0.5))
    same.param_groups[0]["rate"] = None
    booster.load_optimizer(same, tmp_path)
    assert same.param_groups[0]["rate"] == 2.0 and same.param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.equal(same.param_groups[0]["lr"], torch.tensor(1e-3))


@distributed(1)
def test_states_of_the_users_objects_come_back_equal(tmp_path: Path) -> None:
    """Schedulers with integer keys, with tensors and in others; extras of every kind (`utils/test_typed_json.py`)."""

    def schedulers(optimizer: Any) -> list[Any]:
        rates = torch.optim.lr_scheduler
        milestones = partial(rates.MultiStepLR, milestones=[2, 4])
        return [
            milestones(optimizer),
            rates.SequentialLR(optimizer, [rates.ConstantLR(optimizer), milestones(optimizer)], [3]),
            rates.ChainedScheduler([milestones(optimizer), rates.ExponentialLR(optimizer, 0.9)], optimizer=optimizer),
        ]

    booster, model = Booster(plugin=HybridParallelPlugin()), toy()
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)))
    for index, scheduler in enumerate(schedulers(optimizer)):
        path = tmp_path / str(index)
        expected = copy.deepcopy(scheduler.state_dict())
        booster.save_checkpoint(path, lr_scheduler=scheduler, extra={6: ("seven", {8})})
        booster.save_lr_scheduler(scheduler, path.with_suffix(".json"))
        for load in (
            partial(booster.load_checkpoint, path),
            lambda lr_scheduler: booster.load_lr_scheduler(lr_scheduler, path.with_suffix(".json")),  # noqa: B023
        ):
            other = schedulers(optimizer)[index]
            extra = load(lr_scheduler=other)
            assert repr(other.state_dict()) == repr(expected)
            assert extra in (None, {"extra": {6: ("seven", {8})}})


_RATES = torch.optim.lr_scheduler
_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: _RATES.LambdaLR(optimizer, lambda step: 0.9**step),
    "multiplicative": lambda optimizer: _RATES.MultiplicativeLR(optimizer, lambda step: 0.9 + step / 100),
    "step": lambda optimizer: _RATES.StepLR(optimizer, 3),
    "milestones": lambda optimizer: _RATES.MultiStepLR(optimizer, [2, 5, 6]),
    "constant": lambda optimizer: _RATES.ConstantLR(optimizer, total_iters=5),
    "linear": lambda optimizer: _RATES.LinearLR(optimizer, total_iters=6),
    "exponential": lambda optimizer: _RATES.ExponentialLR(optimizer, 0.8),
    "polynomial": lambda optimizer: _RATES.PolynomialLR(optimizer, total_iters=6, power=2.0),
    "cosine": lambda optimizer: _RATES.CosineAnnealingLR(optimizer, 6),
    "restarts": lambda optimizer: _RATES.CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "cycle of rate and momentum": lambda optimizer: _RATES.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3),
    "one cycle": lambda optimizer: _RATES.OneCycleLR(optimizer, 0.2, total_steps=9),
    "plateau": lambda optimizer: _RATES.ReduceLROnPlateau(optimizer, patience=1),
    "chained": lambda optimizer: _RATES.ChainedScheduler(
        [_RATES.MultiStepLR(optimizer, [5]), _RATES.StepLR(optimizer, 2)]
    ),
    "in sequence": lambda optimizer: _RATES.SequentialLR(
        optimizer, [_RATES.LinearLR(optimizer), _RATES.MultiStepLR(optimizer, [2, 3])], [4]
    ),
}


@pytest.mark.slow
@distributed(2)
def test_schedulers_lead_to_the_weights_of_a_plain_run(tmp_path: Path) -> None:
    """Each of torch's is saved before and after a change of the rate, and the run goes on with new objects."""
    for name, make in _SCHEDULERS.items():
        plain = toy()
        booster, model = Booster(plugin=HybridParallelPlugin()), toy()
        reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        expected = make(reference)
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = make(optimizer)
        for step in range(8):
            batch = global_batch(step)
            mean_square(plain(batch["x"]), batch).backward()
            booster.execute_pipeline(share_of(batch), model, mean_square, optimizer=optimizer)
            for stepped, rates in ((reference, expected), (optimizer, scheduler)):
                stepped.step()
                stepped.zero_grad()
                rates.step(*[1.0] * (name == "plateau"))
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"], name
            if step in (3, 4):
                place = tmp_path / f"{name} {step}"
                booster.save_checkpoint(place, model=model, optimizer=optimizer, lr_scheduler=scheduler)
                model = toy()
                model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
                scheduler = make(optimizer)
                booster.load_checkpoint(place, model=model, optimizer=optimizer, lr_scheduler=scheduler)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-12, msg=name)


@distributed(2)
def test_an_optimizer_of_a_model_with_other_shapes_is_refused(tmp_path: Path) -> None:
    case = Case(recipe=Recipe(family="bert", head="sequence", optimizer="adamw"), layout="tp2")
    boosted = boost(case)
    _step(boosted, case, 0)
    boosted.booster.save_optimizer(boosted.optimizer, tmp_path)
    larger = boost(case.but(config=(("vocab_size", 1022),)))
    with pytest.raises(ConfigurationError, match=r"word_embeddings.weight is that of shape \(1021, 48\) but"):
        larger.booster.load_optimizer(larger.optimizer, tmp_path)


@pytest.mark.slow
@distributed(2)
def test_parts_of_the_state_can_be_saved_alone(tmp_path: Path) -> None:
    case = Case(recipe=Recipe(family="bert", head="sequence", optimizer="adamw"), layout="pp2")
    boosted = boost(case)
    _step(boosted, case, 0)
    boosted.booster.save_model(boosted.model, tmp_path / "model")
    boosted.booster.save_optimizer(boosted.optimizer, tmp_path / "optimizer")
    boosted.booster.save_lr_scheduler(boosted.scheduler, tmp_path / "scheduler.json")
    expected = _step(boosted, case, 1), _step(boosted, case, 2)
    other = boost(case)
    other.booster.load_model(other.model, tmp_path / "model")
    other.booster.load_optimizer(other.optimizer, tmp_path / "optimizer")
    other.booster.load_lr_scheduler(other.scheduler, tmp_path / "scheduler.json")
    assert (_step(other, case, 1), _step(other, case, 2)) == expected


@pytest.mark.slow
@distributed(2)
def test_loading_forgets_the_states_of_before(tmp_path: Path) -> None:
    """A checkpoint from before the first step has no states: those of the steps since must go."""
    case = Case(recipe=Recipe(family="bert", head="sequence", optimizer="adamw"), layout="dp2")
    boosted = boost(case)
    boosted.booster.save_checkpoint(tmp_path / "start", **_states(boosted))
    first = [_step(boosted, case, step) for step in range(3)]
    boosted.booster.load_checkpoint(tmp_path / "start", **_states(boosted))
    assert [_step(boosted, case, step) for step in range(3)] == first


@distributed(2)
def test_no_pickle_in_a_checkpoint(tmp_path: Path) -> None:
    case = Case(recipe=Recipe(family="bert", head="sequence", optimizer="adamw"), layout="dp2")
    boosted = boost(case)
    _step(boosted, case, 0)
    boosted.booster.save_checkpoint(tmp_path / "checkpoint", **_states(boosted))
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert files and {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
