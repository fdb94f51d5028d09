"""Fine-tune a vision transformer to classify images, with transformers' Trainer under any layout.

booster run --nproc-per-node 4 train.py --tp 2
booster run --nproc-per-node 2 train.py --pp 2 --tiny          # without a download, in seconds
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
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)


@dataclass
class Options:
    """What to train on, and the layout; the ranks that tp and pp leave are data-parallel."""

    model: str = "google/vit-base-patch16-224-in21k"
    dataset: str = "ethz/food101"
    tp: int = 1
    pp: int = 1
    tiny: bool = False


def main() -> None:
    parser = TrainingParser((Options, TrainingArguments), description=__doc__)
    parser.set_defaults(output_dir="runs/vit", learning_rate=5e-5, num_train_epochs=3, eval_strategy="epoch")
    parser.set_defaults(per_device_train_batch_size=32, bf16=torch.cuda.is_available())
    parser.set_defaults(logging_steps=10, save_total_limit=2)
    parser.set_defaults(remove_unused_columns=False)  # images become pixels when a batch is put together
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    options, args = parser.parse()
    launch_from_torch(seed=args.seed)
    model, processor, train, evaluation = tiny() if options.tiny else from_hub(options)
    meter = MeterCallback()
    trainer = boosted(Trainer)(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collate,
        processing_class=processor,
        compute_metrics=accuracy,
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


def from_hub(options: Options) -> tuple[PreTrainedModel, Any, Dataset, Dataset]:
    """Load a pretrained model with a new head, and photographs."""
    from datasets import load_dataset

    processor = AutoImageProcessor.from_pretrained(options.model)
    data = load_dataset(options.dataset)
    classes = data["train"].features["label"].names

    def to_pixels(rows: dict[str, Any]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows["image"]]
        return {**processor(images, return_tensors="pt"), "labels": rows["label"]}

    model = AutoModelForImageClassification.from_pretrained(options.model, num_labels=len(classes))
    return model, processor, data["train"].with_transform(to_pixels), data["validation"].with_transform(to_pixels)


def tiny() -> tuple[PreTrainedModel, None, list[Any], list[Any]]:
    """Make a small model, and noisy images whose brightest colour is the label."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=3, **sizes))
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(96):
        pixels = torch.randn(3, 16, 16, generator=generator)
        pixels[number % 3] += 1.0
        rows.append({"pixel_values": pixels, "labels": number % 3})
    return model, None, rows[:64], rows[64:]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch: pixel_values [batch, channels, height, width] and labels [batch]."""
    labels = torch.tensor([row["labels"] for row in rows])
    return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of right labels."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
