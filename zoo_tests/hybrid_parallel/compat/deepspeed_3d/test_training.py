"""Scripts with a `DeepSpeed3DParallelConfig`: what they may leave out or do in another way, and what is refused.

What breaks here first: a rule or a patch that gets lost where two of them meet in one module.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Model

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import DeepSpeed3DParallelConfig, HybridParallelPlugin, vocab_parallel_logit_helper
from shardformer import TPInfo, record_module_init
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.parity.test_three_d import (
    BATCH,
    CLIP,
    LR,
    SCENARIOS,
    ds_config,
    gpt2_batch,
    gpt2_model,
    masked_loss,
    samples,
    times,
    train_reference,
)
from zoo_tests.parity.test_tp_info import GPT2


def _plugin(layout: tuple[int, int, int] = (1, 1, 1), overrides: Any = None, **options: Any) -> HybridParallelPlugin:
    axes = list(zip(("tensor", "data", "pipeline"), layout, strict=True))
    return HybridParallelPlugin.from_3d_config(DeepSpeed3DParallelConfig(**options), (axes, None), **(overrides or {}))


def _one_batch() -> list[Tensor]:
    return next(iter(DataLoader(samples(), batch_size=BATCH)))


def train_recorded(layout: tuple[int, int, int]) -> list[float]:
    """A base model that was built without values, as the text that describes this does it."""
    plugin = _plugin(layout, {"num_microbatches": 2}, tpinfo=GPT2, batch_fn=gpt2_batch)
    booster = Booster(plugin=plugin)
    with record_module_init():
        model = gpt2_model()
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LR))
    losses = []
    for _ in range(2):
        result = booster.execute_pipeline(iter([_one_batch()]), model, criterion=masked_loss, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
    return losses


@pytest.mark.slow
def test_a_recorded_base_model_is_the_same_on_every_layout() -> None:
    (alone,), (cut, *_) = run_on_ranks(1, train_recorded, (1, 1, 1)), run_on_ranks(4, train_recorded, (2, 1, 2))
    torch.testing.assert_close(torch.tensor(cut), torch.tensor(alone), rtol=1e-9, atol=0)


@distributed(4)
def test_groups_may_stand_in_any_order() -> None:
    """The pipeline varies fastest here: its second stage is on ranks 1 and 3."""
    config = DeepSpeed3DParallelConfig(tpinfo=GPT2, batch_fn=gpt2_batch)
    plugin = HybridParallelPlugin.from_3d_config(config, ([("pipe", 2), ("tensor", 2)], None))
    booster, rank = Booster(plugin=plugin), torch.distributed.get_rank()
    model, optimizer = gpt2_model(), None
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LR))
    assert (plugin.stage_index, plugin.tp_rank, plugin.dp_size) == (rank % 2, rank // 2, 1)
    found = booster.execute_pipeline(iter([_one_batch()]), model, criterion=masked_loss, optimizer=optimizer)
    torch.testing.assert_close(found.loss.item(), train_reference(SCENARIOS["gpt2"])[0][0], rtol=1e-9, atol=0)


class HeadDropout(nn.Dropout):
    """A dropout that knows how many heads there are."""

    heads = 4


class Attention(nn.Module):
    """Query, dropout and output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.query, self.out, self.drop = 4, nn.Linear(8, 8), nn.Linear(8, 8), HeadDropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        assert self.query(x).shape[-1] == 2 * self.heads
        return self.out(self.drop(self.query(x)))


