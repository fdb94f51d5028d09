"""A script for accelerate as people write it: fine-tune an encoder to tell paraphrases, and evaluate after each epoch.

The test runs it as it is, and with two changed lines.
"""

import argparse
import json

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, ByT5Tokenizer, get_linear_schedule_with_warmup

MAX_BATCH_SIZE, EVALUATION_BATCH_SIZE = 8, 8


def get_dataloaders(accelerator, batch_size):
    tokenizer = ByT5Tokenizer()
    pairs = [(f"{number} things", f"{number + number % 3} things", number % 3) for number in range(90, 139)]

    def encode(pairs):
        return [{"labels": label, **tokenizer(first, second)} for first, second, label in pairs]

    with accelerator.main_process_first():
        train, evaluation = encode(pairs[:33]), encode(pairs[33:])

    def collate(examples):
        max_length = 128 if accelerator.distributed_type == DistributedType.XLA else None
        multiple = 8 if accelerator.mixed_precision != "no" else None
        return tokenizer.pad(
            examples, padding="longest", max_length=max_length, pad_to_multiple_of=multiple, return_tensors="pt"
        )

    return (
        DataLoader(train, shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=True),
        DataLoader(evaluation, collate_fn=collate, batch_size=EVALUATION_BATCH_SIZE),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision, dataloader_config=loading)
    batch_size, num_epochs, accumulation = 16, 2, 1
    if batch_size > MAX_BATCH_SIZE and accelerator.distributed_type != DistributedType.XLA:
        accumulation, batch_size = batch_size // MAX_BATCH_SIZE, MAX_BATCH_SIZE
    set_seed(42)
    train, evaluation = get_dataloaders(accelerator, batch_size)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=384, num_labels=3, **sizes, **dropout))
    model = model.to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, (len(train) * num_epochs) // accumulation)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    history = []
    for _ in range(num_epochs):
        model.train()
        for step, batch in enumerate(train):
            batch.to(accelerator.device)
            loss = model(**batch).loss / accumulation
            accelerator.backward(loss)
            if step % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        logits, right = [], 0
        for batch in evaluation:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            found, references = accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
            logits += found.tolist()
            right += int((found.argmax(-1) == references).sum())
        history.append({"lr": scheduler.get_last_lr()[0], "accuracy": right / len(logits), "logits": logits})
        accelerator.print(f"epoch {len(history)}: accuracy {history[-1]['accuracy']:.3f}")
    if accelerator.is_main_process:
        with open(args.output, "w") as file:
            json.dump(history, file)


if __name__ == "__main__":
    main()
