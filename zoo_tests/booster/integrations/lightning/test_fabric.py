"""Lightning's Fabric on boosted models: the numbers of one plain process, and checkpoints between layouts.

What breaks here first: how Fabric calls a strategy, or wraps what `setup` returns.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.loggers import CSVLogger
from torch import Tensor
from transformers import BertForSequenceClassification

from booster.errors import ConfigurationError
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


class Scored(BertForSequenceClassification):
    """A classifier with a method of its own that calls the model, for its loss and one of the logits."""

    def losses_of(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = self(**batch)
        return outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])


def launched(folder: str, layout: str | None) -> dict[str, Any]:
    """Let `fabric.launch` run a script, which also logs to a file; return what it gave and printed."""
    logger = CSVLogger(folder, name="log", version="0")
    precision = "bf16-mixed" if layout != "pp2" else None  # refused in a pipeline
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, strategy=jobs.strategy_of(layout), precision=precision, loggers=logger
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        given = fabric.launch(_script, layout)
    logger.save()
    return {**given, "printed": printed.getvalue()}


def _script(fabric: Any, layout: str | None) -> dict[str, Any]:
    torch.manual_seed(11)
    with fabric.init_module():
        model = Scored(jobs.bert().config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("losses_of")
    fabric.print("parameters:", model.num_parameters())
    batches = fabric.setup_dataloaders(jobs.loader(jobs.samples("bert", 7), layout))
    losses = []
    for step, batch in enumerate(itertools.chain(batches, batches)):
        loss, own = model.losses_of(batch)
        fabric.backward(loss + 0.3 * own)
        optimizer.step()
        optimizer.zero_grad()
        fabric.log("loss", loss, step=step)
        losses.append(float(loss.detach()))
    with fabric.autocast(), torch.no_grad():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    model.eval()
    with torch.no_grad():
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return {"losses": losses, "computed in": product.dtype, "logits": logits.dtype}


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_what_a_script_uses_around_its_loop(layout: str, tmp_path: Path) -> None:
    plain = launched(str(tmp_path / "plain"), None)
    first, other = run_on_ranks(2, launched, str(tmp_path / "boosted"), layout)
    assert first["printed"] == plain["printed"] and not other["printed"], "one rank prints"
    # A method that calls the model gives the loss of the global batch, whose last share is short, and trains on it.
    assert first["losses"] == other["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    with (tmp_path / "boosted" / "log" / "0" / "metrics.csv").open(newline="") as file:
        logged = [float(row["loss"]) for row in csv.DictReader(file)]
    assert logged == first["losses"], "written once"
    if layout != "pp2":
        assert first["computed in"] == plain["computed in"] == torch.bfloat16
        assert first["logits"] == plain["logits"] == torch.float32


def methods(layout: str | None) -> dict[str, Any]:
    """Call methods of a model through Fabric's wrapper, as it was set up for training."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=jobs.strategy_of(layout))
    fabric.launch()
    model = jobs.llama().double()
    model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.mark_forward_method("generate")
    model.eval()
    prompt = torch.tensor([[5, 9, 11], [7, 4, 30]])
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    strategy = fabric.strategy
    whole = strategy.whole_state_dict(model) if hasattr(strategy, "whole_state_dict") else model.state_dict()
    try:
        pickle.dumps(model.state_dict())
        refused = ""
    except ConfigurationError as error:
        refused = str(error)
    return {
        "tokens": tokens.tolist(),
        "whole": {name: each.detach().clone() for name, each in whole.items()},
        "refused": refused,
        "asked": (model.config.hidden_size, model.num_parameters(), model.training),
    }


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_methods_of_the_model_through_the_wrapper(layout: str) -> None:
    plain = methods(None)
    for ours in run_on_ranks(2, methods, layout):
        assert ours["tokens"] == plain["tokens"]
        assert ours["asked"] == plain["asked"]
        assert list(ours["whole"]) == list(plain["whole"])
        assert all(torch.equal(ours["whole"][name], each) for name, each in plain["whole"].items())
        assert "this rank's part of the model alone" in ours["refused"], "shards are not written as if they were whole"