class Layer(nn.Module):
    """An attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


@distributed(2)
def test_a_module_may_be_named_by_several_rules() -> None:
    """Defect 2 of ATorch: the last rule about a module made the ones before it disappear."""
    rules = (
        TPInfo().shard_col("query").shard_row("out").parallel_drop("drop").shrink({"attn": "heads", "drop": "heads"})
    )
    patches = {"attn": times(3.0), "drop": times(5.0), "query": times(7.0)}
    torch.manual_seed(0)
    model = Booster(plugin=_plugin((2, 1, 1), tpinfo=rules, custom_patcher=patches)).boost(Layer())
    attention = model.unwrap().attn
    kinds = [type(attention.get_submodule(name)).__name__ for name in ("query", "out", "drop")]
    assert kinds == ["ColumnParallelLinear", "RowParallelLinear", "ParallelDropout"]
    assert attention.heads == 2
    x = torch.ones(1, 8)
    torch.manual_seed(0)
    native = Attention().eval()
    model.eval()
    expected = 3 * native.out(5 * 7 * native.query(x))
    torch.testing.assert_close(model(x), expected)
    model.train()
    kept = torch.tensor([attention.drop(torch.ones(64)).ne(0).sum(), attention.drop(torch.ones(64)).max() == 10])
    assert 0 < kept[0] < 64 and kept[1]


def forgetful(logits: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels[0].flatten() % logits.shape[-1])


@distributed(2)
def test_a_softmax_over_a_part_of_the_vocabulary_is_refused() -> None:
    booster = Booster(plugin=_plugin((2, 1, 1), tpinfo=GPT2, batch_fn=gpt2_batch))
    model = booster.boost(gpt2_model())
    with pytest.raises(
        ConfigurationError, match="64 of 101 columns of the logits and did not call vocab_parallel_cross"
    ):
        booster.execute_pipeline(iter([_one_batch()]), model, criterion=forgetful)
    # A mapping is a batch like any other, and so are the logits of its loss.
    tokens = _one_batch()[0]
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, :-1]}
    plain = Booster(plugin=_plugin((2, 1, 1), tpinfo=GPT2))
    whole = plain.execute_pipeline(
        iter([batch]),
        plain.boost(gpt2_model()),
        criterion=lambda outputs, labels: forgetful(outputs.logits, (labels["labels"], None)),
    )
    model = gpt2_model()
    logits = vocab_parallel_logit_helper(model(tokens[:, :-1])[0], model.wte)
    torch.testing.assert_close(whole.loss, forgetful(logits, (tokens[:, :-1], None)))


@distributed(1)
def test_masks_are_not_cast_and_a_bare_base_model_stays_bare_where_it_is_asked_for() -> None:
    seen = {}

    def look(hidden: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        seen.update(hidden=hidden, keep=labels[1])
        return hidden.float().mean()

    booster = Booster(plugin=_plugin(overrides={"precision": "bf16"}, tie_first=False, batch_fn=gpt2_batch))
    model = booster.boost(gpt2_model())
    booster.execute_pipeline(iter([_one_batch()]), model, criterion=look)
    assert type(model.unwrap()) is GPT2Model and seen["hidden"].shape[-1] == 32
    assert seen["hidden"].dtype == torch.bfloat16 and seen["keep"].dtype == torch.float64


@distributed(1)
def test_what_boost_is_given_counts_more_thands_config() -> None:
    plugin = _plugin(batch_fn=gpt2_batch, ds_config=ds_config(clips=True))
    model = gpt2_model()
    given = torch.optim.AdamW(model.parameters(), lr=LR)
    _, optimizer = Booster(plugin=plugin).boost(model, given)
    assert optimizer.unwrap() is given and plugin.optimizer is None
    assert plugin.lr_scheduler.get_last_lr() == [pytest.approx(0.1)] and plugin.config.zero.max_norm == CLIP


@distributed(1)
def test_batches_that_do_not_fit_are_refused() -> None:
    def refusal(batch: Any, criterion: Any = masked_loss) -> str:
        with pytest.raises(ConfigurationError) as error:
            booster.execute_pipeline(iter([batch]), model, criterion=criterion)
        return str(error.value)

    booster = Booster(plugin=_plugin(ds_config={"train_batch_size": 6, "gradient_accumulation_steps": 3}))
    model = booster.boost(gpt2_model())
    tokens = _one_batch()[0]
    assert refusal((tokens, tokens, tokens)).startswith(
        "a batch is 3 elements; let batch_fn return ((inputs...), (labels"
    )
    assert refusal(tokens).startswith("a batch is a Tensor; let batch_fn return")
    assert "a batch has 12 inputs, and the model's forward takes 9 by position (input_ids," in refusal(
        ((tokens,) * 12, (tokens,))
    )
    assert "says nothing about the loss; give execute_pipeline a criterion" in refusal(((tokens,), (tokens,)), None)
    with pytest.raises(
        ConfigurationError, match=r"batch_size=4 of the loader is not .* = 2 \* 3, which one step takes"
    ):
        booster.boost(DataLoader(samples(), batch_size=4))


@distributed(1)
def test_a_refused_model_is_left_as_it_was() -> None:
    model = gpt2_model()
    config = model.config
    with pytest.raises(
        ConfigurationError, match="the patch of transformer.h.0 returned a NoneType; return the new forward"
    ):
        bad = _plugin(custom_patcher={"ln_f": times(2.0), "h.0": lambda forward, module: None})
        Booster(plugin=bad).boost(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module.config is not config for module in model.modules() if hasattr(module, "config"))
