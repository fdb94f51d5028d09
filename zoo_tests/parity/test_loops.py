"""Loops as users write them: ordinary ones, accumulation, evaluation in between, short and empty batches.

What breaks here first: anything that remembers something from one call to the next (shapes, reductions that are under
way, counts of micro-batches).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from booster.errors import ConfigurationError
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import run_on_ranks
from zoo_tests.harness.reference import inputs_of, loss_of
from zoo_tests.harness.train_sharded import Boosted, boost
from zoo_tests.zoo import Batch

MAIN = {"bert": "masked_lm", "llama": "causal_lm", "gpt2": "lm_head"}
EXACT = {"rtol": 1e-9, "atol": 1e-12, "check_device": False}


def _ordinary_cases() -> list:
    cases = [
        Case(
            recipe=Recipe(family=family, head=head, optimizer="momentum", max_norm=0.1),
            layout=layout,
            ordinary_loop=True,
        )
        for family, head in MAIN.items()
        for layout in ("single", "tp2", "dp2", "tp2dp2")
    ]
    return [
        pytest.param(case, id=str(case), marks=[] if case.layout == "tp2dp2" else pytest.mark.slow) for case in cases
    ]


@pytest.mark.parametrize("case", _ordinary_cases())
def test_ordinary_loop(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


# ----- losses that read weights -----


def _penalise(case: Case) -> None:
    """Twice: the check is not only one of the first steps, and a refusal leaves nothing behind."""
    boosted = boost(case)
    norm = next(param for name, param in boosted.model.named_parameters() if name.endswith("layernorm.weight"))
    batch = boosted.share(case.recipe.batch(0))
    for _ in range(2):
        loss = boosted.model(**batch).loss + 0.01 * norm.square().sum()
        with pytest.raises(ConfigurationError, match="the loss reads a weight of shape .* weight_decay"):
            boosted.booster.backward(loss, boosted.optimizer)
    outputs = boosted.model(**batch)
    boosted.booster.backward(outputs.loss + 1e-3 * outputs.logits.square().mean(), boosted.optimizer)


@pytest.mark.parametrize("mode", ["split_gather", "all_to_all"])
def test_a_penalty_on_a_norm_is_refused_under_sequence_parallelism(mode: str) -> None:
    """Each rank has the whole weight but its own tokens: their sum would count the penalty once a rank."""
    options = (("enable_sequence_parallelism", True), ("sequence_parallelism_mode", mode))
    case = Case(recipe=Recipe(family="llama", head="causal_lm"), layout="tp2", options=options)
    run_on_ranks(2, _penalise, case)


# ----- losses of the script's own -----


def _sum_and_count(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


def _own_losses(case: Case) -> None:
    """Shares of five rows and four, of three rows and none; ten labels less on one replica than a row has elsewhere."""
    boosted, plain, whole = boost(case), case.recipe.model(), case.recipe.batch(0)
    model, optimizer, backward = boosted.model, boosted.optimizer, boosted.booster.backward
    labels = whole["labels"].clone()
    labels[0, 2:], labels[2, :4] = -100, -100
    whole = whole | {"labels": labels}

    def mean_of_rows(net: nn.Module, batch: Batch) -> Tensor:
        return net(**inputs_of(case.recipe.zoo_head, batch)).logits.tanh().flatten(1).mean(1).square().mean()

    def of_model(net: nn.Module, batch: Batch) -> Tensor:
        loss = net(**batch).loss if net is model else loss_of(net, case.recipe.zoo_head, batch)
        return loss + 3.0 * mean_of_rows(net, batch)

    def of_labels(batch: Batch) -> tuple[Tensor, int]:
        outputs = model(**batch)
        total, count = _sum_and_count(outputs, batch)
        return total + 2.0 * count * outputs.loss, int(count)

    def expected(batch: Batch) -> Tensor:
        total, count = _sum_and_count(plain(**batch), batch)
        return total / count + 2.0 * loss_of(plain, case.recipe.zoo_head, batch)

    for rows in (9, 3):
        batch = {key: value[:rows] for key, value in whole.items()}
        share = {key: value[:3] if boosted.plugin.dp_rank == 0 else value[3:] for key, value in batch.items()}
        share = boosted.share(batch) if rows == 9 or boosted.plugin.dp_size == 1 else share
        first, rest = ({key: value[part] for key, value in share.items()} for part in (slice(0, 1), slice(1, None)))

        def accumulated(_: Batch, first: Batch = first, rest: Batch = rest) -> tuple[Tensor, Tensor]:
            with boosted.booster.no_sync(model, optimizer):
                backward(_sum_and_count(model(**first), first), optimizer)
            return _sum_and_count(model(**rest), rest)

        for own, of_plain in (
            (lambda batch: mean_of_rows(model, batch), lambda batch: mean_of_rows(plain, batch)),
            (
                lambda batch: model(**batch).loss + 3.0 * mean_of_rows(model, batch),
                lambda batch: of_model(plain, batch),
            ),
            (of_labels, expected),
            (accumulated, lambda batch: torch.div(*_sum_and_count(plain(**batch), batch))),
        ):
            plain.zero_grad()
            backward(own(share), optimizer)
            of_plain(batch).backward()
            _check_gradients(boosted, plain)
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("layout", "zero_stage"),
    [
        pytest.param(layout, stage, marks=[] if (layout, stage) == ("dp2", 1) else pytest.mark.slow)
        for layout in ("dp2", "tp2dp2", "pp2dp2", "cp2dp2")
        for stage in (0, 1, 2, 3)
    ],
)
def test_losses_of_the_scripts_own(layout: str, zero_stage: int) -> None:
    case = Case(recipe=Recipe(family="gpt2", head="lm_head"), layout=layout, zero_stage=zero_stage)
    run_on_ranks(LAYOUTS[layout].world_size, _own_losses, case)


@pytest.mark.parametrize(
    ("layout", "zero_stage"),
    [
        ("dp2", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("dp2", 2), ("dp2", 3), ("dp4", 1), ("tp2dp2", 0), ("pp2dp2", 1), ("cp2", 1), ("cp2dp2", 1)]
        ),
    ],
)
def test_losses_of_the_scripts_own_of_experts_on_other_ranks(layout: str, zero_stage: int) -> None:
    """A rank's experts have tokens of all replicas, whose own losses have other weights."""
    recipe = Recipe(family="mixtral", head="causal_lm", config=(("experts_implementation", "eager"),))
    case = Case(recipe=recipe, layout=layout, zero_stage=zero_stage, options=(("ep_size", 2),))
    run_on_ranks(LAYOUTS[layout].world_size, _own_losses, case)


