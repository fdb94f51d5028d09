"""Interrupt training at a random step, go on in fresh processes, compare with the numbers of an uninterrupted run.

    python -m zoo_tests.campaigns.resume --repetitions 100 --output docs/results/resume.md

What is trained draws random numbers wherever training can: dropout in the model, augmentation of the samples (torch's,
Python's and numpy's numbers), shuffling by a generator of the user's, noise in the loop itself; the fp16 loss scale
grows and overflows on the way.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from plugins.hybrid_parallel.checkpoint.tensor_file import Manifest
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import RankPool
from zoo_tests.harness.train_sharded import boost

TRIED = ("single", "dp2", "tp2", "pp2", "tp2pp2", "tp2dp2", "pp2dp2", "dp4")
PRECISIONS = ("fp32", "fp16", "bf16")
SAMPLES, BATCH, EPOCHS = 13, 2, 3
_DROPOUT = (("hidden_dropout_prob", 0.2), ("attention_probs_dropout_prob", 0.2))

# A step as bits: loss, learning rate, loss scale, checksum of the batch, what the loop drew.
Trace = list[list[Any]]


def case_of(layout: str, precision: str) -> Case:
    """A BERT with dropout on a layout; the loss scale of fp16 overflows now and then."""
    recipe = Recipe(family="bert", head="sequence", optimizer="adamw", precision=precision, config=_DROPOUT)
    options = (("growth_interval", 2), ("initial_scale", 2.0**15)) if precision == "fp16" else ()
    return Case(recipe=recipe, layout=layout, options=(*options, ("num_microbatches", 2)))


class Augmented(Dataset):
    """Samples that are different each time, from all three sources of random numbers."""

    def __init__(self, case: Case) -> None:
        batches = [case.recipe.batch(step) for step in range(-(-SAMPLES // case.recipe.rows))]
        length = min(batch["input_ids"].shape[1] for batch in batches)
        self.columns = {
            key: torch.cat([batch[key][:, :length] if batch[key].dim() > 1 else batch[key] for batch in batches])
            for key in batches[0]
        }

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = {key: column[index].clone() for key, column in self.columns.items()}
        ids, count = sample["input_ids"], len(sample["input_ids"])
        ids[random.randrange(count)] = int(torch.randint(1, 900, ()))
        ids[np.random.randint(count)] = 1 + int(900 * random.random())
        return sample


def train(case: Case, directory: Path, start: bool, stop: int | None, forget: str | None = None) -> Trace:
    """Train from the start or the checkpoint, up to step `stop` where a checkpoint is saved, or to the end.

    Args:
        forget: name in `FORGOTTEN`, of what is left out of the checkpoint when it is read.
    """
    torch.manual_seed(11 if start else 12)  # fresh processes need not be seeded alike
    random.seed(start)
    np.random.seed(int(start))
    boosted = boost(case)
    generator = torch.Generator().manual_seed(5 if start else 6)
    loader = DataLoader(Augmented(case), batch_size=BATCH, shuffle=True, generator=generator)
    loader = boosted.booster.boost(loader)
    state = {
        "model": boosted.model,
        "optimizer": boosted.optimizer,
        "lr_scheduler": boosted.scheduler,
        "dataloader": loader,
    }
    done, trace = 0, []
    if not start:
        if forget is not None:
            _forget(FORGOTTEN[forget])
        done = boosted.booster.load_checkpoint(directory, **state)["done"]
    first = loader.epoch
    for _ in range(first, EPOCHS):
        batches = iter(loader)
        while (batch := next(batches, None)) is not None:
            trace.append(_step(boosted, batch))
            done += 1
            if done == stop:
                boosted.booster.save_checkpoint(directory, **state, done=done)
                return trace
    trace.append([_fingerprint(*boosted.model.parameters())])
    return trace


def _step(boosted: Any, batch: dict[str, Tensor]) -> list[Any]:
    lr = boosted.scheduler.get_last_lr()
    drawn = [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.rand(()))]
    seen = _fingerprint(*(value for _, value in sorted(batch.items())))
    loss = boosted.pipeline_backward(batch).item()
    boosted.finish_step()
    return [loss, *lr, boosted.optimizer.loss_scale.value, seen, *drawn]


def _fingerprint(*tensors: Tensor) -> list[float]:
    weights = [torch.arange(1, tensor.numel() + 1).view(tensor.shape) for tensor in tensors]
    return [float((tensor.detach().double() * weight).sum()) for tensor, weight in zip(tensors, weights, strict=True)]


def steps_of(case: Case) -> int:
    """Optimizer steps of the whole training."""
    return -(-SAMPLES // (BATCH * LAYOUTS[case.layout].dp_size)) * EPOCHS


# ----- what happens if a field of the state is left out -----


def _drop_tensors(*ends: str) -> Callable[[Manifest], None]:
    def drop(manifest: Manifest) -> None:
        kept = {name: each for name, each in manifest.tensors.items() if not name.endswith(ends)}
        assert len(kept) < len(manifest.tensors), ends
        manifest.tensors = kept

    return drop


def _drop_state(*keys: str, instead: Any = None) -> Callable[[Manifest], None]:
    def drop(manifest: Manifest) -> None:
        place = manifest.state
        for key in keys[:-1]:
            place = place[key]
        assert place[keys[-1]] not in (None, {}), keys
        place[keys[-1]] = instead

    return drop


def _as_at_the_start(manifest: Manifest) -> None:
    for group in manifest.state["optimizer"]["param_groups"]:
        group.clear()
    manifest.state["lr_scheduler"] = None


def _without_steps(manifest: Manifest) -> None:
    for numbers in manifest.state["optimizer"]["numbers"].values():
        numbers["step"] = ["float32", 0.0]


FORGOTTEN: dict[str, Callable[[Manifest], None]] = {
    "a weight of the model": _drop_tensors("/bert.encoder.layer.0.output.dense.weight"),
    "a master weight": _drop_tensors("classifier.weight/master"),
    "the first moments": _drop_tensors("/exp_avg"),
    "the second moments": _drop_tensors("/exp_avg_sq"),
    "the steps of the moments": _without_steps,
    "groups and schedule": _as_at_the_start,
    "the scheduler": _drop_state("lr_scheduler"),
    "the loss scale": _drop_state("optimizer", "loss_scale", instead={}),
    "the loader": _drop_state("dataloader"),
    "the epoch": _drop_state("dataloader", "epoch", instead=0),
    "the position in the epoch": _drop_state("dataloader", "samples", instead=0),
    "the loader's seed": _drop_state("dataloader", "seed", instead=1),
    "the sampler's generator": _drop_state("dataloader", "sampler", instead={}),
    "torch's random state": _drop_tensors("/torch_cpu"),
    "the model's random stream": _drop_tensors("/stream_cpu"),
    "Python's random state": _drop_tensors("/python"),
    "Python's half of a pair of normal numbers": _drop_tensors("/python_gauss"),
    "numpy's random state": _drop_tensors("/numpy"),
}


def _forget(drop: Callable[[Manifest], None]) -> None:
    """From now on this process reads manifests without a field."""
    read = Manifest.read.__func__

    def read_without(cls: type[Manifest], path: Path) -> Manifest:
        manifest = read(cls, path)
        drop(manifest)
        return manifest

    Manifest.read = classmethod(read_without)


# ----- the campaign -----


@dataclass
class Resumed:
    """A training that was interrupted, beside one that was not; rank 0's numbers, and those of the others."""

    uninterrupted: list[Trace]
    before: list[Trace]
    after: list[Trace]

    @property
    def is_exact(self) -> bool:
        """Whether all ranks saw the very same bits."""
        joined = [before + after for before, after in zip(self.before, self.after, strict=True)]
        return joined == self.uninterrupted


