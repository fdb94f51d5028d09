"""What a user says of a model's loss counts: keywords in the batch, a function, a forward, a hook of his own.

Each is trained by both loops on several layouts, beside the same call of the plain model on the whole global batch.
What breaks here first: a loss that is taken for the head's. Look in `shardformer/loss/heads.py` and
`plugins/hybrid_parallel/loss/choice.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTMAEConfig, ViTMAEForPreTraining
from transformers.modeling_outputs import CausalLMOutput

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import LAYOUTS, share_of
from zoo_tests.harness.ranks import distributed, run_on_ranks

Batch = dict[str, Any]
_PlainLlama = LlamaForCausalLM


class LlamaForCausalLM(_PlainLlama):  # noqa: F811 - the name of the class that it derives from is the question
    """Labels that are already those of the next token."""

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        if labels is not None:
            output.loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return output


def _smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.3)


def _set_function(model: nn.Module) -> None:
    model.loss_function = _smoothed


def _set_forward(model: nn.Module) -> None:
    native = model.forward

    def forward(self: nn.Module, **inputs: Any) -> Any:
        output = native(**inputs)
        output.loss = output.loss * 2.5
        return output

    model.forward = MethodType(forward, model)


def _set_hook(model: nn.Module) -> None:
    def penalise(_: nn.Module, __: tuple, output: Any) -> Any:
        output.loss = output.loss + output.logits.square().mean()
        return output

    model.register_forward_hook(penalise)


def _fuse_head(model: nn.Module) -> None:
    """Take the loss of a few tokens at a time from the weight of the head, as fused losses do."""

    def forward(self: nn.Module, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Any:
        hidden = self.model(input_ids)[0][:, :-1].flatten(0, 1)
        chunks = zip(hidden.split(5), labels[:, 1:].flatten().split(5), strict=True)
        total = sum(F.cross_entropy(part @ self.lm_head.weight.T, of, reduction="sum") for part, of in chunks)
        items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(total / items)

    model.forward = MethodType(forward, model)


def _nothing(model: nn.Module) -> None: ...


# What is said -> (the class, what is done to the model, what the batch has besides)
_SAID: dict[str, tuple[type, Callable[[nn.Module], None], Batch]] = {
    "num_items_in_batch": (_PlainLlama, _nothing, {"num_items_in_batch": torch.tensor(23.0)}),
    "ignore_index": (_PlainLlama, _nothing, {"ignore_index": 3}),
    "shift_labels": (
        _PlainLlama,
        _nothing,
        {"shift_labels": torch.randint(0, 37, (6, 7), generator=torch.Generator().manual_seed(1))},
    ),
    "loss_function": (_PlainLlama, _set_function, {}),
    "forward": (_PlainLlama, _set_forward, {}),
    "hook": (_PlainLlama, _set_hook, {}),
    "class of the same name": (LlamaForCausalLM, _nothing, {}),
}


_FUSED = "fused loss"


def _case(said: str) -> tuple[nn.Module, Batch]:
    cls, change, extra = _SAID.get(said, (_PlainLlama, _fuse_head, {"num_items_in_batch": torch.tensor(23.0)}))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = cls(config).double()
    change(model)
    ids = torch.randint(4, 37, (6, 7), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    if said in ("num_items_in_batch", "ignore_index", _FUSED):
        labels[1, 3:] = labels[4, :2] = extra.get("ignore_index", -100)
    return model, {"input_ids": ids, "labels": labels, **extra}


def _differences(layout: str, said: str, ordinary: bool) -> dict[str, float]:
    """Of the loss and each gradient, to those of the plain model on the whole batch."""
    plain, batch = _case(said)
    expected = plain(**batch).loss
    expected.backward()
    sizes = LAYOUTS[layout]
    # Ordinary loops have one part a replica.
    plugin = HybridParallelPlugin(tp_size=sizes.tp_size, pp_size=sizes.pp_size, num_microbatches=1 if ordinary else 3)
    booster, model = Booster(plugin=plugin), _case(said)[0]
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = share_of(batch, plugin.dp_rank, plugin.dp_size)
    if ordinary:
        found = model(**share).loss
        booster.backward(found, optimizer)
    else:
        found = booster.execute_pipeline(iter([share]), model, optimizer=optimizer).loss
    gradients = optimizer.full_gradients()
    differences = {
        name: (gradient - plain.get_parameter(name).grad).abs().max().item() for name, gradient in gradients.items()
    }
    return {**differences, "loss": abs(found.item() - expected.item())}


def _all_differences(layout: str) -> dict[str, dict[str, float]]:
    loops = (False, True) if LAYOUTS[layout].pp_size == 1 else (False,)
    return {
        f"{said}, {'ordinary' if ordinary else 'pipeline'}": _differences(layout, said, ordinary)
        for said in _SAID
        for ordinary in loops
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "tp2dp2", "tp2pp2", *(pytest.param("pp2dp2", marks=pytest.mark.slow),)])
def test_what_is_said_of_a_loss_counts(layout: str) -> None:
    for report in run_on_ranks(LAYOUTS[layout].world_size, _all_differences, layout):
        for said, differences in report.items():
            wrong = {name: value for name, value in differences.items() if not value < 2e-6}
            assert not wrong, f"{said}: {wrong}"


def _boosted(said: str, **options: Any) -> tuple[Booster, Any, Any, Batch]:
    model, batch = _case(said)
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer, share_of(batch, booster.plugin.dp_rank, booster.plugin.dp_size)


@distributed(2)
def test_what_cannot_be_put_together_is_refused() -> None:
    booster, model, optimizer, share = _boosted("loss_function", num_microbatches=1)
    share["labels"][0, booster.plugin.dp_rank :] = -100
    refusals = {r"labels a sample; pass a criterion that returns \(sum, count\)": share}
    refusals["num_items_in_batch says that it is a sum"] = {**share, "num_items_in_batch": 4}
    for message, batch in refusals.items():
        with pytest.raises(ConfigurationError, match=message):
            booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        with pytest.raises(ConfigurationError, match=message):
            model(**batch)

    booster, model, optimizer, share = _boosted("num_items_in_batch", num_microbatches=1)
    for counted in ((share["labels"] != -100).sum(), 20 + booster.plugin.dp_rank):
        share["num_items_in_batch"] = counted
        with pytest.raises(ConfigurationError, match="divides the sum over all dp_size=2 replicas"):
            booster.execute_pipeline(iter([share]), model, optimizer=optimizer)


@distributed(2)
def test_a_forward_that_divides_by_the_number_of_items_has_a_share() -> None:
    """Of the loss, where replicas have other numbers of labels; what is no sum, or added to one, counts for each."""
    wrong = {name: each for name, each in _differences("single", _FUSED, ordinary=True).items() if not each < 2e-6}
    assert not wrong, wrong
    _, model, _, share = _boosted(_FUSED)
    fused, inside = model.unwrap().forward, model.unwrap()

    def penalised(self: nn.Module, **inputs: Any) -> Any:
        return CausalLMOutput(fused(**inputs).loss + self.lm_head.weight.square().mean())

    def of_mean(self: nn.Module, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Any:
        logits = self.lm_head(self.model(input_ids)[0]).flatten(0, 1)
        return CausalLMOutput(F.cross_entropy(logits, labels.flatten()) / num_items_in_batch)

    def of_rows(self: nn.Module, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Any:
        return CausalLMOutput(self.lm_head(self.model(input_ids)[0]).square().mean())  # does not read the number

    for forward in (penalised, of_mean):
        inside.forward = MethodType(forward, inside)
        with pytest.raises(ConfigurationError, match="num_items_in_batch says that it is a sum"):
            model(**share)
    inside.forward = MethodType(of_rows, inside)
    assert model(**share | {"labels": share["input_ids"]}).loss.isfinite()


@distributed(2)
def test_positional_labels_are_labels() -> None:
    """Of the global batch, where replicas have other numbers of labels."""
    booster, model, _, share = _boosted("num_items_in_batch")
    named = model(input_ids=share["input_ids"], labels=share["labels"]).loss
    placed = model(share["input_ids"], None, None, None, None, share["labels"]).loss
    torch.testing.assert_close(placed, named, rtol=0, atol=0)


@distributed(2)
def test_noise_that_a_forward_would_draw_can_be_given() -> None:
    """Masks of patches: the rule of docs/concepts.md for whatever a forward draws itself."""
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder = {f"decoder_{name}": 12 if name == "hidden_size" else size for name, size in sizes.items()}
    torch.manual_seed(0)
    plain = ViTMAEForPreTraining(ViTMAEConfig(image_size=8, patch_size=2, **sizes, **decoder)).double()
    booster, model = Booster(plugin=HybridParallelPlugin()), copy.deepcopy(plain)
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    batch = {"pixel_values": torch.randn(3, 3, 8, 8).double(), "noise": torch.rand(3, 16).double()}
    share = share_of(batch, booster.plugin.dp_rank, 2)
    loss, expected = model(**share).loss, plain(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    booster.backward(loss, optimizer)
    expected.backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    torch.testing.assert_close(
        booster.plugin.checkpoint_io.whole_state_dict(model), dict(plain.state_dict()), rtol=0.0, atol=1e-10
    )
