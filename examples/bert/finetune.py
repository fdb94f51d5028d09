"""Fine-tune a BERT model on sentence pairs with tensor, pipeline and data parallelism.

    booster run --nproc-per-node 4 examples/bert/finetune.py --tp 2 --pp 2
    booster run --nproc-per-node 2 examples/bert/finetune.py --tp 2 --tiny      # without a pretrained model, in seconds

The remaining ranks are data-parallel. The result is a Hugging Face directory in `--output`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster import Booster, ConfigurationError, launch_from_torch
from booster.arguments import RankParser
from booster.integrations.next_commands import command_to_export
from booster.launch import command_of_this_job
from plugins.hybrid_parallel import HybridParallelPlugin

import torch
import torch.distributed as dist
from arguments import positive_float, positive_int
from data import PairDataset, eval_loader, steps_per_epoch, train_loader
from metrics import Counts, Metrics
from model import MINILM, TINY, load_model
from report import peak_memory_of_ranks, plot_losses, prepare_directory, print_table, write_json
from tasks import TASKS, load_pairs, shorten
from tqdm import tqdm

_WARMUP_FRACTION = 0.1
_MAX_NORM = 1.0
_CHECKPOINTS = "checkpoints"
_KEPT = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate, save and report."""
    options = parse_arguments(arguments)
    launch_from_torch(seed=options.seed)
    plugin = HybridParallelPlugin(
        tp_size=options.tp,
        pp_size=options.pp,
        zero_stage=options.zero,
        precision=options.precision or ("bf16" if torch.cuda.is_available() else "fp32"),
        num_microbatches=options.microbatches,
        max_norm=_MAX_NORM,
    )
    prepare_directory(options.output, "--output")
    if options.plot:
        prepare_directory(options.plot.parent, "--plot")
    FineTuning(options, plugin).run()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = RankParser(description="Fine-tune a BERT on sentence pairs with hybrid parallelism.")
    add = parser.add_argument
    add("--task", choices=TASKS, default="topics", help="what to learn")
    add("--data-dir", type=Path, help="where msr_paraphrase_{train,test}.txt lie (default: GLUE/MRPC from the hub)")
    add("--model", default=MINILM, metavar="NAME_OR_PATH", help="minilm, a directory, or a name on the hub")
    add("--tiny", action="store_true", help="a look at it: --model tiny --limit 128 --eval-limit 64")
    add("--tp", type=positive_int, default=1, help="tensor-parallel ranks")
    add("--pp", type=positive_int, default=1, help="pipeline stages")
    add("--zero", type=int, choices=(0, 1), default=1, help="ZeRO stage")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on GPUs, fp32 on CPUs")
    add("--microbatches", type=positive_int, help="micro-batches a batch is cut into (default: one a stage)")
    add("--epochs", type=positive_int, default=1, help="passes over the training pairs")
    add("--lr", type=positive_float, default=2e-4, help="peak learning rate")
    add("--batch-size", type=positive_int, default=32, help="pairs a step of one data-parallel replica")
    add("--max-length", type=positive_int, default=48, help="longer pairs are cut to this many tokens")
    add("--limit", type=positive_int, help="use only so many training pairs")
    add("--eval-limit", type=positive_int, help="use only so many evaluation pairs")
    add("--seed", type=int, default=42, help="of data, new weights and dropout")
    add("--output", type=Path, default=Path("runs/bert"), help="directory of the result")
    add("--plot", type=Path, metavar="FILE.png", help="draw the loss curve")
    add("--save-every", type=positive_int, metavar="STEPS", help="save within an epoch too, while training goes on")
    add(
        "--resume",
        nargs="?",
        const="latest",
        choices=("latest", "auto"),
        help="go on from the newest checkpoint in --output; auto: if there is one, as after an elastic restart",
    )
    options = parser.parse_args(arguments)
    if options.tiny:
        options.model = TINY
        options.limit, options.eval_limit = options.limit or 128, options.eval_limit or 64
    return options