def _misuse(case: Case) -> list[str]:
    """What is refused on all ranks, and the one line about labels."""
    boosted = boost(case)
    model, optimizer, backward = boosted.model, boosted.optimizer, boosted.booster.backward
    whole = case.recipe.batch(0)
    whole["labels"][0, 2:] = -100
    share = boosted.share(whole)
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("plugins.hybrid_parallel.guards")
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    for _ in range(2):
        backward(torch.div(*_sum_and_count(model(**share), share)), optimizer)
        optimizer.zero_grad()
    logger.removeHandler(handler)
    total, count = _sum_and_count(model(**share), share)
    for wrong in ((total, None), (total, count, count), (total[None], count), "loss"):
        with pytest.raises(ConfigurationError, match=r"booster\.backward got"):
            backward(wrong, optimizer)
    with boosted.booster.no_sync(model, optimizer):
        backward((total, count), optimizer)
    with pytest.raises(ConfigurationError, match="within one no_sync"):
        backward(model(**share).loss, optimizer)
    optimizer.zero_grad()
    loss = torch.div(*_sum_and_count(model(**share), share))
    with pytest.raises(ConfigurationError, match="give the same form of the loss on all replicas"):
        backward((loss, 1) if boosted.plugin.dp_rank else loss, optimizer)
    return [record.getMessage() for record in records]


def test_misuse_of_a_loss_is_refused_and_unequal_labels_are_told_once() -> None:
    case = Case(recipe=Recipe(family="gpt2", head="lm_head"), layout="dp2")
    said, nothing = run_on_ranks(2, _misuse, case)
    assert len(said) == 1 and "booster.backward((sum, count), optimizer)" in said[0] and nothing == []


# ----- inference mode -----


