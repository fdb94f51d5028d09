"""Fine-tune an encoder to classify pairs of sentences, with transformers' Trainer under any layout.

    booster run --nproc-per-node 4 train.py --tp 2 --pp 2
    booster run --nproc-per-node 2 train.py --tp 2 --tiny          # without a download, in seconds

All options of `TrainingArguments` work: `--bf16`, `--gradient_accumulation_steps 4`, `--report_to tensorboard`, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from booster import launch_from_torch
from booster.integrations.arguments import TrainingParser
from booster.integrations.next_commands import command_to_continue, command_to_export
from booster.integrations.trainer_checkpoints import MeterCallback
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp and pp leave are data-parallel."""

    model: str = "bert-base-uncased"
    dataset: str = "nyu-mll/glue"
    subset: str = "mrpc"
    max_length: int = 128
    tp: int = 1
    pp: int = 1
    tiny: bool = False


def main() -> None:
    parser = TrainingParser((Options, TrainingArguments), description=__doc__)
    parser.set_defaults(output_dir="runs/bert_trainer", learning_rate=2e-5, num_train_epochs=3, eval_strategy="epoch")
    parser.set_defaults(per_device_train_batch_size=32, bf16=torch.cuda.is_available())
    parser.set_defaults(logging_steps=10, save_total_limit=2)
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    options, args = parser.parse()
    launch_from_torch(seed=args.seed)
    model, tokenizer, train, evaluation = tiny() if options.tiny else from_hub(options)
    meter = MeterCallback()
    trainer = boosted(Trainer)(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy_and_f1,
        callbacks=[meter],
        plugin=HybridParallelPlugin(tp_size=options.tp, pp_size=options.pp),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint == "True" or args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("layout:     ", trainer.plugin.layout)
        print("meter:      ", meter.line())
        print("to continue:", command_to_continue(args))
        command = f"optimum-cli export onnx --model {args.output_dir} {args.output_dir}/onnx"
        print("to export:  ", command_to_export(command, "optimum[onnx]"))


def from_hub(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset, Dataset]:
    """Load a pretrained encoder with a new head, and the pairs of a GLUE task."""
    from datasets import load_dataset

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    data = load_dataset(options.dataset, options.subset)

    def tokenize(rows: dict[str, Any]) -> dict[str, Any]:
        return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=options.max_length)

    data = data.map(tokenize, batched=True)
    return model, tokenizer, data["train"], data["validation"]


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Any], list[Any]]:
    """Make a small model and pairs of numbers: label 1 if the second one follows the first."""
    tokenizer = ByT5Tokenizer()
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **sizes))
    pairs = [(f"{number}", f"{number + 1 + 3 * (number % 2)}", 1 - number % 2) for number in range(96)]
    rows = [{**tokenizer(first, second), "labels": label} for first, second, label in pairs]
    return model, tokenizer, rows[:64], rows[64:]


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of right labels, and the F1 score of label 1."""
    found, labels = prediction.predictions.argmax(-1), prediction.label_ids
    both = ((found == 1) & (labels == 1)).sum()
    return {"accuracy": (found == labels).mean(), "f1": 2 * both / max((found == 1).sum() + (labels == 1).sum(), 1)}


if __name__ == "__main__":
    main()