def fresh(case: Case, *args: Any, **kwargs: Any) -> list[Trace]:
    """`train` on processes of its own."""
    pool = RankPool(LAYOUTS[case.layout].world_size)
    try:
        return pool.run(train, (case, *args), kwargs, timeout_s=120.0)
    finally:
        pool.stop()


def interrupt(case: Case, stop: int, uninterrupted: list[Trace], folder: Path) -> Resumed:
    """Stop after `stop` steps, go on in fresh processes."""
    before = fresh(case, folder / "state", True, stop)
    return Resumed(uninterrupted, before, fresh(case, folder / "state", False, None))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m zoo_tests.campaigns.resume", description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args(arguments)
    chooser, rows = random.Random(0), {}
    whole: dict[Case, list[Trace]] = {}
    for number in range(options.repetitions):
        case = case_of(TRIED[number % len(TRIED)], PRECISIONS[number // len(TRIED) % len(PRECISIONS)])
        with tempfile.TemporaryDirectory() as folder:
            if case not in whole:
                whole[case] = fresh(case, Path(folder) / "state", True, None)
            stop = chooser.randrange(1, steps_of(case))
            exact = interrupt(case, stop, whole[case], Path(folder)).is_exact
        tried, good = rows.get(case.layout, (0, 0))
        rows[case.layout] = (tried + 1, good + exact)
        print(f"{number + 1}: {case.layout} {case.recipe.precision} stopped at {stop}: {exact}", flush=True)
    lines = ["| layout | interruptions | bitwise equal |", "|---|---|---|"]
    lines += [f"| {layout} | {tried} | {good} |" for layout, (tried, good) in rows.items()]
    lines.append(f"| all | {sum(tried for tried, _ in rows.values())} | {sum(good for _, good in rows.values())} |")
    title = "# Interrupted and resumed\n\nWritten by `python -m zoo_tests.campaigns.resume`. "
    text = title + "fp32, fp16 and bf16, at random steps.\n\n" + "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