def _infer_then_train(case: Case) -> None:
    """Nothing that an evaluation in `torch.inference_mode()` has made is there in training."""
    boosted, plain, batch = boost(case), case.recipe.model().eval(), case.recipe.batch(0)
    share = boosted.share(batch)
    boosted.model.eval()
    with torch.inference_mode():
        found = boosted.model(**share).loss
        evaluated = boosted.booster.execute_pipeline(iter([share]), boosted.model).loss
    with torch.no_grad():
        expected = loss_of(plain, case.recipe.zoo_head, batch)
    torch.testing.assert_close(torch.stack([found.double(), evaluated]), expected.expand(2), **EXACT)
    boosted.model.train()
    _train_on(case, [batch])


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("tp2", {}),
        pytest.param("pp2", {"gradient_checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param("dp2", {"zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param("cp2", {}, marks=pytest.mark.slow),
        pytest.param("tp2", {"enable_sequence_parallelism": True}, marks=pytest.mark.slow),
    ],
)
def test_inference_mode(layout: str, options: dict[str, Any]) -> None:
    recipe = Recipe(family="llama", head="causal_lm")
    case = Case(recipe=recipe, layout=layout, options=tuple(options.items()))
    run_on_ranks(LAYOUTS[layout].world_size, _infer_then_train, case)


# ----- accumulation -----


def _accumulate(case: Case) -> None:
    """Two batches of half a weight each, the first without communication; against the mean of both losses."""
    boosted, plain = boost(case), case.recipe.model()
    for step in range(2):
        (loss_of(plain, case.recipe.zoo_head, case.recipe.batch(step)) / 2).backward()
    shares = [boosted.share(case.recipe.batch(step)) for step in range(2)]
    with boosted.booster.no_sync(boosted.model, boosted.optimizer):
        boosted.booster.backward(boosted.model(**shares[0]).loss / 2, boosted.optimizer)
    boosted.booster.backward(boosted.model(**shares[1]).loss / 2, boosted.optimizer)
    _check_gradients(boosted, plain)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["dp2", "tp2dp2"])
def test_no_sync_accumulates(layout: str, zero_stage: int) -> None:
    case = Case(recipe=Recipe(family="bert", head="masked_lm"), layout=layout, zero_stage=zero_stage)
    run_on_ranks(LAYOUTS[layout].world_size, _accumulate, case)


def _accumulate_in_pipeline(case: Case) -> None:
    """Two calls before one step add up, like two backward passes in plain torch."""
    boosted, plain = boost(case), case.recipe.model()
    for step in range(2):
        loss_of(plain, case.recipe.zoo_head, case.recipe.batch(step)).backward()
        boosted.pipeline_backward(boosted.share(case.recipe.batch(step)))
    _check_gradients(boosted, plain)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["dp2", "pp2dp2"])
def test_gradients_of_two_calls_add_up(layout: str, zero_stage: int) -> None:
    case = Case(recipe=Recipe(family="gpt2", head="lm_head"), layout=layout, zero_stage=zero_stage)
    run_on_ranks(LAYOUTS[layout].world_size, _accumulate_in_pipeline, case)


# ----- training, evaluation on a short batch, training -----


def _train_evaluate_train(case: Case, rows: int) -> None:
    boosted, plain, head = boost(case), case.recipe.model(), case.recipe.zoo_head
    optimizer, scheduler = case.recipe.training(plain)
    for step in range(3):
        batch = case.recipe.batch(step)
        found = boosted.pipeline_backward(boosted.share(batch))
        boosted.finish_step()
        loss = loss_of(plain, head, batch)
        loss.backward()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
        torch.testing.assert_close(found, loss.detach(), **EXACT)
        short = {key: value[:rows] for key, value in case.recipe.batch(step + 1).items()}
        _check_evaluation(boosted, plain, case, short)


