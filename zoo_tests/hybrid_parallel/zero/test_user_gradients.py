"""Gradients and weights that a script reads or changes by hand, against the same script in plain torch.

What breaks here first: what looks like a parameter and is a view of a bucket. Look in
`plugins/hybrid_parallel/zero/bucket.py` and `bucket_layout.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.reference import loss_of
from zoo_tests.harness.toy import Pair, global_batch, mean_square, share_of, toy
from zoo_tests.harness.train_sharded import boost

Change = Callable[[nn.Module], None]


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


# ----- gradients -----


def _halve(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def _mask(model: nn.Module) -> None:
    model.first.weight.grad[3:5] = 0.0
    model.second.weight.grad = model.second.weight.grad * 2
    model.first.bias.grad = None


CHANGES: dict[str, Change] = {
    "clip_grad_norm_": lambda model: clip_grad_norm_(model.parameters(), 0.05),
    "clip_grad_value_": lambda model: clip_grad_value_(model.parameters(), 0.01),
    "loop": _halve,
    "mask": _mask,
}


@distributed(2)
def test_torchs_own_tools_where_a_rank_has_all_of_the_gradients() -> None:
    for change in CHANGES.values():
        pair = Pair.make(_momentum, zero_stage=0)
        for step in range(3):
            pair.backward(step)
            pair.check_gradients()
            for model in (pair.model, pair.plain):
                change(model.unwrap() if model is pair.model else model)
            pair.check_gradients()
            pair.step()
            pair.check_parameters()


@distributed(2)
def test_a_gradient_that_was_kept_is_not_overwritten() -> None:
    """Two losses' gradients, without a copy, as scripts do that weigh them against each other."""
    pair = Pair.make(_momentum, zero_stage=0)
    kept: dict[nn.Module, list[list[Tensor | None]]] = {pair.model.unwrap(): [], pair.plain: []}
    for step in range(3):
        pair.backward(step)
        for model, grads in kept.items():
            grads.append([param.grad for param in model.parameters()])
            model.zero_grad()
    for found, expected in zip(*kept.values(), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13) if one is not None else None


@distributed(2)
def test_a_gradient_in_a_shard_is_refused_not_none() -> None:
    pair = Pair.make(_momentum)
    assert clip_grad_norm_(pair.model.parameters(), 1.0) == 0.0, "before any backward pass there is no gradient"
    pair.backward(0)
    message = (
        r"param.grad cannot be read or set under zero_stage=1 with 2 replicas.* use HybridParallelPlugin\(max_norm"
    )
    for change in (lambda: clip_grad_norm_(pair.model.parameters(), 1.0), lambda: _halve(pair.model.unwrap())):
        with pytest.raises(ConfigurationError, match=message):
            change()
    with pytest.raises(ConfigurationError, match=message):
        pair.model.unwrap().first.weight.grad = torch.zeros(11, 5)
    assert pair.model.unwrap().spare.weight.grad is None
    pair.step()
    pair.check_parameters()
    assert clip_grad_norm_(pair.model.parameters(), 1.0) == 0.0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@distributed(2)
def test_our_own_tools_under_any_layout(zero_stage: int) -> None:
    pair = Pair.make(_momentum, zero_stage=zero_stage)
    for step in range(3):
        pair.backward(step)
        found, expected = pair.model.clip_grad_norm_(0.05), clip_grad_norm_(pair.plain.parameters(), 0.05)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
        pair.check_gradients()
        pair.optimizer.clip_grad_value_(0.01)
        clip_grad_value_(pair.plain.parameters(), 0.01)
        pair.step()
        pair.check_parameters()


@distributed(2)
def test_parameters_in_no_optimizer_are_named_once() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("plugins.hybrid_parallel.setup.input_checks")
    logger.addHandler(handler)
    try:
        _boost_head(freezes=True)
        assert not records
        _boost_head(freezes=False)
    finally:
        logger.removeHandler(handler)
    assert len(records) == (1 if dist.get_rank() == 0 else 0)
    expected = (
        "first.weight (one of 2) takes gradients and is in no optimizer: max_norm and clip_grad_norm_ do not count"
    )
    assert all(expected in record.getMessage() for record in records)


def _boost_head(freezes: bool) -> None:
    """Train `second`, and leave `first` out."""
    model = toy()
    model.first.requires_grad_(not freezes)
    optimizer = torch.optim.SGD([*model.second.parameters(), *model.spare.parameters()], lr=0.1)
    Booster(plugin=HybridParallelPlugin(max_norm=0.1)).boost(model, optimizer)


def _clip(case: Case) -> None:
    boosted, plain = boost(case), case.recipe.model()
    batch = case.recipe.batch(0)
    loss_of(plain, case.recipe.zoo_head, batch).backward()
    boosted.pipeline_backward(boosted.share(batch))
    with pytest.raises(ConfigurationError, match="cannot be read or set under tp_size=2 and pp_size=2, where no rank"):
        clip_grad_norm_(boosted.model.parameters(), 0.05)
    found, expected = boosted.model.clip_grad_norm_(0.05), clip_grad_norm_(plain.parameters(), 0.05)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)
    gradients = {name: param.grad for name, param in plain.named_parameters(remove_duplicate=False)}
    for name, gradient in boosted.optimizer.full_gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_our_own_clipping_over_shards_and_stages() -> None:
    run_on_ranks(4, _clip, Case(recipe=Recipe(family="bert", head="masked_lm"), layout="tp2pp2"))


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_zero_grad_of_model_and_optimizer(zero_stage: int) -> None:
    """None leaves a parameter alone, zeros move it by momentum and decay; forgotten, gradients add up."""
    for set_to_none in (True, False):
        for of_model in (True, False):
            pair = Pair.make(_momentum, zero_stage=zero_stage)
            for step in range(4):
                pair.backward(step)
                for each in (pair.optimizer, pair.plain_optimizer):
                    each.step()
                for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
                    if step != 1:
                        (model if of_model else optimizer).zero_grad(set_to_none=set_to_none)
                    if step == 2:
                        optimizer.step()
            pair.check_parameters()


