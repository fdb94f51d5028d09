"""The loss of a head that works through the tokens in chunks, against `F.cross_entropy` of all logits at once.

What breaks here first: a chunk that is smaller than the others, a rank without a valid row, or sums in 16 bit. Look in
`shardformer/cross_entropy/fused_linear.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shardformer.cross_entropy.fused_linear import fused_linear_cross_entropy_sum
from shardformer.layers import VocabParallelLMHead
from zoo_tests.harness.native import EXACT, check_gradients, fill, known
from zoo_tests.harness.ranks import distributed

# Over 4 ranks, padded to a multiple of 64 each: 1021 leaves 3 rows of padding, 100 and 5 leave ranks without a row.
VOCABULARIES = [1021, 100, 5]


def _labels(vocabulary: int, ignored: str, shape: tuple[int, ...] = (3, 7)) -> Tensor:
    labels = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1))
    labels[0, :2] = torch.tensor([0, vocabulary - 1])
    if ignored == "some":
        labels.view(-1)[1::3] = -100
        labels[-1] = -100
    elif ignored == "all":
        labels[:] = -100
    return labels


def _plain(native: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(native(hidden).flatten(0, -2), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("bias", [False, True])
def test_whole_head(bias: bool, ignored: str, chunk_rows: int) -> None:
    native, other = fill(nn.Linear(6, 101, bias=bias)), fill(nn.Linear(6, 101, bias=bias))
    x, plain_x = known(3, 7, 6, grad=True), known(3, 7, 6, grad=True)
    labels = _labels(101, ignored)
    found = fused_linear_cross_entropy_sum(x, other.weight, other.bias, labels, chunk_rows=chunk_rows)
    expected = _plain(native, plain_x, labels)
    torch.testing.assert_close(found, expected, **EXACT)
    (found * -3).backward()
    (expected * -3).backward()
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    for ours, plain in zip(other.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, **EXACT)


def _check_cut_head(vocabulary: int, bias: bool, ignored: str, chunk_rows: int) -> None:
    native = fill(nn.Linear(6, vocabulary, bias=bias))
    head = VocabParallelLMHead.from_native_module(native, dist.group.WORLD, divisible_by=64)
    with torch.no_grad():  # padding is poison
        start, stop = head.vocab_range
        head.weight[stop - start :] = 77.0
    x, plain_x = known(3, 7, 6, grad=True), known(3, 7, 6, grad=True)
    labels = _labels(vocabulary, ignored)
    found = fused_linear_cross_entropy_sum(
        x, head.matrix, head.bias, labels, head.vocab_range, head.group, chunk_rows=chunk_rows
    )
    expected = _plain(native, plain_x, labels)
    torch.testing.assert_close(found, expected, **EXACT)
    (found * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients(head, native)


@pytest.mark.parametrize("ignored", ["some", "all"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@distributed(4)
def test_head_over_four_ranks(vocabulary: int, bias: bool, ignored: str) -> None:
    _check_cut_head(vocabulary, bias, ignored, chunk_rows=4)


@pytest.mark.parametrize("chunk_rows", [1, 21, 22])
@distributed(2)
def test_head_over_two_ranks(chunk_rows: int) -> None:
    _check_cut_head(101, True, "some", chunk_rows)


def test_a_transposed_head() -> None:
    """The weight is [hidden, vocabulary]: its gradient is that of the transpose."""
    weight, x = known(6, 101, seed=2, grad=True), known(3, 7, 6, grad=True)
    labels = _labels(101, "some")
    fused_linear_cross_entropy_sum(x, weight.t(), None, labels, chunk_rows=5).backward()
    plain = known(6, 101, seed=2, grad=True)
    F.cross_entropy((known(3, 7, 6) @ plain).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    torch.testing.assert_close(weight.grad, plain.grad, **EXACT)


def test_large_logits_do_not_overflow() -> None:
    weight, x, labels = known(11, 6, seed=2) * 1e5, known(3, 7, 6), _labels(11, "some")
    found = fused_linear_cross_entropy_sum(x, weight, None, labels, chunk_rows=4)
    torch.testing.assert_close(
        found, F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")
    )


def test_a_label_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        fused_linear_cross_entropy_sum(known(3, 6), known(5, 6), None, torch.tensor([1, 5, 2]))


# ----- precision -----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_chunks_are_in_fp32(dtype: torch.dtype) -> None:
    """Of products rounded to 16 bit; sums in 16 bit would be wrong by many times as much."""
    hidden, weight = (known(512, 8) + 1).to(dtype).requires_grad_(), known(9, 8, seed=2).to(dtype).requires_grad_()
    labels = torch.full((512,), 3)
    loss = fused_linear_cross_entropy_sum(hidden, weight, None, labels, chunk_rows=2)
    loss.backward()
    exact_hidden, exact_weight = (each.detach().double().requires_grad_() for each in (hidden, weight))
    logits = F.linear(exact_hidden, exact_weight)
    exact = F.cross_entropy(logits, labels, reduction="sum")
    exact.backward()
    assert loss.dtype == torch.float32 and weight.grad.dtype == hidden.grad.dtype == dtype
    assert abs(loss.item() / exact.item() - 1) < 2e-3
    eps = torch.finfo(dtype).eps
    for ours, right in ((weight, exact_weight), (hidden, exact_hidden)):
        assert (ours.grad.double() - right.grad).norm() <= eps * right.grad.norm()


def test_fp32_of_many_chunks() -> None:
    hidden, weight = known(300, 16).float().requires_grad_(), known(50, 16, seed=2).float().requires_grad_()
    labels = torch.arange(300) % 50
    fused_linear_cross_entropy_sum(hidden, weight, None, labels, chunk_rows=7).backward()
    plain = weight.detach().clone().requires_grad_()
    F.cross_entropy(F.linear(hidden.detach(), plain), labels, reduction="sum").backward()
    torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-4, atol=1e-5)


# ----- what is kept and computed -----


class _Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_tokens_times_vocabulary_is_made(dtype: torch.dtype) -> None:
    hidden, weight = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((96, 8), (200, 8)))
    labels = torch.arange(96)
    with _Largest() as plain:
        F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum").backward()
    kept: list[int] = []
    with (
        _Largest() as ours,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
    ):
        fused_linear_cross_entropy_sum(hidden, weight, None, labels, chunk_rows=8).backward()
    assert plain.numel == 96 * 200, "the plain loss makes all logits, and is seen to"
    assert ours.numel == 8 * 200, "a chunk, which is as large as the weight here"
    assert sorted(kept) == [96 * 8, 200 * 8], "the gradients of the hidden states and of the weight"


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_gradients_that_nobody_needs_are_not_computed(frozen: str) -> None:
    hidden, weight = known(10, 6, grad=frozen == "weight"), known(11, 6, seed=2, grad=frozen == "hidden")
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        loss = fused_linear_cross_entropy_sum(hidden, weight, None, torch.arange(10), chunk_rows=4)
    assert kept == {"hidden": [66], "weight": [60], "both": []}[frozen]
    if frozen == "both":
        return
    loss.backward()
    trained = weight if frozen == "hidden" else hidden
    plain = trained.detach().clone().requires_grad_()
    logits = F.linear(hidden, plain) if frozen == "hidden" else F.linear(plain, weight)
    F.cross_entropy(logits, torch.arange(10), reduction="sum").backward()
    torch.testing.assert_close(trained.grad, plain.grad, **EXACT)


def test_without_gradients_none_is_computed() -> None:
    hidden, weight = known(10, 6, grad=True), known(11, 6, seed=2, grad=True)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss = fused_linear_cross_entropy_sum(hidden, weight, None, torch.arange(10), chunk_rows=4)
    expected = F.cross_entropy(F.linear(hidden, weight), torch.arange(10), reduction="sum")
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    assert not loss.requires_grad and counter.get_total_flops() == 2 * 10 * 6 * 11, "the logits, no gradient"


def test_a_second_backward_pass_is_refused() -> None:
    """Gradients are scaled in place: a second time they would be wrong."""
    hidden = known(10, 6, grad=True)
    loss = fused_linear_cross_entropy_sum(hidden, known(11, 6, seed=2), None, torch.arange(10))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