def _check_evaluation(boosted: Boosted, plain: nn.Module, case: Case, batch: Batch) -> None:
    """Loss and outputs of an evaluation, on every rank."""
    boosted.model.eval()
    plain.eval()
    share = boosted.share(batch)
    result = boosted.booster.execute_pipeline(iter([share]), boosted.model, return_outputs=True)
    with torch.no_grad():
        torch.testing.assert_close(result.loss, loss_of(plain, case.recipe.zoo_head, batch), **EXACT)
        if len(share["input_ids"]) == 0:
            assert result.outputs is None
        else:
            logits = plain(**inputs_of(case.recipe.zoo_head, batch)).logits
            expected = boosted.share(batch | {"logits": logits})["logits"]
            torch.testing.assert_close(result.outputs.logits, expected, **EXACT)
            assert not result.outputs.logits.requires_grad
    boosted.model.train()
    plain.train()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("family", "head", "layout"),
    [
        ("bert", "masked_lm", "tp2pp2"),
        ("gpt2", "sequence", "pp2dp2"),
        ("llama", "causal_lm", "tp2dp2"),
        ("bert", "sequence", "pp4"),
    ],
)
def test_train_evaluate_train(family: str, head: str, layout: str, rows: int) -> None:
    """One row over two data-parallel ranks leaves one of them without any."""
    case = Case(recipe=Recipe(family=family, head=head, optimizer="momentum"), layout=layout)
    run_on_ranks(LAYOUTS[layout].world_size, _train_evaluate_train, case, rows)


# ----- batches that are unlike each other -----


def _train_on(case: Case, batches: list[Batch]) -> None:
    """Gradients of one step for each batch, against plain training, without an optimizer step in between."""
    boosted, plain = boost(case), case.recipe.model()
    for batch in batches:
        plain.zero_grad()
        loss = loss_of(plain, case.recipe.zoo_head, batch)
        loss.backward()
        torch.testing.assert_close(boosted.pipeline_backward(boosted.share(batch)), loss.detach(), **EXACT)
        _check_gradients(boosted, plain)
        boosted.optimizer.zero_grad()


def _without_labels_in(batch: Batch, rows: slice) -> Batch:
    labels = batch["labels"].clone()
    labels[rows] = -100
    return batch | {"labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2pp2", "pp2dp2"])
@pytest.mark.parametrize(("family", "head"), [("bert", "masked_lm"), ("llama", "sequence"), ("gpt2", "lm_head")])
def test_ignored_labels_of_a_micro_batch_and_of_a_replica(family: str, head: str, layout: str) -> None:
    case = Case(recipe=Recipe(family=family, head=head), layout=layout)
    full = case.recipe.batch(0)
    # The first micro-batch, the share of the second data-parallel rank, all but one sample.
    batches = [_without_labels_in(full, rows) for rows in (slice(0, 3), slice(4, 9), slice(1, 9))]
    run_on_ranks(LAYOUTS[layout].world_size, _train_on, case, batches)


def _train_without_any_label(case: Case) -> None:
    boosted = boost(case)
    before = {name: param.detach().clone() for name, param in boosted.model.unwrap().named_parameters()}
    batch = _without_labels_in(case.recipe.batch(0), slice(None))
    loss = boosted.pipeline_backward(boosted.share(batch))
    assert loss.item() == 0.0, "transformers says NaN here; the mean over nothing is taken as 0"
    for name, gradient in boosted.optimizer.full_gradients().items():
        assert torch.count_nonzero(gradient) == 0, f"{name} has a gradient without any label (or NaN)"
    boosted.finish_step()
    for name, param in boosted.model.unwrap().named_parameters():
        assert torch.equal(param, before[name]), f"{name} moved without any label"
    assert boosted.pipeline_backward(boosted.share(case.recipe.batch(1))).item() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head", "layout", "max_norm"),
    [
        ("bert", "masked_lm", "tp2pp2", None),
        ("llama", "causal_lm", "tp2dp2", 0.1),
        ("gpt2", "sequence", "pp2dp2", 0.1),
        ("bert", "token", "dp2", None),
    ],
)
def test_no_label_at_all(family: str, head: str, layout: str, max_norm: float | None) -> None:
    case = Case(recipe=Recipe(family=family, head=head, max_norm=max_norm), layout=layout)
    run_on_ranks(LAYOUTS[layout].world_size, _train_without_any_label, case)


