"""Tokens that travel to experts on other ranks find what they would find at home, and so do their gradients.

What breaks here first: the order of rows that come back, ranks that nothing is sent to, choices of no expert. Look in
`shardformer/layers/experts.py`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from shardformer import ShardConfig
from shardformer.distributed import collectives
from shardformer.layers.experts import (
    ExpertCapacity,
    SharedExpert,
    TokenDispatcher,
    overfull,
    run_whole_experts,
    shard_experts,
)
from zoo_tests.cuda_trace.recorder import recorded_on_meta
from zoo_tests.harness.native import EXACT, known
from zoo_tests.harness.ranks import distributed

NUM_EXPERTS, CHOICES, HIDDEN = 8, 2, 6
NOBODY = NUM_EXPERTS


def _spread(tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :CHOICES]


def _crowded(tokens: int, seed: int) -> Tensor:
    """Every token goes to the experts of the first rank."""
    return torch.tensor([0, 1]).repeat(tokens, 1)


def _some_go_nowhere(tokens: int, seed: int) -> Tensor:
    index = _spread(tokens, seed)
    index[::2, 1] = NOBODY
    return index


ROUTES = {"spread": _spread, "crowded": _crowded, "some go nowhere": _some_go_nowhere}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def _experts(matrices: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The plainest mixture of experts, one matrix each, token by token."""

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = []
        for token, experts, shares in zip(hidden, index.tolist(), weights, strict=True):
            chosen = [(e, share) for e, share in zip(experts, shares, strict=True) if e < len(matrices)]
            none = 0 * (matrices[0] @ token)  # whose gradient other ranks wait for, too
            found.append(sum((share * torch.tanh(matrices[e] @ token) for e, share in chosen), none))
        return torch.stack(found) if found else hidden * weights.sum(1, keepdim=True)

    return forward


def _inputs(route: str, tokens: int, seed: int) -> Inputs:
    """Hidden states, choices, weights, and what the output is multiplied by."""
    hidden, weights = known(tokens, HIDDEN, seed=seed, grad=True), known(tokens, CHOICES, seed=seed + 50, grad=True)
    return hidden, ROUTES[route](tokens, seed), weights, known(tokens, HIDDEN, seed=seed + 90)


