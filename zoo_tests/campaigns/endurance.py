"""Train for thousands of steps in each kind of layout, and see what grows: memory, files, threads, Python's objects.

    python -m zoo_tests.campaigns.endurance --steps 2000 --resume endurance.jsonl --output docs/results/endurance.md

Blocks of steps take turns in the ordinary loop and in `execute_pipeline`. Between looks at the processes there are
an evaluation, tokens by `generate`, and a checkpoint that is read again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shardformer.utils.freed_memory import return_freed_memory
from zoo_tests.harness.case import LAYOUTS, Case, Recipe
from zoo_tests.harness.ranks import RankPool
from zoo_tests.harness.train_sharded import Boosted, boost

KINDS = ("memory, KB", "shared memory, KB", "files", "threads", "objects")  # what is looked at
_LOOP = 50  # steps in one loop, before the other one takes over

_LLAMA = Recipe(family="llama", head="causal_lm", precision="fp32", optimizer="adamw", rows=4)
_ADAPTED = replace(_LLAMA, adapters=("q_proj", "down_proj"))


def _pipeline(style: str, num_chunks: int) -> Case:
    options = (("pp_style", style), ("num_model_chunks", num_chunks), ("num_microbatches", 4))
    return Case(recipe=replace(_LLAMA, stages=2 * num_chunks), layout="pp2", options=options)


CASES = {
    "ZeRO-1": Case(recipe=_LLAMA, layout="dp2", zero_stage=1),
    "ZeRO-2": Case(recipe=_LLAMA, layout="dp2", zero_stage=2),
    "ZeRO-3": Case(recipe=_LLAMA, layout="dp2", zero_stage=3),
    "ZeRO-3, offloaded": Case(recipe=_LLAMA, layout="dp2", zero_stage=3),
    "1f1b": _pipeline("1f1b", 1),
    "gpipe": _pipeline("gpipe", 1),
    "zero_bubble": _pipeline("zero_bubble", 1),
    "interleaved": _pipeline("interleaved", 2),
    "zbv": _pipeline("zbv", 2),
    "dualpipev": _pipeline("dualpipev", 2),
    "context": Case(recipe=_LLAMA, layout="cp2"),
    "experts": Case(recipe=replace(_LLAMA, family="mixtral"), layout="dp2", options=(("ep_size", 2),)),
    "LoRA under tp": Case(recipe=_ADAPTED, layout="tp2"),
    "LoRA under ZeRO-3": Case(recipe=_ADAPTED, layout="dp2", zero_stage=3),
}


def endure(name: str, steps: int, every: int, folder: Path) -> list[list[float]]:
    """Train on this rank; return the values of `KINDS` after each `every` steps."""
    case = CASES[name]
    if name.endswith("offloaded"):
        places = ("offload_optimizer", "offload_parameters", "offload_activations")
        case = replace(case, options=tuple((place, str(folder / "away")) for place in places))
        (folder / "away").mkdir(exist_ok=True)
    boosted = boost(case)
    batches = [boosted.share(case.recipe.batch(step)) for step in range(4)]
    looks = []
    for step in range(1, steps + 1):
        backward = boosted.ordinary_backward if step // _LOOP % 2 else boosted.pipeline_backward
        backward(batches[step % 4]).item()
        boosted.finish_step()
        if step % every == 0:
            _between(boosted, batches[0], folder / "saved" / str(step))
            looks.append(_look())
    return looks


def _between(boosted: Boosted, batch: dict[str, torch.Tensor], directory: Path) -> None:
    """What a script does between epochs."""
    model, booster = boosted.model, boosted.booster
    model.eval()
    with torch.no_grad():
        model(**batch).loss.item()
    booster.execute_pipeline(iter([batch]), model, return_outputs=True).loss.item()
    if boosted.plugin.mesh["cp"].size() == 1:  # which generates no tokens
        model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=2)
    model.train()
    state = {"model": model, "optimizer": boosted.optimizer, "lr_scheduler": boosted.scheduler}
    booster.save_checkpoint(directory, **state, keep_last=1)
    booster.load_checkpoint(directory, **state)


def _look() -> list[float]:
    return_freed_memory()  # but no garbage is collected: how often that happens is part of what is measured
    status = Path("/proc/self/status").read_text()
    memory, shared = (int(re.search(rf"Rss{kind}:\s+(\d+)", status)[1]) for kind in ("Anon", "Shmem"))
    files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return [memory, shared, files, threads, len(gc.get_objects())]


def slopes(looks: Sequence[Sequence[float]], every: int) -> dict[str, float]:
    """Return what a step adds to each of `KINDS`, by least squares over the last two thirds of the looks."""
    level = torch.tensor(looks, dtype=torch.float64)[len(looks) // 3 :]
    steps = every * torch.arange(len(level), dtype=torch.float64)
    steps -= steps.mean()
    found = steps @ (level - level.mean(0)) / steps.square().sum()
    return dict(zip(KINDS, found.tolist(), strict=True))


def worst_of_ranks(name: str, steps: int, every: int) -> dict[str, float]:
    """Train on fresh processes; return the largest slope of each kind over the ranks."""
    pool = RankPool(LAYOUTS[CASES[name].layout].world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = pool.run(endure, (name, steps, every, Path(folder)), {}, timeout_s=120.0 + 4.0 * steps)
    finally:
        pool.stop()
    found = [slopes(looks, every) for looks in ranks]
    return {kind: max(each[kind] for each in found) for kind in KINDS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m zoo_tests.campaigns.endurance", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between two looks")
    parser.add_argument("--only", default="", help="layouts whose names match this regular expression")
    parser.add_argument("--resume", type=Path, help="file of results, which are not measured again")
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    if options.resume is not None and options.resume.exists():
        found = {
            name: row for line in options.resume.read_text().splitlines() for name, row in json.loads(line).items()
        }
    for name in CASES:
        if name in found or not re.search(options.only, name):
            continue
        found[name] = {"steps": options.steps, **worst_of_ranks(name, options.steps, options.every)}
        print(name, found[name], flush=True)
        if options.resume is not None:
            with options.resume.open("a") as file:
                file.write(json.dumps({name: found[name]}) + "\n")
    head = ["layout", "steps", *KINDS]
    rows = [[name, f"{row['steps']:g}", *(f"{row[kind]:.3f}" for kind in KINDS)] for name, row in found.items()]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    text = __doc__.split("\n\n", 2)[2].replace("\n", " ").strip()
    page = (
        "# Endurance\n\nWritten by `python -m zoo_tests.campaigns.endurance`: what a step adds to a rank, after the "
        f"first third, on the rank where it adds most. {text}\n\n" + "\n".join(lines) + "\n"
    )
    print(page)
    if options.output is not None:
        options.output.write_text(page)


if __name__ == "__main__":
    importlib.import_module("zoo_tests.campaigns.endurance").main()  # ranks find its functions by this name
