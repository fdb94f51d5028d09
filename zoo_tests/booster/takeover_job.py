"""Unmodified scripts of each library, in one file: `takeover_job.py KIND FOLDER`; rank 0 writes its losses there."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

_SIZES = {"hidden_size": 24, "intermediate_size": 74, "num_hidden_layers": 2, "num_attention_heads": 4}
_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Scaled(Trainer):
    """A subclass of the script's own, with arguments of its own."""

    def __init__(self, scale, **options):
        super().__init__(**options)
        self.scale = scale

    def compute_loss(self, *args, **options):
        loss = super().compute_loss(*args, **options)
        return (loss[0] * self.scale, loss[1]) if isinstance(loss, tuple) else loss * self.scale


def model():
    set_seed(3)
    config = BertConfig(vocab_size=61, num_labels=3, max_position_embeddings=32, **_SIZES, **_DROPOUT)
    return BertForSequenceClassification(config).double()


def rows():
    tokens = torch.randint(61, (14, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row[0] % 3} for row in tokens]


def arguments(kind=TrainingArguments, **options):
    return kind(
        sys.argv[2], per_device_train_batch_size=4, max_steps=4, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, learning_rate=1e-3, **options,
    )  # fmt: skip


def with_trainer(kind=Trainer, **options):
    args, prepared = arguments(), Path(sys.argv[2], "prepared")
    counted = args.world_size
    with args.main_process_first():  # of all ranks, however many replicas there are
        assert prepared.exists() or os.environ.get("RANK", "0") == "0"
        prepared.touch()
    trainer = kind(model=model(), args=args, train_dataset=rows(), **options)
    assert trainer.args.world_size == trainer.accelerator.num_processes
    is_planned = any(getattr(each, "layout", "").startswith("auto") for each in sys.meta_path)  # once there is a model
    assert is_planned or trainer.args.world_size == counted
    assert isinstance(trainer, kind) and type(trainer).__name__ == kind.__name__
    assert pickle.loads(pickle.dumps(kind)) is kind and kind.__name__ in repr(type(trainer))
    trainer.train()
    trainer.save_model(sys.argv[2])
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_subclass():
    return with_trainer(Scaled, scale=2.0)


def words_and_llama():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(40)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w2", unk_token="w1")
    set_seed(3)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=40, pad_token_id=0, eos_token_id=2, **_SIZES)).double()
    texts = [" ".join(f"w{(3 * row + at) % 37 + 3}" for at in range(5 + row % 4)) for row in range(14)]
    return tokenizer, llama, texts


def with_sft():
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer, llama, texts = words_and_llama()
    args = arguments(SFTConfig, bf16=False, gradient_checkpointing=False)
    data = Dataset.from_dict({"text": texts})
    trainer = SFTTrainer(model=llama, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_grpo():
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids, **further):
        return [sum(ids) % 11 / 5 for ids in completion_ids]

    tokenizer, llama, texts = words_and_llama()
    args = arguments(GRPOConfig, bf16=False, num_generations=2, generation_batch_size=8, max_completion_length=6)
    data = Dataset.from_dict({"prompt": texts})
    trainer = GRPOTrainer(llama, reward, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry for name in ("loss", "grad_norm")]


def with_accelerate():
    from accelerate import Accelerator, skip_first_batches

    accelerator, losses = Accelerator(), []
    assert accelerator.state.num_processes == accelerator.num_processes
    assert accelerator.state.process_index == accelerator.process_index
    drawn = torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])  # without a seed
    if torch.distributed.is_initialized():
        ranks = [torch.empty_like(drawn) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(ranks, drawn)
        assert all(each.equal(drawn) for each in ranks)
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    loader = DataLoader(rows(), batch_size=4, shuffle=True)
    made, optimizer, loader = accelerator.prepare(made, optimizer, loader)
    for batch in (batch for skipped in (0, 2) for batch in skip_first_batches(loader, skipped)):
        loss = made(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def with_lightning():
    import lightning

    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model()

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(Module(), DataLoader(rows(), batch_size=4))
    return losses


def with_fabric():
    import lightning

    fabric, losses = lightning.Fabric(accelerator="cpu"), []
    fabric.launch()
    made = model()
    made, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
    for batch in fabric.setup_dataloaders(DataLoader(rows(), batch_size=4)):
        loss = made(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_ddp():
    torch.distributed.init_process_group("gloo")
    made = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
    made(**{name: value[None] for name, value in rows()[0].items()}).loss.backward()
    optimizer.step()
    return ["trained"]


def with_fsdp():
    Trainer(model=model(), args=arguments(fsdp="full_shard", fsdp_config={}), train_dataset=rows())


def with_own_plugin():
    from booster.integrations.transformers import boosted
    from plugins.hybrid_parallel import HybridParallelPlugin

    return with_trainer(boosted(Trainer), plugin=HybridParallelPlugin(tp_size=2))


def with_replaced_trainer():
    import transformers

    class Foreign:
        pass

    transformers.Trainer = Foreign
    return with_ddp()


def with_error_on_one_rank():
    if os.environ["RANK"] == "1":
        Scaled.compute_loss = lambda self, *args, **options: 1 / 0
    return with_subclass()


def without_training():
    return []


if __name__ == "__main__":
    name = sys.argv[1]
    losses = globals()[name]()
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[2], "losses.json").write_text(json.dumps(losses))
