"""Parameters that not every rank uses: not every replica, or not every part of a sequence.

What breaks here first: collectives that are launched in another order on a rank whose backward pass never completes a
bucket. That hangs, or crashes, or adds up the wrong gradients.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import distributed, run_on_ranks

_SIZE = 64


class _Branches(nn.Module):
    """Each batch goes through the branch that its first row names; the first branch is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(_SIZE, _SIZE), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(_SIZE, 1)

    def forward(self, rows: Tensor, branch: Tensor) -> Tensor:
        return self.head(self.branches[int(branch[0])](rows)).mean()


def _train(zero_stage: int, overlap: bool) -> None:
    # A bucket for every parameter or two.
    plugin = HybridParallelPlugin(zero_stage=zero_stage, overlap_communication=overlap, zero_bucket_size_in_mb=0.005)
    booster, plain = Booster(plugin=plugin), _Branches().double()
    model = _Branches().double()
    model.load_state_dict(plain.state_dict())
    model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        rows = torch.randn(2, 5, _SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        taken = [torch.full((5,), value) for value in ((1, 2), (2, 2), (2, 1))[step]]
        booster.backward(model(rows=rows[plugin.dp_rank], branch=taken[plugin.dp_rank]), optimizer)
        reference.zero_grad()
        sum(plain(part, branch) / 2 for part, branch in zip(rows, taken, strict=True)).backward()
        expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        found = optimizer.full_gradients()
        assert set(found) == set(expected), "what nobody has used keeps no gradient"
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14, check_device=False)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    for name, param in model.unwrap().named_parameters():
        torch.testing.assert_close(
            param, dict(plain.named_parameters())[name], rtol=1e-12, atol=1e-14, check_device=False
        )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_replicas_that_use_other_parameters(zero_stage: int, overlap: bool) -> None:
    run_on_ranks(2, _train, zero_stage, overlap)


class _OfFirstHalf(LlamaMLP):
    """A feed-forward that the first half of each sequence goes through, as experts do that few tokens choose."""

    def forward(self, x: Tensor) -> Tensor:
        if "shares" in vars(self):
            return super().forward(x) if self.shares else torch.zeros_like(x)
        first, second = x.chunk(2, dim=1)
        return torch.cat([super().forward(first), torch.zeros_like(second)], dim=1)


@distributed(2)
def test_ranks_whose_tokens_reach_other_parameters() -> None:
    plugin = HybridParallelPlugin(
        tp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all", check_layout="off"
    )
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(1)
    models = [LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.model.layers[0].mlp.__class__ = _OfFirstHalf
    plain, model = models
    model.model.layers[0].mlp.shares = dist.get_rank() == 0
    ids = torch.randint(1, 33, (2, 8), generator=torch.Generator().manual_seed(3))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(input_ids=ids, labels=ids).loss.backward()
    reference.step()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
    optimizer.step()
    for name, param in model.unwrap().model.layers.named_parameters():
        torch.testing.assert_close(param, plain.model.layers.get_parameter(name), rtol=1e-6, atol=1e-8)
