"""Fine-tune Whisper to write down speech, with transformers' Seq2SeqTrainer on several ranks.

    booster run --nproc-per-node 4 train.py --tp 2
    booster run --nproc-per-node 2 train.py --tp 2 --tiny          # without a download, in seconds

Evaluation generates the text, and reports the word error rate. Whisper generates in a loop of its own, which a pipeline
cannot run: the layouts are tensor and data parallelism.
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

import numpy
import torch
from torch.utils.data import Dataset
from transformers import (
    ByT5Tokenizer,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp leaves are data-parallel."""

    model: str = "openai/whisper-small"
    dataset: str = "google/fleurs"
    subset: str = "de_de"
    eval_samples: int = 200
    tp: int = 1
    tiny: bool = False


def main() -> None:
    parser = TrainingParser((Options, Seq2SeqTrainingArguments), description=__doc__)
    parser.set_defaults(output_dir="runs/whisper", learning_rate=1e-5, warmup_steps=50, num_train_epochs=3)
    parser.set_defaults(per_device_train_batch_size=16, bf16=torch.cuda.is_available())
    parser.set_defaults(logging_steps=10, save_total_limit=2)
    parser.set_defaults(predict_with_generate=True, generation_max_length=225, eval_strategy="epoch")
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
        data_collator=collate,
        processing_class=tokenizer,
        compute_metrics=lambda prediction: word_error_rate(prediction, tokenizer),
        callbacks=[meter],
        plugin=HybridParallelPlugin(tp_size=options.tp),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint == "True" or args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    if trainer.is_world_process_zero():
        print("layout:     ", trainer.plugin.layout)
        print("meter:      ", meter.line())
        print("to continue:", command_to_continue(args))
        command = f"ct2-transformers-converter --model {args.output_dir} --output_dir {args.output_dir}/ct2"
        print("to export:  ", command_to_export(command, "ctranslate2"))


def from_hub(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Dataset, Dataset]:
    """Load a pretrained model, and recordings with their text."""
    from datasets import Audio, load_dataset

    processor = WhisperProcessor.from_pretrained(options.model)
    model = WhisperForConditionalGeneration.from_pretrained(options.model)
    data = load_dataset(options.dataset, options.subset)
    data = data.cast_column("audio", Audio(sampling_rate=processor.feature_extractor.sampling_rate))

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        audio = row["audio"]
        features = processor.feature_extractor(audio["array"], sampling_rate=audio["sampling_rate"])
        labels = processor.tokenizer(row["transcription"]).input_ids
        return {"input_features": features.input_features[0], "labels": labels}

    data = data.map(prepare, remove_columns=data["train"].column_names)
    evaluation = data["validation"].select(range(min(options.eval_samples, len(data["validation"]))))
    return model, processor.tokenizer, data["train"], evaluation


def tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Any], list[Any]]:
    """Make a small model, and tones of half a second with the names of their pitches."""
    tokenizer = ByT5Tokenizer()
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    special = {"pad_token_id": pad, "decoder_start_token_id": pad, "bos_token_id": pad, "eos_token_id": end}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16}
    lengths = {"max_source_positions": 50, "max_target_positions": 32}  # frames of the encoder, tokens
    config = WhisperConfig(
        vocab_size=len(tokenizer), begin_suppress_tokens=None, **layers, **widths, **lengths, **special
    )
    seconds = numpy.arange(8000) / extractor.sampling_rate
    rows = []
    for number in range(72):
        tone = numpy.sin(2 * numpy.pi * 220 * 2 ** (number % 12 / 12) * seconds)
        features = extractor(tone, sampling_rate=extractor.sampling_rate).input_features[0]
        rows.append({"input_features": features, "labels": tokenizer(f"tone {number % 12}").input_ids})
    return WhisperForConditionalGeneration(config), tokenizer, rows[:64], rows[64:]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch: input_features [batch, mel bins, frames] and labels [batch, tokens], padded with -100."""
    labels = [torch.tensor(row["labels"]) for row in rows]
    features = numpy.stack([row["input_features"] for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_features": torch.from_numpy(features).float(), "labels": padded}


def word_error_rate(prediction: EvalPrediction, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Return the number of words to insert, delete or replace, over the number of words in the references."""

    def words(rows: numpy.ndarray) -> list[list[str]]:
        rows = numpy.where(rows < 0, tokenizer.pad_token_id, rows)
        return [text.split() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]

    found, wanted = words(prediction.predictions), words(prediction.label_ids)
    return {"wer": sum(map(distance, found, wanted)) / max(sum(map(len, wanted)), 1)}


def distance(found: list[str], wanted: list[str]) -> int:
    """Return the edit distance of two texts, in words."""
    row = list(range(len(wanted) + 1))
    for word in found:
        above, row = row, [row[0] + 1]
        for index, other in enumerate(wanted):
            row.append(min(row[-1] + 1, above[index + 1] + 1, above[index] + (word != other)))
    return row[-1]


if __name__ == "__main__":
    main()
