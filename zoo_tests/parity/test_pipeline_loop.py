"""The ordinary loop under a pipeline trains to the numbers of plain torch.

What breaks here first: a gradient at the border between the user's loss and the stages. Look in
`plugins/hybrid_parallel/step/user_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from booster import Booster
from booster.errors import ConfigurationError
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.case import Case, Recipe, share_of
from zoo_tests.harness.compare import check_case
from zoo_tests.harness.ranks import distributed, run_on_ranks
from zoo_tests.harness.train_sharded import boost

_EXACT = {"rtol": 1e-9, "atol": 1e-12}

_EP = (("ep_size", 2),)
_FAST = (
    Case(recipe=Recipe(family="gpt2", head="lm_head", optimizer="momentum", max_norm=0.1), layout="tp2pp2"),
    Case(recipe=Recipe(family="bert", head="sequence", optimizer="momentum"), layout="pp2dp2"),
    Case(
        recipe=Recipe(family="t5", head="generation"),
        layout="pp2",
        options=(("pp_style", "interleaved"), ("num_model_chunks", 2)),
    ),
)
_SLOW = (
    Case(recipe=Recipe(family="bert", head="masked_lm", precision="fp32"), layout="pp2"),
    Case(recipe=Recipe(family="llama", head="causal_lm", precision="fp16"), layout="tp2pp2"),
    Case(recipe=Recipe(family="gpt2", head="lm_head", precision="bf16"), layout="pp2dp2"),
    Case(recipe=Recipe(family="llama", head="causal_lm", max_norm=0.1), layout="pp4"),
    Case(recipe=Recipe(family="vit", head="image"), layout="pp2"),
    Case(recipe=Recipe(family="mixtral", head="causal_lm", precision="fp32"), layout="pp2dp2", options=_EP),
    Case(recipe=Recipe(family="llama", head="causal_lm"), layout="pp2", options=(("pp_style", "zbv"),)),
    Case(recipe=Recipe(family="bert", head="masked_lm"), layout="pp2dp2", zero_stage=0),
    Case(recipe=Recipe(family="llama", head="causal_lm"), layout="cp2pp2"),
    Case(recipe=Recipe(family="gpt2", head="lm_head"), layout="pp2", options=(("gradient_checkpointing", "full"),)),
)


def _params() -> list:
    cases = [*((case, []) for case in _FAST), *((case, pytest.mark.slow) for case in _SLOW)]
    return [pytest.param(case.but(ordinary_loop=True), id=str(case), marks=marks) for case, marks in cases]


@pytest.mark.parametrize("case", _params())
def test_ordinary_loop_of_a_pipeline(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@distributed(2)
def test_misuse_is_refused_on_all_ranks() -> None:
    recipe = Recipe(family="bert", head="sequence")
    boosted = boost(Case(recipe=recipe, layout="pp2", ordinary_loop=True))
    model, optimizer, backward = boosted.model, boosted.optimizer, boosted.booster.backward
    batch = boosted.share(recipe.batch(0))

    with pytest.raises(ConfigurationError, match=r"call booster\.backward\(loss, optimizer\)"):
        model(**batch).loss.backward()
    loss = model(**batch).loss
    with pytest.raises(RuntimeError, match="a second time"):
        backward(loss, optimizer)
        backward(loss * 2, optimizer)
    outputs = model(**batch)
    backward(model(**batch).loss, optimizer)
    optimizer.step()
    assert outputs.logits.shape[0] == len(batch["labels"])  # of the weights before the step, as in plain torch
    with pytest.raises(RuntimeError, match="before optimizer.step"):
        backward(outputs.loss, optimizer)
    with torch.no_grad():
        assert not model(**batch).logits.requires_grad

    outputs = model(**batch)
    with pytest.raises(ConfigurationError, match=r"stage 0 reads outputs\.logits .* while stage 1 calls booster"):
        if boosted.plugin.stage_index == 0:
            outputs.logits  # noqa: B018
        backward(outputs.loss, optimizer)


# ----- several models in one loss -----

_BERT, _GPT2 = Recipe(family="bert", head="sequence"), Recipe(family="gpt2", head="sequence")
_SHARED = ("input_ids", "attention_mask", "labels")  # entries that both read


def _boost(recipe: Recipe, **options: Any) -> tuple[Booster, Any, Any]:
    model, booster = recipe.model(), Booster(plugin=HybridParallelPlugin(**options))
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _check_gradients(optimizer: Any, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, gradient in optimizer.full_gradients().items():
        wanted = expected[name].grad
        torch.testing.assert_close(gradient, wanted, **_EXACT, msg=lambda text, name=name: f"{name}: {text}")


def _mutual(one: Any, other: Any, batch: dict[str, Tensor]) -> Tensor:
    """Two students learn from each other."""
    mine, theirs = one(**batch), other(**batch)
    soft = F.kl_div(mine.logits.log_softmax(-1), theirs.logits.softmax(-1), reduction="batchmean")
    return mine.loss + soft + 0.5 * theirs.loss


def _train_two_students(options: dict[str, Any]) -> None:
    batch = {name: value[:8] for name, value in _BERT.batch(0).items() if name in _SHARED}
    plain = [_BERT.model(), _GPT2.model()]
    _mutual(*plain, batch).backward()
    booster, model, optimizer = _boost(_BERT, **options)
    other = _GPT2.model()
    other, other_optimizer = booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.1))
    share = share_of(batch, booster.plugin.dp_rank, booster.plugin.dp_size)
    for given in (optimizer, other_optimizer):  # whichever is given, and in two parts
        with booster.no_sync(model, given):
            booster.backward(_mutual(model, other, share) / 4, given)
        booster.backward(_mutual(model, other, share) * 0.75, given)
        for each, whole in zip((optimizer, other_optimizer), plain, strict=True):
            _check_gradients(each, whole)
            each.zero_grad()


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, {}), pytest.param(4, {}, marks=pytest.mark.slow), (4, {"tp_size": 2})]
)
def test_two_trained_models_in_one_loss(ranks: int, options: dict[str, Any]) -> None:
    run_on_ranks(ranks, _train_two_students, {"pp_size": 2, **options})


@distributed(2)
def test_a_teacher_under_another_layout() -> None:
    batch = {name: value for name, value in _BERT.batch(0).items() if name in _SHARED}

    def distilled(student: Any, teacher: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(**batch).logits.softmax(-1)
        outputs = student(**batch)
        return outputs.loss + F.kl_div(outputs.logits.log_softmax(-1), target, reduction="batchmean")

    plain, teacher = _BERT.model(), _GPT2.model()
    expected = distilled(plain, teacher)
    expected.backward()
    for ours, theirs in (("pp_size", "tp_size"), ("tp_size", "pp_size")):
        booster, model, optimizer = _boost(_BERT, **{ours: 2})
        loss = distilled(model, Booster(plugin=HybridParallelPlugin(**{theirs: 2})).boost(_GPT2.model()))
        torch.testing.assert_close(loss, expected, **_EXACT)
        booster.backward(loss, optimizer)
        _check_gradients(optimizer, plain)


# ----- shares and outputs -----


@pytest.mark.parametrize("family", ["bert", pytest.param("t5", marks=pytest.mark.slow)])
@distributed(4)
def test_an_empty_share(family: str) -> None:
    recipe = Recipe(family=family, head={"bert": "sequence", "t5": "generation"}[family])
    batch, plain = {name: value[:1] for name, value in recipe.batch(0).items()}, recipe.model()
    booster, model, optimizer = _boost(recipe, pp_size=2, dp_size=2)
    share = share_of(batch, booster.plugin.dp_rank, 2)
    expected = plain(**batch).loss
    expected.backward()
    outputs = model(**share)
    assert len(outputs.logits) == len(share["labels"]) == booster.plugin.dp_rank
    torch.testing.assert_close(outputs.loss, expected, **_EXACT)
    booster.backward(outputs.loss, optimizer)
    _check_gradients(optimizer, plain)


def _contrast(outputs: Any) -> Tensor:
    scores = outputs.image_embeds @ outputs.text_embeds.t() * 7
    return F.cross_entropy(scores, torch.arange(len(scores)))


def _encoded(outputs: Any) -> Tensor:
    return outputs.loss + outputs.encoder_last_hidden_state.square().mean() + outputs[1].logsumexp(-1).mean()


_LOSSES: dict[str, tuple[str, Callable[[Any], Tensor], dict[str, str]]] = {
    "clip_towers": (
        "similarity",
        _contrast,
        {
            "logits_per_text": "compares all samples .* 2 micro-batches",
            "logits_per_image": "compares all samples",
            "vision_model_output": "is of an earlier stage",
        },
    ),
    "t5": ("generation", _encoded, {"past_key_values": "is not filled by the passes of a pipeline"}),
}


@pytest.mark.parametrize("family", list(_LOSSES))
@distributed(2)
def test_losses_of_further_outputs(family: str) -> None:
    head, loss_of, withheld = _LOSSES[family]
    recipe = Recipe(family=family, head=head, rows=6)
    batch, plain = recipe.batch(0), recipe.model()
    expected = loss_of(plain(**batch))
    expected.backward()
    booster, model, optimizer = _boost(recipe, pp_size=2)
    outputs = model(**batch)
    for name, reason in withheld.items():
        assert getattr(plain(**batch), name) is not None and not hasattr(outputs, name)
        with pytest.raises(ConfigurationError, match=f"outputs.{name} {reason}"):
            outputs[name]
    torch.testing.assert_close(loss_of(outputs), expected, **_EXACT)
    booster.backward(loss_of(outputs), optimizer)
    _check_gradients(optimizer, plain)
    outputs, expected = model.eval()(**batch), plain.eval()(**batch)
    assert [*outputs] == [*expected]
    for (name, found), value in zip(outputs.items(), expected.to_tuple(), strict=True):
        if name not in withheld:  # nested ones, too
            torch.testing.assert_close(tree_leaves(found), tree_leaves(value), **_EXACT)
            continue
        with pytest.raises(ConfigurationError, match=f"outputs.{name} {withheld[name]}"):
            found.shape  # noqa: B018


@distributed(2)
def test_a_penalty_on_a_weight_of_two_stages_is_refused() -> None:
    """Both stages have the same value of it, and would add its gradient twice."""
    recipe = Recipe(family="llama", head="causal_lm", config=(("tie_word_embeddings", True),))
    booster, model, optimizer = _boost(recipe, pp_size=2)
    tied = dict(model.named_parameters())["model.embed_tokens.weight"]
    loss = model(**recipe.batch(0)).loss + 0.01 * tied.square().sum()
    with pytest.raises(ConfigurationError, match="loss reads a weight besides the model's outputs, .* weight_decay"):
        booster.backward(loss, optimizer)


class _Sent(TorchDispatchMode):
    """Notes (operation, number of elements) of values that this rank hands to a process group; shapes are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            tensors = (each for each in tree_leaves(args) if isinstance(each, Tensor))
            tensors = (each for each in tensors if each.is_floating_point())
            self.seen += [(func.name().removeprefix("c10d::"), each.numel()) for each in tensors]
        return func(*args, **(kwargs or {}))

    def largest(self) -> int:
        """Number of elements of the largest tensor since the last call."""
        seen, self.seen = self.seen, []
        return max(size for _, size in seen)


