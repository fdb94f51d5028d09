"""Fine-tune a mixture of experts (OLMoE, Mixtral, Qwen3-MoE) with expert parallelism, by transformers' Trainer.

    booster run --nproc-per-node 8 train.py --ep 8
    booster run --nproc-per-node 2 train.py --ep 2 --tiny          # without a download, in seconds

Each rank reads its own experts from the files. On GPUs the model trains in 16 bit, with fp32 copies of the weights and
recomputed layers: 18 bytes of each parameter, most of which the ranks share out. The default has 6.9 billion and is for
8 GPUs of 80 GB; docs/recipes.md has what `booster plan` predicts for it, and for Qwen3-30B-A3B.

The router's load-balancing loss is part of the loss, over the global batch as without expert parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from booster import launch_from_torch, record_module_init
from booster.integrations.arguments import TrainingParser
from booster.integrations.next_commands import command_to_continue, command_to_export
from booster.integrations.trainer_checkpoints import MeterCallback
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp and pp leave are data-parallel, and share the experts."""

    model: str = "allenai/OLMoE-1B-7B-0924-Instruct"
    dataset: str = "HuggingFaceH4/no_robots"
    max_length: int = 2048
    tp: int = 1
    pp: int = 1
    ep: int = 1
    tiny: bool = False


def main() -> None:
    parser = TrainingParser((Options, TrainingArguments), description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.set_defaults(output_dir="runs/moe", learning_rate=1e-5, num_train_epochs=1, logging_steps=5)
    parser.set_defaults(per_device_train_batch_size=2, gradient_accumulation_steps=4, gradient_checkpointing=True)
    parser.set_defaults(save_total_limit=2, use_cpu=not on_gpu)
    options, args = parser.parse()
    launch_from_torch(seed=args.seed)
    model, tokenizer, data = tiny() if options.tiny else from_hub(options)
    model.config.output_router_logits = True  # adds the router's loss
    layout = {"tp_size": options.tp, "pp_size": options.pp, "ep_size": options.ep}
    precision = "bf16" if on_gpu else "fp32"
    meter = MeterCallback()
    trainer = boosted(Trainer)(
        model=model,
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[meter],
        plugin=HybridParallelPlugin(**layout, precision=precision),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint == "True" or args.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("layout:     ", trainer.plugin.layout)
        print("meter:      ", meter.line())
        print("to continue:", command_to_continue(args))
        command = f"transformers serve {args.output_dir}"
        print("to export:  ", command_to_export(command, "transformers[serving]"))


def from_hub(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset]:
    """Load a pretrained mixture of experts, and conversations as text."""
    from datasets import load_dataset

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = load_dataset(options.dataset, split="train")

    def tokenize(rows: dict[str, Any]) -> dict[str, Any]:
        texts = tokenizer.apply_chat_template(rows["messages"], tokenize=False)
        return tokenizer(texts, truncation=True, max_length=options.max_length)

    with record_module_init():  # no rank holds the whole model
        model = AutoModelForCausalLM.from_pretrained(options.model)
    return model, tokenizer, data.map(tokenize, batched=True, remove_columns=data.column_names)


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Any]]:
    """Make a small model of 4 experts, and lines that count up."""
    tokenizer = ByT5Tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), head_dim=16, **sizes, **experts, **special)
    lines = [" ".join(str(number + step) for step in range(2 + number % 4)) for number in range(64)]
    with record_module_init():
        model = Qwen3MoeForCausalLM(config)
    return model, tokenizer, [dict(tokenizer(line)) for line in lines]


if __name__ == "__main__":
    main()
