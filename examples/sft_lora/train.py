"""Supervised fine-tuning of a language model with LoRA, by TRL's SFTTrainer under any layout.

    booster run --nproc-per-node 4 train.py --tp 2 --pp 2
    booster run --nproc-per-node 2 train.py --pp 2 --tiny          # without a download, in seconds

All options of TRL's `SFTConfig` work: `--bf16`, `--max_length 4096`, `--report_to tensorboard`, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from booster import launch_from_torch
from booster.integrations.arguments import TrainingParser
from booster.integrations.next_commands import command_to_continue
from booster.integrations.trainer_checkpoints import MeterCallback
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import SFTConfig, SFTTrainer


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp and pp leave are data-parallel."""

    model: str = "Qwen/Qwen3-0.6B"
    dataset: str = "trl-lib/Capybara"
    rank: int = 16
    tp: int = 1
    pp: int = 1
    tiny: bool = False


def main() -> None:
    parser = TrainingParser((Options, SFTConfig), description=__doc__)
    parser.set_defaults(output_dir="runs/sft_lora", learning_rate=2e-4, num_train_epochs=1, logging_steps=5)
    parser.set_defaults(save_total_limit=2, use_cpu=not torch.cuda.is_available())
    options, args = parser.parse()
    launch_from_torch(seed=args.seed)
    model, tokenizer, data = tiny() if options.tiny else from_hub(options)
    meter = MeterCallback()
    trainer = boosted(SFTTrainer)(
        model=model,
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear"),
        callbacks=[meter],
        plugin=HybridParallelPlugin(tp_size=options.tp, pp_size=options.pp),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint == "True" or args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("layout:     ", trainer.plugin.layout)
        print("meter:      ", meter.line())
        print("to continue:", command_to_continue(args))
        merge = (
            "from peft import AutoPeftModelForCausalLM as M; "
            f"M.from_pretrained('{args.output_dir}').merge_and_unload().save_pretrained('{args.output_dir}/merged')"
        )
        print("to export:  ", f'python -c "{merge}"')


def from_hub(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Load a pretrained model, and conversations."""
    model = AutoModelForCausalLM.from_pretrained(options.model)
    return model, AutoTokenizer.from_pretrained(options.model), load_dataset(options.dataset, split="train")


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Make a small model, and questions of addition with their answers."""
    tokenizer = ByT5Tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), intermediate_size=128, **sizes, **special)
    rows = [{"prompt": f"{n} + {n * n % 7} =", "completion": f" {n + n * n % 7}"} for n in range(64)]
    return LlamaForCausalLM(config), tokenizer, Dataset.from_list(rows)


if __name__ == "__main__":
    main()