@distributed(2)
def test_no_output_is_sent_before_it_is_read() -> None:
    """The loss is one number; all else that crosses the border of a stage are hidden states of a micro-batch."""
    recipe = Recipe(family="llama", head="causal_lm")
    batch, config = recipe.batch(0), recipe.model().config
    booster, model, optimizer = _boost(recipe, pp_size=2, num_microbatches=3)
    hidden = batch["input_ids"].numel() // 3 * config.hidden_size
    whole = batch["input_ids"].numel() * config.vocab_size
    assert batch["input_ids"].shape[0] % 3 == 0 and hidden * 10 < whole
    booster.backward(model(**batch).loss, optimizer)  # the first pass also sends shapes, and compares the batch
    optimizer.zero_grad()
    with _Sent() as sent:
        outputs = model(**batch)
        outputs.loss.item(), outputs["loss"], outputs.get("loss"), "logits" in outputs, repr(outputs)
        booster.backward(outputs.loss, optimizer)
        assert sent.largest() == hidden
        logits = outputs.logits
        assert [each for each in sent.seen if each[1] > hidden] == [("broadcast_", whole)] and logits.numel() == whole
        sent.seen.clear()
        assert outputs.logits is logits and outputs[1] is logits and not sent.seen, "fetched once"
        torch.testing.assert_close(logits, recipe.model()(**batch).logits, **_EXACT)  # read after the backward pass
        with pytest.raises(RuntimeError, match="a second time"):
            booster.backward(logits.sum(), optimizer)
        with torch.no_grad():
            assert model(**batch).loss.ndim == 0
        assert sent.largest() == hidden


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
@distributed(2)
def test_outputs_that_lie_on_the_stages_are_refused(name: str) -> None:
    recipe = Recipe(family="llama", head="causal_lm", config=(("attn_implementation", "eager"),))
    _, model, _ = _boost(recipe, pp_size=2)
    batch = recipe.batch(0)
    # Padded on the right: in fp64 the eager attention of a token that sees nothing is nan.
    batch["attention_mask"] = batch["attention_mask"].sort(descending=True).values
    refusal = f"{name}=True asks for what lies on 2 pipeline stages; use pp_size=1 or {name}=False"
    with pytest.raises(ConfigurationError, match=refusal):
        model(**batch, **{name: True})
    setattr(model.config, name, True)
    with pytest.raises(ConfigurationError, match=refusal):
        model(**batch)
    outputs = model(**batch, **{name: False})
    assert outputs.hidden_states is None and outputs.attentions is None
    torch.testing.assert_close(outputs.loss, recipe.model()(**batch).loss, rtol=1e-6, atol=0, check_dtype=False)
