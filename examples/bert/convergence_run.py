"""One run of the convergence benchmark; `convergence.py` starts it on the ranks of the layout.

The reference run uses only transformers and torch, so that a bug of this project cannot affect it; with
`--reproducible` it is one process of the booster, whose bits every layout must reproduce.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from booster.arguments import RankParser

import torch
import torch.distributed as dist
from arguments import positive_float, positive_int
from data import PairDataset, eval_loader, steps_per_epoch, train_loader
from layouts import GLOBAL_BATCH_SIZE, LAYOUTS, MICROBATCH_SIZE, WARMUP_FRACTION, Layout
from metrics import Counts
from model import MINILM, load_model
from report import hash_of_weights, write_json
from tasks import TASKS, load_pairs, shorten
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

_EVAL_BATCH_SIZE = 64
_PRECISIONS = ("fp64", "fp32", "bf16", "fp16")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train under one layout, and write `<name>.json` to the output directory."""
    options = parser().parse_args(arguments)
    layout = LAYOUTS[options.layout]
    by_booster = layout.is_sharded or options.reproducible
    result = run_boosted(options, layout) if by_booster else run_reference(options)
    if result is not None:
        write_json(options.output / f"{layout.name}.json", {"settings": settings_of(options), **result})


def parser() -> RankParser:
    """Create the parser of the options that determine the results; `convergence.py` shares it."""
    parsed = RankParser(add_help=False)
    add = parsed.add_argument
    add("--layout", choices=tuple(LAYOUTS), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--task", choices=TASKS, default="mrpc", help="what to learn")
    add("--data-dir", type=Path, help="where msr_paraphrase_{train,test}.txt lie (default: GLUE/MRPC from the hub)")
    add("--model", default=MINILM, metavar="NAME_OR_PATH", help="minilm, a directory, or a name on the hub")
    add("--precision", choices=_PRECISIONS, default="fp32", help="of the sharded runs; fp64 also of the unsharded one")
    add("--epochs", type=positive_int, default=3, help="passes over the training pairs")
    add("--lr", type=positive_float, default=2.4e-5, help="peak learning rate")
    add("--steps", type=positive_int, help="stop after so many steps and do not evaluate")
    add("--max-length", type=positive_int, default=128, help="longer pairs are cut to this many tokens")
    add("--limit", type=positive_int, help="use only so many training pairs")
    add("--eval-limit", type=positive_int, help="use only so many evaluation pairs")
    add("--reproducible", action="store_true", help="train to the same bits under every layout; pads to --max-length")
    add("--unit", type=positive_int, default=1, help="samples of a pass with --reproducible; larger ones are faster")
    add("--seed", type=int, default=42, help="of the order of pairs and of new weights")
    add("--output", type=Path, default=Path("runs/convergence"), help="directory of the results")
    return parsed


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that determine the results of a run, for JSON."""
    names = ("task", "model", "precision", "epochs", "lr", "steps", "max_length", "limit", "eval_limit")
    names += ("reproducible", "unit", "seed")
    return {name: getattr(options, name) for name in names}


def run_reference(options: argparse.Namespace) -> dict[str, Any]:
    """Run the plain loop on one process in fp32 (fp64 on request); every layout must reproduce its losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer, schedule, training, evaluation = _prepare(options, GLOBAL_BATCH_SIZE, 1)
    model.to(device).train()

    def step(batch: dict[str, Tensor]) -> float:
        total, rows = 0.0, len(batch["labels"])
        for start in range(0, rows, MICROBATCH_SIZE):
            part = {name: values[start : start + MICROBATCH_SIZE].to(device) for name, values in batch.items()}
            loss = model(**part).loss * (len(part["labels"]) / rows)  # the mean over the whole batch
            loss.backward()
            total += loss.item()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return total

    def predict(batch: dict[str, Tensor]) -> Any:
        return model(**{name: values.to(device) for name, values in batch.items() if name != "labels"})

    losses = [step(batch) for batch in _batches(training, training.sampler.set_epoch, options)]
    if options.steps:
        return {"losses": losses}
    model.eval()
    return {"losses": losses, **_evaluate(evaluation, predict, device).metrics().as_dict()}


def run_boosted(options: argparse.Namespace, layout: Layout) -> dict[str, Any] | None:
    """Run the same training with the booster; return the result on rank 0, None on the other ranks."""
    from booster import Booster, launch_from_torch
    from plugins.hybrid_parallel import HybridParallelPlugin

    launch_from_torch(seed=options.seed)
    plugin = HybridParallelPlugin(
        tp_size=layout.tp_size,
        pp_size=layout.pp_size,
        dp_size=layout.dp_size,
        zero_stage=layout.zero_stage,
        precision="fp32" if options.precision == "fp64" else options.precision,  # fp32 keeps the model's own dtype
        microbatch_size=MICROBATCH_SIZE,
        reproducible=options.reproducible,
        reproducible_unit=options.unit,
        reproducible_sequence_blocks=1,  # no layout cuts sequences, and whole ones are faster
    )
    booster = Booster(plugin=plugin)
    objects = _prepare(options, GLOBAL_BATCH_SIZE // layout.dp_size, layout.dp_size)
    model, optimizer, schedule, training, evaluation = booster.boost(*objects)

    def step(batch: dict[str, Tensor]) -> float:
        result = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return result.loss.item()

    def predict(batch: dict[str, Tensor]) -> Any:
        return booster.execute_pipeline(iter([batch]), model, return_loss=False, return_outputs=True).outputs

    model.train()
    losses = [step(batch) for batch in _batches(training, training.set_epoch, options)]
    result = {"losses": losses}
    if options.reproducible:
        booster.save_model(model, options.output / layout.name)
        result["weights"] = hash_of_weights(options.output / layout.name)
    if options.steps:
        return result if dist.get_rank() == 0 else None
    model.eval()
    counts = _evaluate(evaluation, predict, torch.device(plugin.mesh.device_type))
    dist.all_reduce(counts.values, group=plugin.mesh["dp"].get_group())
    return {**result, **counts.metrics().as_dict()} if dist.get_rank() == 0 else None


def _prepare(options: argparse.Namespace, batch_size: int, dp_size: int) -> tuple[Any, ...]:
    """Create (model, optimizer, schedule, training, evaluation); only the batch per replica depends on the layout."""
    from transformers import get_linear_schedule_with_warmup

    train_pairs, eval_pairs = load_pairs(options.task, options.data_dir, options.seed)
    # Dropout masks differ between layouts; without dropout the curves must coincide.
    model, tokenizer = load_model(options.model, options.seed, dropout=False)
    if options.precision == "fp64":
        model.double()
    train = PairDataset(shorten(train_pairs, options.limit), tokenizer, options.max_length)
    evaluation = PairDataset(shorten(eval_pairs, options.eval_limit), tokenizer, options.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    steps = options.epochs * steps_per_epoch(len(train), batch_size * dp_size)
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP_FRACTION * steps), steps)
    # How a matrix product rounds depends on its shape: the same bits need the same padding in every layout.
    length = options.max_length if options.reproducible else None
    training = train_loader(train, tokenizer, batch_size, options.seed, length)
    return model, optimizer, schedule, training, eval_loader(evaluation, tokenizer, _EVAL_BATCH_SIZE // dp_size, length)


def _batches(
    loader: DataLoader, set_epoch: Callable[[int], None], options: argparse.Namespace
) -> Iterator[dict[str, Tensor]]:
    """Yield the training batches of all epochs, or the first `--steps`, with a progress bar on rank 0."""
    total = options.steps or options.epochs * len(loader)
    silent = dist.is_initialized() and dist.get_rank() != 0
    done = 0
    with tqdm(total=total, desc=options.layout, disable=silent, dynamic_ncols=True) as progress:
        for epoch in range(options.epochs):
            set_epoch(epoch)
            for batch in loader:
                if done == total:
                    return
                yield batch
                done += 1
                progress.update()


@torch.no_grad()
def _evaluate(loader: DataLoader, predict: Callable[[dict[str, Tensor]], Any], device: torch.device) -> Counts:
    """Return the counts over the pairs that `loader` yields on this rank."""
    counts = Counts(device)
    for batch in loader:
        outputs = predict(batch)
        if len(batch["labels"]):  # a replica's share of the last batch may be empty
            counts.add(outputs.logits, batch["labels"])
    return counts


if __name__ == "__main__":
    main()
