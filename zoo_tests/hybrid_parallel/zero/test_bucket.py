"""Where parameters lie in a bucket, and which optimizers may have them cut.

What breaks here first: a parameter that straddles a shard's end, or a whole one that does. Look in
`plugins/hybrid_parallel/zero/bucket.py` (`places_in_bucket`) and `setup/optimizer.py`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.setup.input_checks import check_optimizer
from plugins.hybrid_parallel.zero.bucket import Bucket
from plugins.hybrid_parallel.zero.bucket_layout import BucketOptions, GradBufferPool, StateMemory, places_in_bucket
from plugins.hybrid_parallel.zero.collectives.backend import ZeroCollectives
from plugins.hybrid_parallel.zero.reducer import norm_of_rank
from zoo_tests.cuda_trace.recorder import StepRecorder

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=12)


def _options(num_shards: int = 1, shard_index: int = 0, whole: bool = False) -> BucketOptions:
    return SimpleNamespace(
        num_shards=num_shards,
        shard_index=shard_index,
        whole_parameters=whole,
        master_weights=True,
        zero_stage=1,
        dp_group=None,
        exchange=ZeroCollectives(None),
        grad_buffers=GradBufferPool(ZeroCollectives(None)),
        states=StateMemory(),
    )


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 5), st.booleans())
def test_parameters_do_not_overlap_and_shards_are_equal(sizes: list[int], num_shards: int, whole: bool) -> None:
    offsets, total = places_in_bucket(sizes, num_shards, whole)
    taken = sorted((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    assert all(stop <= start for (_, stop), (start, _) in zip(taken, taken[1:], strict=False))
    assert taken[0][0] >= 0 and taken[-1][1] <= total
    # A matrix that does not start at a cache line is read more slowly by every product.
    assert all(offset % 16 == 0 for offset in offsets) and total % (16 * num_shards) == 0


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(2, 5))
def test_whole_parameters_lie_in_one_shard(sizes: list[int], num_shards: int) -> None:
    offsets, total = places_in_bucket(sizes, num_shards, True)
    shard_size = total // num_shards
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset // shard_size == (offset + size - 1) // shard_size
    # Greedy, largest first: no shard is fuller than an even share plus the largest parameter.
    assert shard_size <= (sum(sizes) + 16 * len(sizes)) / num_shards + max(sizes) + 16


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 5))
def test_cut_parameters_waste_less_than_a_cache_line_each_and_a_shard(sizes: list[int], num_shards: int) -> None:
    _, total = places_in_bucket(sizes, num_shards, False)
    assert sum(sizes) <= total < sum(sizes) + 16 * (num_shards + len(sizes))


@settings(max_examples=50, deadline=None)
@given(SIZES, st.integers(1, 4), st.booleans())
def test_pieces_of_all_ranks_are_every_element_once(sizes: list[int], num_shards: int, whole: bool) -> None:
    values = [torch.rand(size) for size in sizes]
    found = [torch.zeros(size) for size in sizes]
    count = 0
    for rank in range(num_shards):
        params = [nn.Parameter(value.clone()) for value in values]
        bucket = Bucket(params, _options(num_shards, rank, whole), 0, [], True, {})
        assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
        for piece in bucket.pieces:
            found[piece.index].view(-1)[piece.start : piece.stop] += piece.parameter.detach().view(-1)
            count += piece.stop - piece.start
    assert count == sum(sizes)
    assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))


@pytest.mark.parametrize("whole", [False, True])
def test_places_of_more_than_32_bits(whole: bool) -> None:
    shapes = [(2**16 + 1, 2**15), (5,), (3, 2**30 + 7), (2**33,)]
    count = 0
    for rank in range(3):
        params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        bucket = Bucket(params, _options(3, rank, whole), 0, [], True, {})
        assert [param.storage_offset() for param in params] == bucket.offsets
        for piece in bucket.pieces:
            place = bucket.offsets[piece.index] + piece.start - rank * bucket.shard_size
            assert piece.offset == piece.parameter.storage_offset() % bucket.shard_size == place
            count += piece.parameter.numel()
    assert count == sum(math.prod(shape) for shape in shapes)


def test_parameters_and_pieces_are_views_of_one_buffer() -> None:
    param = nn.Parameter(torch.ones(3, 4))
    bucket = Bucket([param], _options(), 0, [], True, {})
    bucket.pieces[0].parameter.data.fill_(5.0)
    assert torch.equal(param, torch.full((3, 4), 5.0)), "an update must reach the model without a copy"
    assert bucket.pieces[0].parameter.shape == (3, 4), "a whole parameter keeps its shape"


def test_masters_keep_the_values_before_the_cast() -> None:
    precise = torch.full((5,), 1.0 + 2**-12)
    param = nn.Parameter(precise.bfloat16())
    bucket = Bucket([param], _options(), 0, [], True, {param: lambda: precise})
    assert torch.equal(bucket.pieces[0].parameter, precise)
    bucket.pieces[0].parameter.data.fill_(3.0)
    bucket.all_gather_params()
    assert torch.equal(param, torch.full((5,), 3.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_by_new_data_reaches_the_model(dtype: torch.dtype) -> None:
    """As an optimizer does that sets `param.data = param.data - lr * param.grad`."""
    params = [nn.Parameter(torch.ones(5, dtype=dtype)), nn.Parameter(torch.ones(2, 3, dtype=dtype))]
    bucket = Bucket(params, _options(), 0, [], True, {})
    for value in (3.0, 4.0):
        for piece in bucket.pieces:
            piece.parameter.data = torch.full_like(piece.parameter, value)
        bucket.all_gather_params()
        assert all(torch.equal(param, torch.full_like(param, value)) for param in params)
    bucket.pieces[0].parameter.data = torch.ones(5, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="a parameter became a .* of torch.float64 after boost"):
        bucket.all_gather_params()


@pytest.mark.parametrize("counted", [True, False])
def test_a_step_starts_no_kernel_for_each_parameter(counted: bool) -> None:
    """Norm, clipping, changed weights, master weights: on a GPU, the host has to start every kernel."""
    found = []
    for number in (2, 50):
        params = [nn.Parameter(torch.rand(7, 3).bfloat16()) for _ in range(number)]
        bucket = Bucket(params, _options(), 0, [], counted, {})
        bucket.flat_grads = torch.rand(bucket.flat.numel())
        bucket.written, bucket._result = set(range(number)), bucket.flat_grads
        bucket.keep(set(range(number)))
        with StepRecorder("cpu") as recorder, torch.no_grad():
            norm = norm_of_rank([bucket], torch.device("cpu"))
            bucket.assign_grads(0.5)
            bucket.take_changed_weights()
            bucket.all_gather_params()
            bucket.clear_grads(set_to_none=False)
        assert bool(norm) is counted
        found.append(recorder.counts.kernels)
        assert all(piece.parameter.grad is not None for piece in bucket.pieces)
    assert found[0] == found[1]
    assert sum(found[0].values()) < 15


def test_a_gradient_after_the_reduction_is_refused() -> None:
    bucket = Bucket([nn.Parameter(torch.ones(2))], _options(), 0, [], True, {})
    bucket.launched = True
    with pytest.raises(RuntimeError, match="run the backward pass once a step"):
        bucket.accumulate(0, torch.ones(2))


def test_optimizers_of_another_model_are_refused() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    names = {id(param): ["weight"]}
    check_optimizer(torch.optim.SGD([param], lr=0.1), names)
    with pytest.raises(ConfigurationError, match=r"SGD holds a parameter that is not in the model given to boost\(\)"):
        check_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), names)


@pytest.mark.parametrize("keeps_local", [True, False])
def test_local_gradients_stay_for_a_report_without_a_pass_over_them(two_fake_ranks: None, keeps_local: bool) -> None:
    """As between GPUs, whose ranks do not know at once whether gradients are finite."""
    exchange = ZeroCollectives(dist.group.WORLD)
    pool = GradBufferPool(exchange)
    group = dist.group.WORLD
    options = BucketOptions(group, group, None, 1, False, False, 2**20, exchange, pool, keeps_local)
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(40))]
    bucket = Bucket(params, options, 0, [], True, {})
    for step in range(2):
        gradients = [torch.full_like(param, step + 2.0) for param in params]
        for index, gradient in enumerate(gradients):
            bucket.accumulate(index, gradient)
        bucket.launch()
        with StepRecorder("cpu") as recorder:
            bucket.complete(None)
            bucket.keep({0, 1})
        assert sum(count for name, count in recorder.counts.kernels.items() if "norm" in name) == 1, "of the shard"
        local = bucket.local_grads()
        assert (local is not None) == keeps_local
        if keeps_local:
            assert all(torch.equal(local[index], gradient) for index, gradient in enumerate(gradients))
        if step:
            bucket.clear_grads()  # a step that is left out
        else:
            bucket.assign_grads(None)
        assert bucket.flat_grads is None and bucket.local_grads() is None
