"""Reinforcement learning of a language model on questions with one right answer, by TRL's GRPOTrainer under any layout.

    booster run --nproc-per-node 4 train.py --tp 2 --pp 2
    booster run --nproc-per-node 2 train.py --tp 2 --tiny          # without a download, in seconds

All options of TRL's `GRPOConfig` work: `--num_generations 16`, `--beta 0.04`, `--loss_type dr_grpo`, ... The model that
is trained generates the answers itself, on its sharded weights.
"""

from __future__ import annotations

import re
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
from trl import GRPOConfig, GRPOTrainer


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp and pp leave are data-parallel."""

    model: str = "Qwen/Qwen3-0.6B"
    dataset: str = "openai/gsm8k"
    tp: int = 1
    pp: int = 1
    tiny: bool = False


def main(description: str = __doc__, **defaults: Any) -> None:
    parser = TrainingParser((Options, GRPOConfig), description=description)
    parser.set_defaults(output_dir="runs/grpo", learning_rate=1e-6, num_train_epochs=1, logging_steps=5)
    parser.set_defaults(per_device_train_batch_size=8, gradient_accumulation_steps=4, save_total_limit=2)
    parser.set_defaults(max_completion_length=512, use_cpu=not torch.cuda.is_available(), **defaults)
    options, args = parser.parse()
    if options.tiny:  # the model generates, also where a server would
        args.max_completion_length, args.use_vllm = 8, False
    launch_from_torch(seed=args.seed)
    model, tokenizer, data = tiny() if options.tiny else from_hub(options)
    meter = MeterCallback()
    trainer = boosted(GRPOTrainer)(
        model=model,
        reward_funcs=is_right,
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


def is_right(completions: list[Any], answer: list[str], **further: Any) -> list[float]:
    """Reward 1 if the last number of a completion is the last one of the answer, 0.1 for another number, else 0."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found, (*_, right) = (
            re.findall(r"-?\d+", text.replace(",", "")),
            re.findall(r"-?\d+", expected.replace(",", "")),
        )
        rewards.append(float(found[-1] == right) or 0.1 if found else 0.0)
    return rewards


def from_hub(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Load a model that follows instructions, and word problems whose answers end in a number."""
    data = load_dataset(options.dataset, "main", split="train")
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]}, remove_columns="question")
    model = AutoModelForCausalLM.from_pretrained(options.model)
    return model, AutoTokenizer.from_pretrained(options.model), data


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Make a small model, and questions of addition."""
    tokenizer = ByT5Tokenizer()
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), intermediate_size=128, **sizes, **special)
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(64)]
    return LlamaForCausalLM(config), tokenizer, Dataset.from_list(rows)


if __name__ == "__main__":
    main()
