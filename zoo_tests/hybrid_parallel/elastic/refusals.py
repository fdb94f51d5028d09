"""Snapshots that are refused, and the training that continues after them."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch.utils.data import DataLoader

from booster.elastic.job_environment import VARIABLE, ElasticPlace
from booster.errors import ConfigurationError
from zoo_tests.hybrid_parallel.relayout.chain import boosted
from zoo_tests.hybrid_parallel.relayout.refusals import RECIPE


def refused(folder: str) -> tuple[list[str], bool]:
    """Take snapshots in mid-accumulation and of a plain loader; return what is said, and whether losses stay."""
    said: list[str] = []
    memory = Path(folder) / str(dist.get_rank())
    (memory / "pieces").mkdir(parents=True)
    with patch.dict(os.environ, {VARIABLE: ElasticPlace(str(memory), 4, 4, 1).to_json()}):
        with_mistakes = _losses(folder, said)
    return said, with_mistakes == _losses(None, said)


def _losses(folder: str | None, said: list[str]) -> list[float]:
    """Train three steps; with a folder, take a good snapshot after each, and bad ones."""
    booster, (model, optimizer, scheduler, loader) = boosted(RECIPE, "tp2dp2", {})
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": loader}
    mistakes = {"gradients": state, "loader": {**state, "dataloader": DataLoader(loader.dataset)}}
    losses = []
    for _, batch in zip(range(3), loader, strict=False):
        losses.append(float(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer).loss))
        for mistake in mistakes.values() if folder is not None else ():
            try:
                booster.snapshot(folder, **mistake)
            except ConfigurationError as error:
                said.append(str(error))
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None:
            booster.snapshot(folder, **state)
    return losses
