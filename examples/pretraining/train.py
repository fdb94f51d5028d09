"""Pretrain a causal language model on text files, whose documents are packed into rows without padding.

    booster run --nproc-per-node 4 train.py --tp 2 --pp 2 --files corpus/*.txt
    booster run --nproc-per-node 2 train.py --tp 2 --tiny          # without a download, in seconds

A blank line ends a document. The result is a Hugging Face directory in `--output`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from booster import Booster, launch_from_torch, record_module_init
from booster.integrations.next_commands import command_to_export
from booster.launch import command_of_this_job
from plugins.hybrid_parallel import HybridParallelPlugin

import torch
import torch.distributed as dist
from packing import pack
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    get_cosine_schedule_with_warmup,
)

_CHECKPOINTS_KEPT = 2


def main() -> None:
    options = parse_arguments()
    launch_from_torch(seed=options.seed)
    plugin = HybridParallelPlugin(
        tp_size=options.tp,
        pp_size=options.pp,
        num_microbatches=options.microbatches,
        precision=options.precision or ("bf16" if torch.cuda.is_available() else "fp32"),
        max_norm=1.0,
    )
    booster = Booster(plugin=plugin)
    config, tokenizer = tiny() if options.tiny else from_hub(options.model)
    rows = pack(documents(options.files, tokenizer), options.length)
    with record_module_init():  # each rank makes its own shards
        model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 20, options.steps)
    loader = DataLoader(rows, batch_size=options.batch_size, shuffle=True)
    model, optimizer, schedule, loader = booster.boost(model, optimizer, schedule, loader)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule, "dataloader": loader}

    checkpoints, done = options.output / "checkpoints", 0
    if options.resume and booster.latest_checkpoint(checkpoints):
        done = booster.load_checkpoint(checkpoints, **state, resume="latest")["step"]
    meter = booster.meter(model, total_steps=options.steps, initial_step=done)
    batches = forever(loader)
    for step in range(done + 1, options.steps + 1):
        batch = next(batches)
        result = booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        meter.step(result.loss, batch, lr=schedule.get_last_lr()[0])
        if step % options.save_every == 0 or step == options.steps:
            folder = checkpoints / f"step-{step}"
            booster.save_checkpoint(folder, **state, step=step, asynchronous=True, keep_last=_CHECKPOINTS_KEPT)
    meter.close()
    booster.finish_saving()
    booster.save_model(model, options.output)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(options.output)
        print("layout:     ", plugin.layout)
        print("meter:      ", meter.line())
        print("to continue:", command_of_this_job("--resume", "--steps", str(2 * options.steps)))
        command = f"transformers serve {options.output}"
        print("to export:  ", command_to_export(command, "transformers[serving]"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--files", type=Path, nargs="*", default=[], help="text files; default: the reference manual of this Python")
    add("--model", default="Qwen/Qwen3-0.6B", help="whose configuration and tokenizer to take")
    add("--tiny", action="store_true", help="a small model on bytes, without a download")
    add("--length", type=int, default=None, help="tokens of a row (default: 2048; 128 with --tiny)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--pp", type=int, default=1, help="pipeline stages; the ranks that are left are data-parallel")
    add("--microbatches", type=int, help="micro-batches a batch is cut into (default: one a stage)")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on GPUs, fp32 on CPUs")
    add("--batch-size", type=int, default=8, help="rows a step of one data-parallel replica")
    add("--lr", type=float, default=6e-4, help="peak learning rate")
    add("--steps", type=int, default=None, help="default: 1000; 20 with --tiny")
    add("--save-every", type=int, default=200, metavar="STEPS")
    add("--seed", type=int, default=42)
    add("--output", type=Path, default=Path("runs/pretraining"))
    add("--resume", action="store_true", help="go on from the newest checkpoint in --output, if there is one")
    options = parser.parse_args()
    options.length = options.length or (128 if options.tiny else 2048)
    options.steps = options.steps or (20 if options.tiny else 1000)
    return options


def documents(files: list[Path], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of each document, with a mark at its end."""
    if files:
        texts = [text for file in files for text in file.read_text(encoding="utf-8").split("\n\n")]
    else:
        from pydoc_data.topics import topics

        texts = list(topics.values())
    for text in filter(None, map(str.strip, texts)):
        yield [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def from_hub(name: str) -> tuple[Any, Any]:
    """Return the configuration and the tokenizer of a published model."""
    config = AutoConfig.from_pretrained(name)
    config.use_cache = False  # transformers keeps packed documents apart only without a cache
    return config, AutoTokenizer.from_pretrained(name)


def tiny() -> tuple[Any, Any]:
    """Return the configuration of a small model of bytes, and its tokenizer."""
    tokenizer = ByT5Tokenizer()
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return LlamaConfig(vocab_size=len(tokenizer), use_cache=False, **sizes, **ends), tokenizer


def forever(loader: DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


if __name__ == "__main__":
    main()