class FineTuning:
    """Fine-tuning run on this rank.

    Args:
        options: command-line options.
        plugin: plugin that defines the layout.
    """

    def __init__(self, options: argparse.Namespace, plugin: HybridParallelPlugin) -> None:
        self.options, self.plugin = options, plugin
        self.booster = Booster(plugin=plugin)
        self.checkpoints = options.output / _CHECKPOINTS
        self.resumes = options.resume is not None and self.booster.latest_checkpoint(self.checkpoints) is not None
        if options.resume == "latest" and not self.resumes:
            raise ConfigurationError(
                f"--resume finds no checkpoint in {self.checkpoints}; "
                "give the --output of an earlier run or leave it out"
            )
        self.losses: list[float] = []
        self.seconds, self.samples = 0.0, 0
        self._load()

    def run(self) -> None:
        """Run the remaining training, evaluate, save and report."""
        if self.resumes:
            self.losses = self.booster.load_checkpoint(self.checkpoints, **self._state(), resume="latest")["losses"]
        for epoch in range(self.training.epoch, self.options.epochs):
            self._train(epoch)
            self._save_checkpoint()
        self.booster.finish_saving()
        metrics = self.evaluate()
        self.booster.save_model(self.model, str(self.options.output))
        self._report(metrics, peak_memory_of_ranks(self.counting_device))

    def evaluate(self) -> Metrics:
        """Return the metrics over all evaluation pairs, each counted once; the same on every rank."""
        self.model.eval()
        counts = Counts(self.counting_device)
        for batch in self._progress(self.evaluation, "evaluate"):
            # All tp and pp ranks of a replica get its logits; replicas hold different samples.
            result = self.booster.execute_pipeline(iter([batch]), self.model, return_loss=False, return_outputs=True)
            if len(batch["labels"]):  # a replica's share of the last batch may be empty
                counts.add(result.outputs.logits, batch["labels"])
        dist.all_reduce(counts.values, group=self.plugin.mesh["dp"].get_group())
        self.model.train()
        return counts.metrics()

    @property
    def counting_device(self) -> torch.device:
        """Device of this rank's tensors."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def _load(self) -> None:
        """Create data, model and optimizer as in any script, then call `boost`."""
        from transformers import get_linear_schedule_with_warmup

        options = self.options
        train_pairs, eval_pairs = load_pairs(options.task, options.data_dir, options.seed)
        model, self.tokenizer = load_model(options.model, options.seed)
        train = PairDataset(shorten(train_pairs, options.limit), self.tokenizer, options.max_length)
        evaluation = PairDataset(shorten(eval_pairs, options.eval_limit), self.tokenizer, options.max_length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        steps = options.epochs * steps_per_epoch(len(train), options.batch_size * self.plugin.dp_size)
        schedule = get_linear_schedule_with_warmup(optimizer, int(_WARMUP_FRACTION * steps), steps)
        self.model, self.optimizer, self.schedule, self.training, self.evaluation = self.booster.boost(
            model,
            optimizer,
            schedule,
            train_loader(train, self.tokenizer, options.batch_size, options.seed),
            eval_loader(evaluation, self.tokenizer, options.batch_size),
        )

        self.meter = self.booster.meter(self.model, bar=False)

    def _train(self, epoch: int) -> None:
        position, started = self.training.position, time.perf_counter()  # nonzero if the run resumes within this epoch
        batches = iter(self.training)
        self.meter.restart(len(self.losses), self.options.epochs * len(self.training))
        progress = self._progress(range(position, len(self.training)), f"epoch {epoch + 1}/{self.options.epochs}")
        for step in progress:
            batch = next(batches)
            result = self.booster.execute_pipeline(iter([batch]), self.model, optimizer=self.optimizer)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(result.loss.item())
            self.meter.step(self.losses[-1], batch, lr=self.schedule.get_last_lr()[0])
            progress.set_postfix(loss=f"{self.losses[-1]:.3f}", refresh=False)
            if self.options.save_every and (step + 1) % self.options.save_every == 0 and step + 1 < len(self.training):
                self._save_checkpoint()
        self.seconds += time.perf_counter() - started
        self.samples += (len(self.training) - position) * self.training.global_batch_size

    def _save_checkpoint(self) -> None:
        """Save a checkpoint in the background; older ones are removed."""
        path = self.checkpoints / f"step-{len(self.losses)}"
        self.booster.save_checkpoint(path, **self._state(), losses=self.losses, asynchronous=True, keep_last=_KEPT)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "dataloader": self.training,
        }

    def _progress(self, steps: Any, name: str) -> tqdm:
        """Return a progress bar, shown on rank 0 only."""
        return tqdm(steps, desc=name, disable=dist.get_rank() != 0, dynamic_ncols=True)

    def _report(self, metrics: Metrics, peak_mib: list[float]) -> None:
        """Print the final table, and write the files next to the model, on rank 0."""
        if dist.get_rank() != 0:
            return
        options, plugin = self.options, self.plugin
        speed = self.samples / self.seconds if self.seconds else 0.0
        layout = {"tp": plugin.tp_size, "pp": plugin.pp_size, "dp": plugin.dp_size, "zero": options.zero}
        self.tokenizer.save_pretrained(options.output)
        figures = {**metrics.as_dict(), "samples_per_s": speed, "peak_mib": peak_mib, "layout": layout}
        write_json(options.output / "metrics.json", {**figures, "train_losses": self.losses})
        if options.plot:
            plot_losses(options.plot, {options.task: self.losses})
        rows = [
            ("accuracy", f"{metrics.accuracy:.4f}"),
            ("F1", f"{metrics.f1:.4f}"),
            ("loss", f"{metrics.loss:.4f}"),
            ("evaluated on", f"{metrics.samples} pairs"),
            ("training speed", f"{speed:.1f} samples/s" if speed else "-"),
            *((f"peak memory, rank {rank}", f"{peak:.0f} MiB") for rank, peak in enumerate(peak_mib)),
            ("saved in", str(options.output)),
        ]
        print_table(" ".join(f"{name}={size}" for name, size in layout.items()), (options.task, "result"), rows)
        print("layout:     ", plugin.layout)
        print("meter:      ", self.meter.line())
        print("to continue:", command_of_this_job("--resume", "--epochs", str(2 * options.epochs)))
        command = f"optimum-cli export onnx --model {options.output} {options.output}/onnx"
        print("to export:  ", command_to_export(command, "optimum[onnx]"))


if __name__ == "__main__":
    main()
