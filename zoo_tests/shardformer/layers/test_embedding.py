"""Embedding, language-model head and cross-entropy over a cut vocabulary.

What breaks here first: padding of a vocabulary that the ranks do not divide, up to a rank without a valid row (the
other ranks hang then). Look in `shardformer/layers/embedding.py`, `layers/embedding.py` and `cross_entropy.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.cross_entropy.vocab_parallel import cross_entropy_of_tokens, cross_entropy_sum
from shardformer.layers import VocabParallelEmbedding, VocabParallelLMHead
from shardformer.layers.embedding import parallel_logits
from zoo_tests.harness.native import EXACT, check_gradients, fill, known
from zoo_tests.harness.ranks import distributed

# Over 4 ranks, padded to a multiple of 64 each: 1021 leaves 3 rows of padding, 100 and 5 leave ranks without a row.
VOCABULARIES = [1021, 100, 5]


def _ids(vocabulary: int) -> Tensor:
    """First and last row, some rows twice."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (3, 7), generator=generator)
    ids[0, :3] = torch.tensor([0, vocabulary - 1, 0])
    return ids


@pytest.mark.parametrize("padding", [None, 0, -1])
@pytest.mark.parametrize("divisible_by", [1, 64])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@distributed(4)
def test_embedding(vocabulary: int, divisible_by: int, padding: int | None) -> None:
    native = fill(nn.Embedding(vocabulary, 6, padding_idx=padding))
    layer = VocabParallelEmbedding.from_native_module(native, dist.group.WORLD, divisible_by=divisible_by)
    ids = _ids(vocabulary)
    expected, found = native(ids), layer(ids)
    torch.testing.assert_close(found, expected, **EXACT)
    weights = known(*expected.shape, seed=3)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    check_gradients(layer, native)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
@distributed(2)
def test_embeddings_that_need_whole_rows_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="cannot be cut by rows; name an nn.Embedding without"):
        VocabParallelEmbedding.from_native_module(nn.Embedding(8, 2, **options), dist.group.WORLD)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@distributed(4)
def test_head(vocabulary: int, bias: bool) -> None:
    native = fill(nn.Linear(6, vocabulary, bias=bias))
    layer = VocabParallelLMHead.from_native_module(native, dist.group.WORLD, divisible_by=64)
    x, plain_x = known(3, 6, grad=True), known(3, 6, grad=True)
    expected, found = native(plain_x), layer(x)
    torch.testing.assert_close(found, expected, **EXACT)
    weights = known(*expected.shape, seed=3)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad, **EXACT)
    check_gradients(layer, native)
    start, stop = layer.vocab_range
    with parallel_logits(nn.ModuleList([layer])):
        torch.testing.assert_close(layer(x)[:, : stop - start], expected[:, start:stop], **EXACT)
    assert layer(x).shape == expected.shape, "the head gathers again afterwards"


# ----- cross-entropy -----


def _labels(vocabulary: int, ignored: str) -> Tensor:
    labels = _ids(vocabulary).flatten()
    if ignored == "some":
        labels[::3] = -100
    elif ignored == "all":
        labels[:] = -100
    return labels


def _loss_both_ways(logits: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(loss, gradient of the logits here) of the cut logits, and of whole ones."""
    vocabulary = logits.shape[1]
    block = -(-vocabulary // (64 * dist.get_world_size())) * 64
    start = min(dist.get_rank() * block, vocabulary)
    stop = min(start + block, vocabulary)
    local = F.pad(logits[:, start:stop], (0, block - (stop - start)), value=77.0).requires_grad_()  # padding is poison
    found = cross_entropy_of_tokens(local, labels, (start, stop), dist.group.WORLD).sum()
    (found * 3).backward()
    assert torch.count_nonzero(local.grad[:, stop - start :]) == 0
    whole = logits.clone().requires_grad_()
    upcast = whole if whole.dtype == torch.float64 else whole.float()
    expected = F.cross_entropy(upcast, labels, reduction="sum")
    (expected * 3).backward()
    return (found, local.grad[:, : stop - start]), (expected, whole.grad[:, start:stop])


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@distributed(4)
def test_cross_entropy(vocabulary: int, ignored: str) -> None:
    labels = _labels(vocabulary, ignored)
    found, expected = _loss_both_ways(known(len(labels), vocabulary, seed=2) * 30, labels)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(2)
def test_cross_entropy_is_computed_in_fp32_at_least(dtype: torch.dtype) -> None:
    labels = _labels(1021, "some")
    found, expected = _loss_both_ways((known(len(labels), 1021, seed=2) * 5).to(dtype), labels)
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@distributed(2)
def test_cross_entropy_of_large_logits_does_not_overflow() -> None:
    labels = _labels(100, "none")
    found, expected = _loss_both_ways(known(len(labels), 100, seed=2) * 1e5, labels)
    torch.testing.assert_close(found, expected, **EXACT)


def test_cross_entropy_without_a_group() -> None:
    logits, labels = known(6, 5), torch.tensor([0, 1, -100, 2, 3, 4])
    torch.testing.assert_close(
        cross_entropy_sum(logits, labels), F.cross_entropy(logits, labels, reduction="sum"), **EXACT
    )
    assert cross_entropy_sum(logits, torch.full((6,), -100)) == 0.0