def _train_on_shares_of_other_lengths(case: Case) -> None:
    """Every data-parallel rank pads to its own longest sample."""
    boosted, plain = boost(case), case.recipe.model()
    for step in range(2):
        batch = _padded_right(case.recipe.batch(step))
        plain.zero_grad()
        loss = loss_of(plain, case.recipe.zoo_head, batch)
        loss.backward()
        share = boosted.share(batch)
        longest = int(share["attention_mask"].sum(-1).max())
        share = {key: value[:, :longest] for key, value in share.items()}
        torch.testing.assert_close(boosted.pipeline_backward(share), loss.detach(), **EXACT)
        _check_gradients(boosted, plain)
        boosted.optimizer.zero_grad()


def _padded_right(batch: Batch) -> Batch:
    """Samples that get shorter from first to last, all padded on the right."""
    rows, length = batch["attention_mask"].shape
    kept = torch.linspace(length, 3, rows).long()
    mask = (torch.arange(length) < kept[:, None]).long()
    return {
        **batch,
        "input_ids": batch["input_ids"].clamp(min=1) * mask,
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("bert", "pp2dp2"), ("llama", "tp2dp2"), ("gpt2", "dp4")])
def test_replicas_with_other_sequence_lengths(family: str, layout: str) -> None:
    case = Case(recipe=Recipe(family=family, head=MAIN[family]), layout=layout)
    run_on_ranks(LAYOUTS[layout].world_size, _train_on_shares_of_other_lengths, case)


# ----- whole epochs from a loader -----


def _train_an_epoch(case: Case, rows: int) -> None:
    """`len(loader)` steps over all samples, each exactly once; plain training takes the same global batches."""
    boosted, plain = boost(case), case.recipe.model()
    optimizer, scheduler = case.recipe.training(plain)
    samples = case.recipe.zoo_family.batch(case.recipe.head, 0, rows)
    dataset = [{key: value[row] for key, value in samples.items()} for row in range(rows)]
    loader = boosted.booster.boost(DataLoader(dataset, batch_size=4))
    global_size = 4 * boosted.plugin.dp_size
    assert len(loader) == -(-rows // global_size)
    batches = iter(loader)
    for step in range(len(loader)):
        found = boosted.booster.execute_pipeline(batches, boosted.model, optimizer=boosted.optimizer).loss
        boosted.finish_step()
        batch = {key: value[step * global_size : (step + 1) * global_size] for key, value in samples.items()}
        loss = loss_of(plain, case.recipe.zoo_head, batch)
        loss.backward()
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
        torch.testing.assert_close(found, loss.detach(), **EXACT)
    assert next(batches, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 19, 17])
@pytest.mark.parametrize("layout", ["pp2dp2", "tp2dp2"])
def test_an_epoch_ends_with_a_full_a_short_and_a_nearly_empty_batch(layout: str, rows: int) -> None:
    case = Case(recipe=Recipe(family="bert", head="sequence", optimizer="momentum"), layout=layout)
    run_on_ranks(LAYOUTS[layout].world_size, _train_an_epoch, case, rows)


def _train_on_embeddings(case: Case) -> None:
    """`inputs_embeds` in the place of `input_ids`; stages behind the first see them too and have to ignore them."""
    size = case.recipe.model().config.hidden_size
    batch = case.recipe.batch(0)
    embeddings = torch.randn(*batch.pop("input_ids").shape, size, generator=torch.Generator().manual_seed(3)).double()
    _train_on(case, [batch | {"inputs_embeds": embeddings}])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2pp2", "pp2dp2"])
@pytest.mark.parametrize("family", MAIN)
def test_embeddings_as_inputs(family: str, layout: str) -> None:
    case = Case(
        recipe=Recipe(family=family, head=MAIN[family], config=(("tie_word_embeddings", False),)), layout=layout
    )
    run_on_ranks(LAYOUTS[layout].world_size, _train_on_embeddings, case)


def _check_gradients(boosted: Boosted, plain: nn.Module) -> None:
    """Routers and norms of mixtures of experts compute in fp32, whatever their weights are."""
    has_experts = boosted.plugin.config.parallel.ep_size > 1
    limits = EXACT | ({"rtol": 1e-4, "atol": 1e-6} if has_experts else {})
    expected = {name: param.grad for name, param in plain.named_parameters(remove_duplicate=False)}
    found: dict[str, Tensor] = boosted.optimizer.full_gradients()
    assert found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **limits, msg=lambda text, name=name: f"{name}: {text}")
