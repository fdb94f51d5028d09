"""Lightning's Fabric on boosted models: the numbers of one plain process, and checkpoints between layouts.

What breaks here first: how Fabric calls a strategy, or wraps what `setup` returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from zoo_tests.booster.integrations.lightning import jobs
from zoo_tests.harness.ranks import run_on_ranks

pytestmark = pytest.mark.slow
TOLERANCE = 1e-6
EPOCHS, CLIP = 2, 0.7


def trained(folder: str, layout: str | None, resume: str | None = None, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train a classifier in a loop of Fabric, which accumulates over two batches; save at the end."""
    torch.manual_seed(11)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=jobs.strategy_of(layout))
    fabric.launch()
    model = jobs.bert().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(jobs.loader(jobs.samples("bert", 16), layout))
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resume is not None:
        fabric.load(resume, state)
    logs = []
    for epoch in range(state["epoch"], epochs):
        for index, batch in enumerate(batches):
            is_last = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = model(**batch).loss
                fabric.backward(loss / 2)
            logs.append(float(loss.detach()))
            if is_last:
                norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                logs.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] = epoch + 1
    fabric.save(Path(folder) / "state", state)
    rows = torch.tensor(float(len(batch["input_ids"])))
    return {
        "logs": logs,
        "weights": _weights(fabric, model, folder),
        "rows": float(fabric.all_reduce(rows, reduce_op="sum")),
        "gathered": fabric.all_gather(rows).sum().item(),
        "told": fabric.broadcast({"rank": fabric.global_rank}),
    }


def _weights(fabric: Any, model: Any, folder: str) -> dict[str, torch.Tensor]:
    if not hasattr(fabric.strategy, "save_model"):
        return {name: each.detach().clone() for name, each in model.module.named_parameters()}
    final = str(Path(folder) / "final")
    fabric.strategy.save_model(final, model)
    return dict(type(jobs.bert()).from_pretrained(final).named_parameters())


def check_same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["logs"] == pytest.approx(plain["logs"], rel=TOLERANCE, abs=0)
    assert ours["weights"].keys() == plain["weights"].keys()
    for name, each in plain["weights"].items():
        torch.testing.assert_close(ours["weights"][name], each, rtol=0, atol=TOLERANCE)
    assert (ours["rows"], ours["gathered"]) == (plain["rows"], plain["gathered"])
    assert ours["told"] == {"rank": 0}


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2"])
def test_a_loop_has_the_numbers_of_one_process(layout: str, tmp_path: Path) -> None:
    plain = trained(str(tmp_path / "plain"), None)
    for ours in run_on_ranks(jobs.ranks_of(layout), trained, str(tmp_path / "boosted"), layout):
        check_same(ours, plain)


def test_training_goes_on_in_another_layout(tmp_path: Path) -> None:
    plain = trained(str(tmp_path / "plain"), None)
    run_on_ranks(2, trained, str(tmp_path / "first"), "tp2", None, 1)
    [ours, _] = run_on_ranks(2, trained, str(tmp_path / "second"), "pp2", str(tmp_path / "first" / "state"))
    ours["logs"] = plain["logs"][: len(plain["logs"]) // 2] + ours["logs"]
    check_same(ours, plain)
