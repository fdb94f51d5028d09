"""Fine-tune an encoder-decoder to summarize, with transformers' Seq2SeqTrainer under any layout.

    booster run --nproc-per-node 4 train.py --tp 2 --pp 2
    booster run --nproc-per-node 2 train.py --tp 2 --tiny          # without a download, in seconds

All options of `Seq2SeqTrainingArguments` work; evaluation generates the summaries and scores their words.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from booster import launch_from_torch
from booster.integrations.arguments import TrainingParser
from booster.integrations.next_commands import command_to_continue, command_to_export
from booster.integrations.trainer_checkpoints import MeterCallback
from booster.integrations.transformers import boosted
from plugins.hybrid_parallel import HybridParallelPlugin

import numpy
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp and pp leave are data-parallel."""

    model: str = "google-t5/t5-small"
    dataset: str = "abisee/cnn_dailymail"
    subset: str = "3.0.0"
    max_source_length: int = 1024
    max_target_length: int = 128
    eval_samples: int = 500
    tp: int = 1
    pp: int = 1
    tiny: bool = False


def main() -> None:
    parser = TrainingParser((Options, Seq2SeqTrainingArguments), description=__doc__)
    parser.set_defaults(output_dir="runs/t5_summarization", learning_rate=3e-4, num_train_epochs=1)
    parser.set_defaults(per_device_train_batch_size=16, bf16=torch.cuda.is_available())
    parser.set_defaults(logging_steps=10, save_total_limit=2)
    parser.set_defaults(predict_with_generate=True, generation_max_length=128, eval_strategy="epoch")
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    options, args = parser.parse()
    launch_from_torch(seed=args.seed)
    model, tokenizer, train, evaluation = tiny() if options.tiny else from_hub(options)
    meter = MeterCallback()
    trainer = boosted(Seq2SeqTrainer)(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        compute_metrics=lambda prediction: shared_words(prediction, tokenizer),
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
    """Load a pretrained model, and articles with their summaries."""
    from datasets import load_dataset

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = load_dataset(options.dataset, options.subset)

    def tokenize(rows: dict[str, Any]) -> dict[str, Any]:
        texts = [f"summarize: {text}" for text in rows["article"]]
        inputs = tokenizer(texts, truncation=True, max_length=options.max_source_length)
        summaries = tokenizer(text_target=rows["highlights"], truncation=True, max_length=options.max_target_length)
        return {**inputs, "labels": summaries["input_ids"]}

    data = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    evaluation = data["validation"].select(range(min(options.eval_samples, len(data["validation"]))))
    return AutoModelForSeq2SeqLM.from_pretrained(options.model), tokenizer, data["train"], evaluation


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Any], list[Any]]:
    """Make a small model, and lines of which the first word is the summary."""
    tokenizer = ByT5Tokenizer()
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=tokenizer.pad_token_id, **sizes)
    lines = [[f"{word}{number}" for word in "abc"[: 1 + number % 3]] for number in range(72)]
    rows = [{**tokenizer(" ".join(line)), "labels": tokenizer(line[0])["input_ids"]} for line in lines]
    return T5ForConditionalGeneration(config), tokenizer, rows[:64], rows[64:]


def shared_words(prediction: EvalPrediction, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Return ROUGE-1: the mean F1 score of the words of a summary against those of its reference."""

    def words(rows: numpy.ndarray) -> list[Counter[str]]:
        rows = numpy.where(rows < 0, tokenizer.pad_token_id, rows)
        return [Counter(text.split()) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]

    pairs = zip(words(prediction.predictions), words(prediction.label_ids), strict=True)
    scores = [2 * (found & wanted).total() / max(found.total() + wanted.total(), 1) for found, wanted in pairs]
    return {"rouge1": float(numpy.mean(scores))}


if __name__ == "__main__":
    main()
