"""The stand-in that a head returns for logits that only a loss reads: looking costs nothing, using it gives logits.

What breaks here first: a way to reach the numbers that does not compute them, or a head that is left changed. Look in
`shardformer/cross_entropy/fused_linear.py` and `layers/embedding.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer.cross_entropy.fused_linear as module
from shardformer.cross_entropy.fused_linear import (
    DeferredLogits,
    LMHeadCall,
    chunk_bytes,
    defer_logits,
    loss_of,
    saves_memory,
)
from shardformer.layers import VocabParallelLMHead
from shardformer.layers.embedding import deferred_logits
from shardformer.layers.parallel_module import defer_weight_grads
from shardformer.matmul.kernel import WeightGradStore, planned_for
from zoo_tests.harness.native import EXACT, check_gradients, fill, known
from zoo_tests.harness.ranks import distributed


class _Model(nn.Module):
    """A model with a head, as transformers' have them."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.base, self.lm_head = nn.Linear(6, 6), nn.Linear(6, vocabulary)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.base(x))


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "saves_memory", lambda call: True)


def _deferred(head: nn.Linear) -> tuple[DeferredLogits, Tensor]:
    x = known(3, 7, 6, grad=True)
    return DeferredLogits(LMHeadCall(x, head.weight, head.bias, head)), x


def test_looking_computes_nothing() -> None:
    logits, _ = _deferred(fill(nn.Linear(6, 11)))
    assert isinstance(logits, Tensor) and logits.shape == (3, 7, 11) and logits.size(-1) == 11 and logits.dim() == 3
    assert logits.dtype == torch.float64 and logits.device.type == "cpu" and logits.is_floating_point()
    assert logits.requires_grad and logits.contiguous() is logits and len(logits) == 3 and logits.numel() == 231
    assert {"logits": logits}["logits"] is logits and hash(logits) is not None
    assert logits.logits is None


_USES: dict[str, Callable[[Any], Tensor]] = {
    "scale": lambda x: x * 0.5,
    "cap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "reflected": lambda x: 2.0 - x,
    "slice": lambda x: x[..., :-1, 2:],
    "view": lambda x: x.view(-1, 11),
    "cast": lambda x: x.float(),
    "list": lambda x: torch.cat([x, x]),
    "loss": lambda x: F.cross_entropy(x.view(-1, 11), torch.arange(21) % 11),
    "mask": lambda x: x.masked_fill(torch.arange(11) == 3, -1.0),
    "numbers": lambda x: torch.tensor(x.detach().numpy()) + 0 * x,
}


@pytest.mark.parametrize("use", _USES)
def test_using_it_gives_logits(use: str) -> None:
    head, plain = fill(nn.Linear(6, 11)), fill(nn.Linear(6, 11))
    logits, x = _deferred(head)
    plain_x = known(3, 7, 6, grad=True)
    found, expected = _USES[use](logits), _USES[use](plain(plain_x))
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (found**2).sum().backward()
    (expected**2).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients_of_whole(head, plain)
    assert loss_of(logits, torch.zeros(3, 7, dtype=torch.long)) is None, "somebody has read it"


def check_gradients_of_whole(found: nn.Module, expected: nn.Module) -> None:
    for ours, plain in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, **EXACT)


def test_a_change_in_place_is_seen_afterwards() -> None:
    head = fill(nn.Linear(6, 11))
    logits, x = _deferred(head)
    logits.mul_(2.0)
    logits[0, 0] = 7.0
    expected = head(x) * 2.0
    torch.testing.assert_close(logits[1:], expected[1:])
    assert (logits[0, 0] == 7.0).all()


def test_copies_and_hooks() -> None:
    head = fill(nn.Linear(6, 11))
    logits, x = _deferred(head)
    torch.testing.assert_close(copy.deepcopy(logits.detach()), head(x).detach())
    logits, x = _deferred(head)
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    logits.sum().backward()
    assert seen[0].shape == (3, 7, 11)


def test_read_without_gradients_it_keeps_those_of_the_pass() -> None:
    logits, x = _deferred(fill(nn.Linear(6, 11)))
    with torch.no_grad():
        assert not (logits * 2).requires_grad
    logits.sum().backward()
    assert x.grad is not None


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_of_autograd_gets_logits_and_loses_no_gradient_silently() -> None:
    head = fill(nn.Linear(6, 11))
    logits, x = _deferred(head)
    found = _Doubled.apply(logits)
    torch.testing.assert_close(found, head(x) * 2)
    with pytest.raises(RuntimeError, match="cannot propagate their gradient"):
        found.sum().backward()


