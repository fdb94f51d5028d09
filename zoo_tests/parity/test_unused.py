"""Parameters that not every replica uses, in a model that is not transformers'.

What breaks here first: collectives that are launched in another order on a rank whose backward pass never completes a
bucket. That hangs, or crashes, or adds up the wrong gradients.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from booster import Booster
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks

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
