"""Direct preference optimization of a language model, by TRL's DPOTrainer under any layout.

    booster run --nproc-per-node 4 train.py --tp 2 --pp 2
    booster run --nproc-per-node 2 train.py --tp 2 --tiny          # without a download, in seconds

All options of TRL's `DPOConfig` work: `--beta 0.05`, `--loss_type ipo`, `--bf16`, ... The reference model is a copy of
the model at the start, in the same layout.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from booster import launch_from_torch
from booster.integrations.arguments import TrainingParser
from booster.integrations.next_commands import command_to_continue, command_to_export
from booster.integrations.trainer_checkpoints import MeterCallback
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import DPOConfig, DPOTrainer


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp and pp leave are data-parallel."""

    model: str = "Qwen/Qwen3-0.6B"
    dataset: str = "trl-lib/ultrafeedback_binarized"
    tp: int = 1
    pp: int = 1
    tiny: bool = False


def main() -> None:
    parser = TrainingParser((Options, DPOConfig), description=__doc__)
    parser.set_defaults(output_dir="runs/dpo", learning_rate=1e-6, num_train_epochs=1, logging_steps=5)
    parser.set_defaults(per_device_train_batch_size=4, gradient_accumulation_steps=4, save_total_limit=2)
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    options, args = parser.parse()
    launch_from_torch(seed=args.seed)
    model, reference, tokenizer, data = tiny() if options.tiny else from_hub(options)
    meter = MeterCallback()
    trainer = boosted(DPOTrainer)(
        model=model,
        ref_model=reference,
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[meter],
        plugin=HybridParallelPlugin(tp_size=options.tp, pp_size=options.pp),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint == "True" or args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("layout:     ", trainer.plugin.layout)
        print("meter:      ", meter.line())
        print("to continue:", command_to_continue(args))
        command = f"transformers serve {args.output_dir}"
        print("to export:  ", command_to_export(command, "transformers[serving]"))


def from_hub(options: Options) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Load a model that follows instructions, a second one as the reference, and pairs of answers."""
    model, reference = (AutoModelForCausalLM.from_pretrained(options.model) for _ in range(2))
    return model, reference, AutoTokenizer.from_pretrained(options.model), load_dataset(options.dataset, split="train")


def tiny() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Make a small model, and questions of addition with a right and a wrong answer."""
    tokenizer = ByT5Tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), intermediate_size=128, **sizes, **special)
    rows = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": f" {2 * n + 1 + n % 5}"} for n in range(64)]
    model = LlamaForCausalLM(config)
    return model, copy.deepcopy(model), tokenizer, Dataset.from_list(rows)


if __name__ == "__main__":
    main()