def _run(forward: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> Tensor:
    hidden, index, weights, factors = inputs
    output = forward(hidden, index, weights)
    (output * factors).sum().backward()
    return output.detach()


def _check(outcome: Tensor, inputs: Inputs, expected: Tensor, plain: Inputs) -> None:
    torch.testing.assert_close(outcome, expected, **EXACT)
    torch.testing.assert_close(inputs[0].grad, plain[0].grad, **EXACT)
    torch.testing.assert_close(inputs[2].grad, plain[2].grad, **EXACT)


@pytest.mark.parametrize("capacity", [None, 4.0])
@pytest.mark.parametrize("route", ROUTES)
@distributed(4)
def test_dispatch(route: str, capacity: float | None) -> None:
    rank, share = dist.get_rank(), NUM_EXPERTS // 4
    tokens = [5, 1, 7, 0]  # the last rank has none of its own
    whole = known(NUM_EXPERTS, HIDDEN, HIDDEN, seed=3, grad=True)
    plain = [_inputs(route, count, seed) for seed, count in enumerate(tokens)]
    expected = [_run(_experts(whole), each) for each in plain]

    own = whole.detach()[rank * share : (rank + 1) * share].clone().requires_grad_()
    inputs = _inputs(route, tokens[rank], rank)
    dispatcher = TokenDispatcher(NUM_EXPERTS, dist.group.WORLD, None, capacity=capacity)
    outcome = _run(partial(dispatcher, _experts(own)), inputs)
    assert capacity is None or dispatcher.missing <= 0
    _check(outcome, inputs, expected[rank], plain[rank])
    assert own.grad is not None, "an expert without tokens has zeros, as in plain training"
    torch.testing.assert_close(own.grad, whole.grad[rank * share : (rank + 1) * share], **EXACT)


@pytest.mark.parametrize("tokens", [1, 5, 8])
@distributed(4)
def test_tensor_parallel_ranks_send_a_slice_each(tokens: int) -> None:
    rank, pair = dist.get_rank(), dist.get_rank() // 2
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])][pair]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    whole, share = known(NUM_EXPERTS, HIDDEN, HIDDEN, seed=3, grad=True), NUM_EXPERTS // 2
    plain = [_inputs("spread", tokens, seed) for seed in range(2)]
    expected = [_run(_experts(whole), each) for each in plain]

    own = whole.detach()[pair * share : (pair + 1) * share].clone().requires_grad_()
    inputs = _inputs("spread", tokens, pair)
    dispatch = partial(TokenDispatcher(NUM_EXPERTS, between, across), _experts(own))
    outcome = _run(dispatch, inputs)
    _check(outcome, inputs, expected[pair], plain[pair])
    dist.all_reduce(own.grad, group=across)
    torch.testing.assert_close(own.grad, whole.grad[pair * share : (pair + 1) * share], **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@distributed(2)
def test_any_dtype_travels(dtype: torch.dtype) -> None:
    own = known(NUM_EXPERTS // 2, HIDDEN, HIDDEN, seed=dist.get_rank()).to(dtype)
    hidden, index, weights, _ = _inputs("spread", 5, 1)
    dispatcher = TokenDispatcher(NUM_EXPERTS, dist.group.WORLD, None)
    outcome = dispatcher(_experts(own), hidden.to(dtype), index, weights)
    assert outcome.dtype == dtype
    assert outcome.isfinite().all()


def _passes(experts: nn.Module) -> tuple[list[str], Any]:
    """Return the kernels of a forward pass that move rows, sorted, and all that was counted."""
    with torch.device("meta"):
        hidden, weights = torch.ones(4, 16).bfloat16(), torch.ones(4, CHOICES).bfloat16()
        index = torch.zeros(4, CHOICES, dtype=torch.long)
    with recorded_on_meta() as counts, torch.enable_grad():
        outcome = experts(hidden, index, weights)
    assert outcome.is_meta and outcome.shape == hidden.shape
    names = [name.rpartition("::")[2].partition(".")[0] for name in counts.kernels.elements()]
    moves = ("index", "index_select", "index_copy", "bmm", "mul", "clone")
    return sorted(name for name in names if name in moves), counts


@pytest.mark.parametrize("capacity", [None, 1.5])
def test_a_gpu_is_waited_for_once_a_layer(capacity: float | None, two_fake_ranks: None) -> None:
    """For the sizes that the host needs: two rows of two ranks; never for a fixed number of rows."""
    with torch.device("meta"):
        block = _block("glm4_moe", 16, "grouped_mm").bfloat16()
    group, given = dist.group.WORLD, {"expert_rank_capacity_factor": capacity, "enable_tensor_parallelism": False}
    shard_experts(block, ShardConfig(expert_parallel_process_group=group, **given))
    passes, counts = _passes(block.experts)
    lines = {place.partition(" < ")[0].rpartition("/")[2] for place in counts.syncs}
    assert len(lines) == (capacity is None), f"more than the sizes is waited for: {counts.syncs}"
    of_numbers = ["index_select"] if capacity is None else ["clone", "index", "index", "mul"]
    wanted = sorted([*of_numbers, "bmm", *["index_select"] * 4, "mul"])
    assert passes == wanted, "weighted rows; rows out and by expert, and back; gates"


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_experts_of_one_rank(family: str) -> None:
    """Rows by expert and back, and their weighted sum, with the numbers of experts one by one in fp64."""
    plain, made = _block(family, 16), _block(family, 16, "grouped_mm").float()
    run_whole_experts(made)
    inputs = [known(9, 16, grad=True), _spread(9, 1) % 4, known(9, CHOICES, seed=2, grad=True), known(9, 16, seed=3)]
    mine = [each.detach().float().requires_grad_() if each.is_floating_point() else each for each in inputs]
    pairs = [(_run(made.experts, mine), _run(plain.experts, inputs))]
    pairs += [(one.grad, each.grad) for one, each in zip(mine[:3:2], inputs[:3:2], strict=True)]
    pairs += [(one.grad, each.grad) for one, each in zip(made.parameters(), plain.parameters(), strict=True)]
    for found, expected in pairs:
        if expected is not None:  # the router has none
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    if family == "glm4_moe":
        passes, counts = _passes(made.to(device="meta", dtype=torch.bfloat16).experts)
        assert passes == ["bmm", "index_select", "index_select", "mul"] and not counts.syncs, "mul: gates"


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
@distributed(2)
def test_slots_without_rows_change_nothing(family: str) -> None:
    """They hold any values in grouped products, which biases (gpt-oss) must not add up. Too few are told of."""
    block = _block(family, 8, "grouped_mm").float()
    config = {"expert_parallel_process_group": dist.group.WORLD, "enable_tensor_parallelism": False}
    exact, slots = copy.deepcopy(block), copy.deepcopy(block)
    shard_experts(exact, ShardConfig(**config))
    shard_experts(slots, ShardConfig(**config, expert_rank_capacity_factor=1.75))
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden, index = torch.randn(32, 8, generator=generator), torch.rand(32, 4, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(32, 2, generator=generator)
    found = [each.experts(hidden, index, weights) for each in (exact, slots)]
    for each in found:
        each.square().sum().backward()
    torch.testing.assert_close(*found)
    for mine, expected in zip(slots.experts.parameters(), exact.experts.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
    assert not list(overfull(slots))
    assert slots.experts(hidden, torch.tensor([[0, 1]]).repeat(32, 1), weights).isnan().all()
    assert ["experts had 8 rows too many for one rank" in each for each in overfull(slots)] == [True]
    with torch.no_grad():
        assert slots.experts(hidden, torch.tensor([[0, 1]]).repeat(32, 1), weights).isfinite().all()


class _Timed:
    """The work of an exchange, which tells when it is waited for."""

    def __init__(self, work: dist.Work, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.work.wait()
        self.events.append("end")


def _block(family: str, hidden_size: int = 8, implementation: str = "eager") -> nn.Module:
    """A layer's experts as transformers writes them, with random weights."""
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    sizes |= dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4)
    config = AutoConfig.for_model(family, **sizes, num_experts_per_tok=2)
    config._experts_implementation = implementation
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    block = {"glm4_moe": "Glm4MoeMoE", "qwen2_moe": "Qwen2MoeSparseMoeBlock", "gpt_oss": "GptOssMLP"}[family]
    made = getattr(module, block)(config).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return made


@pytest.mark.parametrize(
    ("family", "implementation"), [("glm4_moe", "eager"), ("glm4_moe", "grouped_mm"), ("qwen2_moe", "eager")]
)
@distributed(2)
def test_what_computes_while_tokens_are_on_their_way(family: str, implementation: str) -> None:
    """A shared expert, in both passes, where the block calls it behind its other experts (GLM).

    Gradients of weights, too, where experts run in grouped products. The numbers are the plain ones.
    """
    is_grouped = implementation == "grouped_mm"
    plain, events = _block(family, 16, implementation), []
    plain = plain.float() if is_grouped else plain
    dtype, near = next(plain.parameters()).dtype, {"rtol": 1e-5, "atol": 1e-6} if is_grouped else EXACT
    block, hidden = copy.deepcopy(plain), known(2, 5, 16, seed=dist.get_rank()).to(dtype).requires_grad_()
    mine = hidden.detach().clone().requires_grad_()
    config = ShardConfig(expert_parallel_process_group=dist.group.WORLD, enable_tensor_parallelism=False)
    shard_experts(block, config)
    start = collectives._start_exchange

    def told(*args: Any) -> tuple[Tensor, _Timed]:
        events.append("start")
        found, work = start(*args)
        return found, _Timed(work, events)

    shared = getattr(block, "shared_experts", None) or block.shared_expert
    shared.down_proj.register_forward_hook(lambda *_: events.append("shared"))
    shared.down_proj.register_full_backward_hook(lambda *_: events.append("shared"))
    for weight in block.experts.parameters() if is_grouped else ():
        weight.register_hook(lambda _: events.append("weight"))
    with mock.patch.object(collectives, "_start_exchange", told):
        outputs = block(mine), plain(hidden)
        forward = [events.pop(0) for _ in range(5)]
        outputs[0].square().sum().backward()
    outputs[1].square().sum().backward()
    before = family == "qwen2_moe"
    assert forward == (["shared", "start", "end"] if before else ["start", "shared", "end"]) + ["start", "end"]
    assert before or events == ["start", "end", "start", *["weight"] * 2 * is_grouped, "shared", "end"]
    for found, expected in ((outputs[0], outputs[1]), (mine.grad, hidden.grad)):
        torch.testing.assert_close(found, expected, **near)
    for name, parameter in plain.experts.named_parameters():
        of_rank = parameter.grad.clone()
        dist.all_reduce(of_rank)  # each rank has tokens of its own
        place = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        torch.testing.assert_close(block.experts.get_parameter(name).grad, of_rank[place], **near)
    plain_shared = getattr(plain, "shared_experts", None) or plain.shared_expert
    for found, expected in zip(shared.parameters(), plain_shared.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **near)


def _sonic(
    hidden: Tensor, scores: Tensor, tokens: Tensor, chosen: Tensor, up: Tensor, bias: None, *more: Any, **of: Any
) -> tuple[Tensor, None]:
    """What sonic-moe computes: up [2 * inner, hidden, experts], down [hidden, inner, experts]."""
    down = more[0]
    assert up.shape[2] == down.shape[2] == of["E"] and tokens.dtype == chosen.dtype == torch.int32
    found = torch.zeros_like(hidden)
    for expert in range(of["E"]):
        mine = (chosen == expert).nonzero()[:, 0]
        gate, value = (hidden[tokens[mine].long()] @ up[..., expert].T).chunk(2, -1)
        rows = (nn.functional.silu(gate) * value) @ down[..., expert].T
        found = found.index_add(0, tokens[mine].long(), rows * scores[mine, None])
    return found, None


@distributed(2)
def test_sonicmoe_runs_the_experts_of_each_rank() -> None:
    plain = _block("glm4_moe")
    block = copy.deepcopy(plain)
    block.experts.config._experts_implementation = "sonicmoe"
    shard_experts(block, ShardConfig(expert_parallel_process_group=dist.group.WORLD, enable_tensor_parallelism=False))
    hidden = known(2, 5, 8, seed=dist.get_rank(), grad=True)
    mine = hidden.detach().clone().requires_grad_()
    kernel = SimpleNamespace(activation_type_enum=SimpleNamespace(SWIGLU=0), moe_general_routing_inputs=_sonic)
    with mock.patch("transformers.integrations.sonicmoe.load_sonicmoe_kernel", lambda: kernel):
        outputs = block(mine), plain(hidden)
    for each in outputs:
        each.square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1], **EXACT)
    torch.testing.assert_close(mine.grad, hidden.grad, **EXACT)


def test_first_choices_of_early_tokens_go_first() -> None:
    """Two sequences of three tokens; an expert has room for two choices of each."""
    capacity = ExpertCapacity(factor=1.0, num_experts=3, skips=True)
    capacity._length = 3
    index = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 1], [2, 1], [2, 1]])
    kept = capacity.kept(index)
    assert kept.tolist() == [
        [True, True],
        [True, False],  # both first choices of 0 are taken first
        [True, True],
        [True, True],  # the next sequence starts anew
        [True, True],
        [False, False],
    ]


class _Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.experts, self.shared_experts = nn.Identity(), shared

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden) + self.shared_experts(hidden)


def test_a_shared_expert_that_takes_more_than_tokens_is_left_alone() -> None:
    """As Inkling's, which takes weights of the tokens too."""
    assert SharedExpert.name_in(_Block(nn.Linear(2, 2))) == "shared_experts"
    assert SharedExpert.name_in(_Block(nn.Bilinear(2, 2, 2))) is None