@distributed(2)
def test_gradients_from_before_boost_are_refused() -> None:
    model = toy()
    batch = global_batch(0)
    mean_square(model(batch["x"]), batch).backward()
    with pytest.raises(ConfigurationError, match=r"first.weight has a gradient from before boost\(\); call"):
        Booster(plugin=HybridParallelPlugin()).boost(model, _momentum(model))


# ----- weights -----


def _scale(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _from_average(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.copy_(param.data * 0.5 + 0.25)


def _replace(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.flip(0)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


WEIGHTS: list[Change] = [_scale, _from_average, _replace, _load]


@pytest.mark.parametrize("zero_stage", [0, 1])
@distributed(2)
def test_changed_weights_stay_changed(zero_stage: int) -> None:
    pair = Pair.make(_momentum, zero_stage=zero_stage)
    for step, change in enumerate([*WEIGHTS, None]):
        pair.backward(step)
        pair.step()
        pair.check_parameters()
        for model in (pair.model.unwrap(), pair.plain) if change else ():
            change(model)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_changed_weights_stay_changed_under_master_weights(zero_stage: int) -> None:
    run_on_ranks(2, check_changed_weights, zero_stage)


def check_changed_weights(zero_stage: int) -> None:
    """Only those that were changed: the others keep the bits that a 16-bit weight has not."""
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", zero_stage=zero_stage))
    model = toy(torch.float32)
    model, optimizer, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-5), mean_square)
    share = share_of(global_batch(0, rows=6, dtype=torch.float32))

    def step() -> dict[str, Tensor]:
        booster.execute_pipeline(iter([share]), model, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        pieces = [(bucket.params[piece.index], piece) for bucket in optimizer.buckets for piece in bucket.pieces]
        return {f"{optimizer.names[param]}/{p.start}": p.parameter.detach().clone() for param, p in pieces}

    for change in WEIGHTS:
        before = step()
        inside = model.unwrap()
        kept = inside.second.weight.detach().clone()
        change(inside)
        with torch.no_grad():
            inside.second.weight.copy_(kept)
        expected = {name: param.detach().float().clone() for name, param in inside.named_parameters()}
        after = step()
        _check_tiny_step(inside, expected)
        moved = [(after[name] - before[name]).abs().max() for name in after if name.startswith("second")]
        assert all(0 < each < 1e-3 for each in moved), "its master has taken small steps, and is not rounded"


@distributed(2)
def test_a_state_dict_that_goes_back_leaves_the_master_weights() -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16"))
    model = toy(torch.float32)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-5))
    pieces = [piece.parameter for bucket in optimizer.buckets for piece in bucket.pieces]
    before = [piece.detach().clone() for piece in pieces]
    model.load_state_dict(model.state_dict())
    optimizer.take_changed_weights()
    assert all(torch.equal(old, new) for old, new in zip(before, pieces, strict=True))


@distributed(2)
def test_a_changed_row_leaves_the_masters_of_other_rows() -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16"))
    model = toy(torch.float32)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-5))
    pieces = [piece for bucket in optimizer.buckets for piece in bucket.pieces]
    before = [piece.parameter.detach().clone() for piece in pieces]
    with torch.no_grad():
        for param in model.unwrap().parameters():
            param[:1] = 3.0
    optimizer.take_changed_weights()
    for piece, old in zip(pieces, before, strict=True):
        changed = piece.parameter == 3.0
        assert torch.equal(piece.parameter[~changed], old[~changed]), "full values, not those of bf16"
    kept = torch.tensor(float(sum((piece.parameter != 3.0).sum() for piece in pieces)))
    dist.all_reduce(kept)
    first_rows = sum(param[:1].numel() for param in model.unwrap().parameters())
    assert kept == sum(param.numel() for param in model.unwrap().parameters()) - first_rows


@distributed(2)
def test_a_tied_weight_is_listed_by_one_name_on_all_stages() -> None:
    case = Case(recipe=Recipe(family="bert", head="masked_lm"), layout="pp2")
    model = boost(case).model
    embedding = "bert.embeddings.word_embeddings.weight"
    named = dict(model.named_parameters())
    assert embedding in named
    held = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert (embedding in held) == (dist.get_rank() == 0), "the last stage holds it as its head's"
    with torch.no_grad():
        named[embedding].mul_(0.5)  # as a script does that chooses by name, on every rank
    model.load_state_dict({embedding: named[embedding] * 2}, strict=False)
    both = torch.stack([named[embedding].sum(), -named[embedding].sum()])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    assert both[0] == -both[1], "the stages hold the same"
    embeddings = case.recipe.model().get_input_embeddings().weight
    torch.testing.assert_close(named[embedding].sum(), embeddings.sum())


def _check_tiny_step(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach().float(), expected[name], rtol=1e-2, atol=1e-3)


@distributed(2)
def test_weights_of_another_dtype_are_refused() -> None:
    pair: Any = Pair.make(_momentum)
    pair.backward(0)
    pair.model.unwrap().first.weight.data = pair.model.unwrap().first.weight.data.float()
    with pytest.raises(ConfigurationError, match=r"became a \(11, 5\) of torch.float32 after boost\(\)"):
        pair.optimizer.step()
