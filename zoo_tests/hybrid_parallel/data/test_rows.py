"""Batches whose entries list parts of samples, on two replicas: plain numbers, or one sentence on both.

What breaks here first: a replica whose entries agree by chance. Look in `booster/data/rows.py` and its callers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from booster import Booster
from booster.errors import ConfigurationError
from booster.integrations.lightning.inner_model import ReplicaShares
from booster.integrations.replicas import Replicas
from plugins.hybrid_parallel import HybridParallelPlugin
from zoo_tests.harness.ranks import run_on_ranks

_NODES = (1, 1, 4, 3)  # of each graph: on the first replica as many as graphs, by chance


class _Graphs(nn.Module):
    def __init__(self, main: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.score = nn.Linear(6, 5), nn.Linear(5, 1)
        if main is not None:
            self.main_input_name = main

    def forward(self, nodes: Tensor, graph: Tensor, x: Tensor) -> ModelOutput:
        summed = x.index_add(0, graph, nodes).square()
        return ModelOutput(score=self.score(self.inner(summed).tanh())[:, 0])


def _batch(graphs: range) -> dict[str, Tensor]:
    values = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([_NODES[each] for each in graphs])
    nodes = torch.cat([values[each, 2 : 2 + _NODES[each]] for each in graphs])
    graph = torch.arange(len(graphs)).repeat_interleave(counts)
    return {"nodes": nodes, "graph": graph, "x": values[list(graphs), 0], "y": values[list(graphs), 1, 0]}


def _mean(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return (outputs.score - batch["y"]).square().mean()


def _sum(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (outputs.score - batch["y"]).square().sum(), len(batch["y"])


def _train(main: str | None, criterion: Any, graphs: tuple[range, range]) -> list[Any]:
    """Return what each loop gives: the gradients of a replica's graphs, or the refusal."""
    found: list[Any] = []
    for loop in ("execute_pipeline", "ordinary"):
        plugin = HybridParallelPlugin(precision="fp32")
        booster, plain = Booster(plugin=plugin), _Graphs(main)
        model, optimizer = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        batch = _batch(graphs[plugin.dp_rank])
        try:
            if loop == "ordinary":
                inputs = {name: value for name, value in batch.items() if name != "y"}
                booster.backward(criterion(model(**inputs), batch), optimizer)
            else:
                booster.execute_pipeline(iter([batch]), model, criterion=criterion, optimizer=optimizer)
            found.append({name: value.clone() for name, value in optimizer.full_gradients().items()})
        except ConfigurationError as error:
            found.append(str(error))
    shares = ReplicaShares(Replicas(plugin))
    shares.attach(plain := _Graphs(main))
    with shares.step():
        plain(**inputs)
        try:
            found.append(float(shares.weighted(torch.ones(()))))
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(("main", "criterion"), [("x", _mean), (None, _sum), (None, _mean)])
def test_replicas_are_weighted_by_samples(main: str | None, criterion: Any) -> None:
    graphs = (range(2), range(2, 4)) if main is None else (range(3), range(3, 4))
    plain, batch = _Graphs(None), _batch(range(4))
    _mean(plain(batch["nodes"], batch["graph"], batch["x"]), batch).backward()
    for rank, (*of_loops, weight) in enumerate(run_on_ranks(2, _train, main, criterion, graphs)):
        for found in of_loops:
            if main is None and criterion is _mean:
                assert "different numbers of rows" in found and "set main_input_name" in found
                continue
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
        assert weight == (2 * len(graphs[rank]) / 4) if main else "set main_input_name" in weight


def _decoder() -> tuple[nn.Module, dict[str, Any]]:
    """A model and its batch of five samples, whose encoder has run already."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    mask = (torch.arange(9) < torch.tensor([9, 5, 9, 3, 7])[:, None]).long()
    return model, {
        "encoder_outputs": (torch.randn(5, 9, 16),),
        "attention_mask": mask,
        "labels": torch.randint(31, (5, 7)),
    }


def _train_decoder(keeps_class: bool) -> list[tuple[float, float]]:
    """Return the loss and the norm of the gradients of two stages, in both loops."""
    found = []
    for loop in ("execute_pipeline", "ordinary"):
        model, batch = _decoder()
        if keeps_class:
            batch["encoder_outputs"] = BaseModelOutput(*batch["encoder_outputs"])
        booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2))
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if loop == "ordinary":
            loss = model(**batch).loss
            booster.backward(loss, optimizer)
        else:
            loss = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss
        found.append((float(loss.detach()), float(model.clip_grad_norm_(1e9))))
    return found


@pytest.mark.parametrize("keeps_class", [False, True])
def test_nested_entries_go_with_their_samples_through_stages(keeps_class: bool) -> None:
    plain, batch = _decoder()
    loss = plain(**batch).loss
    loss.backward()
    expected = (loss.item(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item())
    for found in run_on_ranks(2, _train_decoder, keeps_class):
        assert all(each == pytest.approx(expected, rel=1e-5) for each in found), (found, expected)