# ----- when -----


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    head, chunk = nn.Linear(64, 2**16, device="meta"), chunk_bytes(torch.device("cpu"))

    def defers(tokens: int) -> bool:
        return saves_memory(LMHeadCall(torch.empty(1, tokens, 64), head.weight, None, head))

    fitting = chunk // (4 * 2**16)
    assert not defers(fitting) and defers(fitting + 1), "more than a chunk"
    head = nn.Linear(1024, 2**16, device="meta")
    assert not defers(1024) and defers(1025), "more than the gradient of the weight"
    head.weight.requires_grad_(False)
    assert defers(fitting + 1), "which nobody needs"


def test_in_a_plan_all_passes_do_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cpu, head = torch.device("cpu"), nn.Linear(64, 2**16, device="meta")

    def defers(tokens: int) -> bool:
        return saves_memory(LMHeadCall(torch.empty(tokens, 64), head.weight, None, head))

    few, many = chunk_bytes(cpu) // (4 * 2**16), chunk_bytes(cpu) // (4 * 2**16) + 1
    with planned_for("cpu"):
        assert not defers(few) and not defers(many)
    with planned_for("cpu"):
        assert defers(many) and defers(few)
    with planned_for("cuda"):
        assert chunk_bytes(cpu) > 4 * many * 2**16 and not defers(many), "chunks as large as there"
    assert defers(many) and not defers(few)


def test_a_head_in_another_precision_is_left_alone() -> None:
    head = fill(nn.Linear(6, 11)).float()
    x = known(3, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert type(defer_logits(LMHeadCall(x, head.weight, None, head))) is Tensor
        assert type(defer_logits(LMHeadCall(x.float(), head.weight, None, head))) is Tensor
    assert type(defer_logits(LMHeadCall(x.float(), head.weight, None, head))) is DeferredLogits


# ----- the heads of a model -----


def test_heads_defer_inside_and_are_as_they_were_afterwards() -> None:
    model = fill(_Model())
    head = model.lm_head
    with deferred_logits(model):
        assert type(model(known(3, 6))) is DeferredLogits
    assert model.lm_head is head and type(model(known(3, 6))) is Tensor


def test_heads_of_split_passes_are_put_back() -> None:
    model, store = fill(_Model()), WeightGradStore()
    defer_weight_grads(model, store)
    head = model.lm_head
    with deferred_logits(model), store.split_backward():
        logits = model(known(3, 6))
        assert type(logits) is DeferredLogits
        assert type(logits.view(-1).grad_fn.next_functions[0][0]).__name__ == "_LinearBackward"
    assert model.lm_head is head


def test_a_head_with_a_forward_of_its_own_is_left_alone() -> None:
    model = fill(_Model())
    model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight) * 2
    with deferred_logits(model):
        assert type(model(known(3, 6))) is Tensor

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model.lm_head = Scaled(6, 11).double()
    with deferred_logits(model):
        assert type(model(known(3, 6))) is Tensor


@distributed(2)
def test_a_cut_head() -> None:
    """Untouched for the loss, and this rank's logits for everything else."""
    module.saves_memory, before = lambda call: True, module.saves_memory
    native, sharded = fill(_Model(101)), fill(_Model(101))
    sharded.lm_head = VocabParallelLMHead.from_native_module(sharded.lm_head, dist.group.WORLD, divisible_by=64)
    x, labels = known(3, 7, 6), torch.arange(21).view(3, 7) * 4
    expected = F.cross_entropy(native(x).flatten(0, 1), labels.flatten(), reduction="sum")
    try:
        with deferred_logits(sharded):
            deferred, read = sharded(x), sharded(x)
    finally:
        module.saves_memory = before
    start, stop = sharded.lm_head.vocab_range
    assert deferred.shape == (3, 7, 64)
    torch.testing.assert_close(read[..., : stop - start], native(x)[..., start:stop], **EXACT)
    found = loss_of(deferred, labels)
    torch.testing.assert_close(found, expected, **EXACT)
    found.backward()
    expected.backward()
    check_gradients(sharded.lm_head, native.lm_head)
    check_gradients_of_whole(sharded.base, native.base)
    assert type(sharded(x)) is Tensor and sharded(x).shape == (3, 7, 101)
