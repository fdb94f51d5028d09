"""Jobs of Lightning's Trainer, run by one plain process and, boosted, by the ranks of a layout.

A job is the same script for both. The samples of all lengths, the odd sizes and the short last batch are the point: a
mean of means would show.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "tp2pp2": {"tp_size": 2, "pp_size": 2},
    "dp2tp2": {"tp_size": 2},
    "dp2pp2": {"pp_size": 2},
}
BATCH = 4  # samples of a global batch
_WORDS = 61
_PAD = 0


def ranks_of(layout: str) -> int:
    return 2 ** layout.count("2")


def replicas_of(layout: str | None) -> int:
    return 2 if layout and layout.startswith("dp2") else 1


# ----- models and data -----


def bert() -> PreTrainedModel:
    """A classifier, without dropout."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=_WORDS,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=37 * 2,
        num_labels=3,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).train()


def llama() -> PreTrainedModel:
    """A causal language model."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=38,
        pad_token_id=_PAD,
    )
    return LlamaForCausalLM(config).train()


MODELS = {"bert": bert, "llama": llama}


def samples(model: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences of different lengths, of which a classifier tells the kind."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        length = int(torch.randint(3, 14, (), generator=generator))
        words = torch.randint(4, _WORDS, (length,), generator=generator)
        made.append({"input_ids": words, "labels": words if model == "llama" else torch.tensor(index % 3)})
    return made


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest sample of the batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([each["input_ids"] for each in batch], batch_first=True, padding_value=_PAD)
    labels = [each["labels"] for each in batch]
    labels = torch.stack(labels) if labels[0].dim() == 0 else pad(labels, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != _PAD).long(), "labels": labels}


def collate_reversed(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Make the same batch in another order: sums over its samples are rounded in another way."""
    return collate(batch[::-1])


def loader(data: list[Any], layout: str | None, shuffle: bool = False, is_reversed: bool = False) -> DataLoader:
    made = collate_reversed if is_reversed else collate
    return DataLoader(data, BATCH // replicas_of(layout), shuffle=shuffle, collate_fn=made)


class Job(lightning.LightningModule):
    """A LightningModule with a model of transformers, and metrics next to it.

    Args:
        model: "bert" or "llama".
        own_loss: whether the step computes the loss from the logits; both terms are in it if "both".
    """

    def __init__(
        self,
        model: str = "bert",
        own_loss: bool | str = False,
        dtype: str = "float64",
        optimizer: str = "adamw",
        lr: float = 1e-2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = MODELS[model]().to(getattr(torch, dtype))
        self.seen, self.mean_loss = SumMetric(), MeanMetric()

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = self.model(**batch)
        if not self.hparams.own_loss:
            return outputs.loss
        own = torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])
        return own if self.hparams.own_loss is True else outputs.loss + 0.3 * own

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.seen.update(float(len(batch["input_ids"])))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.loss_of(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_rows", float(len(batch["input_ids"])), reduce_fx="sum", sync_dist=True)
        self.mean_loss.update(loss.detach(), len(batch["input_ids"]))
        self.log("val_metric", self.mean_loss)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=0.01)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)
        schedule = get_linear_schedule_with_warmup(optimizer, 3, 60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip = getattr(self.model, "clip_grad_norm_", None)
        if clip is None:
            # Added up in double precision, as the library does.
            gradients = [each.grad.double() for each in self.model.parameters() if each.grad is not None]
            self.log("grad_norm", torch.nn.utils.get_total_norm(gradients))
        else:
            self.log("grad_norm", clip(1e9))


class History(Callback):
    """What Trainer has logged after each step and each validation."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def _note(self, trainer: Any, *names: str) -> None:
        found = {name: float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics}
        self.logs.append({"step": trainer.global_step, **found})

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self._note(trainer, "loss_step", "grad_norm")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note(trainer, "loss_epoch")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, "val_loss", "val_rows", "val_metric")


# ----- trainers -----


def strategy_of(layout: str | None, **options: Any) -> Any:
    """The strategy of a layout; without one, Lightning's own for a single process."""
    if layout is None:
        return "auto"
    from booster.integrations.lightning import HybridParallelStrategy
    from plugins.hybrid_parallel import HybridParallelPlugin

    return HybridParallelStrategy(plugin=HybridParallelPlugin(**LAYOUTS[layout], **options))


def trainer(folder: str | Path, layout: str | None, callbacks: tuple[Callback, ...] = (), **options: Any) -> Any:
    """A quiet Trainer on CPUs."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plugin = options.pop("plugin", {})
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "logger": False}
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    quiet |= {"accelerator": "cpu", "enable_checkpointing": saves}
    return lightning.Trainer(
        default_root_dir=folder,
        strategy=strategy_of(layout, **plugin),
        callbacks=list(callbacks),
        **{**quiet, **options},
    )


def weights_of(made: Any, module: Any, folder: str | Path) -> dict[str, Tensor]:
    """The model's whole weights, by way of the Hugging Face directory under a layout."""
    model = module.model
    if hasattr(made.strategy, "save_model"):
        made.strategy.save_model(str(folder))
        model = type(MODELS[module.hparams.model]()).from_pretrained(folder)
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def fitted(
    folder: str,
    layout: str | None,
    job: dict[str, Any] | None = None,
    counts: tuple[int, int] = (19, 7),
    is_reversed: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit a job with validations.

    Args:
        job: options of `Job`.
        counts: samples for training and validation.
        is_reversed: whether the samples of a batch come in reversed order.
        options: of the Trainer.

    Returns:
        What was logged, the final weights, and the sum over samples that a metric has counted.
    """
    given = dict(job or {})
    history, module = History(), JOBS[given.pop("kind", "automatic")](**given)
    model = module.hparams.model
    made = trainer(
        folder,
        layout,
        (history,),
        **{"max_epochs": 2, "gradient_clip_val": None if module.automatic_optimization is False else 0.7, **options},
    )
    torch.manual_seed(11)
    made.fit(
        module,
        loader(samples(model, counts[0]), layout, True, is_reversed),
        loader(samples(model, counts[1], 1), layout, False, is_reversed),
    )
    return {
        "logs": history.logs,
        "weights": weights_of(made, module, Path(folder) / "final"),
        "seen": float(module.seen.compute()),
    }


def differences_of_logs(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """The greatest difference of what was logged under each name, relative where a value is above 1; nan if one is."""
    assert [each.keys() for each in ours["logs"]] == [each.keys() for each in plain["logs"]]
    found: dict[str, list[float]] = {}
    for mine, theirs in zip(ours["logs"], plain["logs"], strict=True):
        for name, value in theirs.items():
            found.setdefault(name, []).append(abs(mine[name] - value) / max(abs(value), 1.0))
    return {name: _greatest(values) for name, values in found.items()}


def worst_difference(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """The greatest difference of what was logged, and of the weights."""
    assert ours["weights"].keys() == plain["weights"].keys()
    assert ours["seen"] == plain["seen"]
    weights = [float((ours["weights"][name] - each).abs().max()) for name, each in plain["weights"].items()]
    logs = differences_of_logs(ours, plain)
    return {"logs": _greatest(list(logs.values())), "weights": _greatest(weights)}


def _greatest(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).max())  # which is nan if one of them is


class ManualJob(Job):
    """Manual optimization, which accumulates over two batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = self.loss_of(batch)
        self.manual_backward(loss / 2)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss


class TwoOptimizers(Job):
    """Manual optimization with an optimizer of the encoder and one of the head, which never have gradients together.

    The first loss is computed while only the encoder requires gradients, or before that; the second one before only the
    head does. The head accumulates over two batches, and its gradients are not reset in between.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        encoder = torch.optim.AdamW(self.model.bert.parameters(), lr=1e-2)
        return encoder, torch.optim.SGD(self.model.classifier.parameters(), lr=0.1, momentum=0.9)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        encoder, head = self.optimizers()
        early = self.loss_of(batch) if batch_idx % 2 else None
        self.toggle_optimizer(encoder)
        loss = self.loss_of(batch) if early is None else early
        self.manual_backward(loss)
        self.clip_gradients(encoder, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        encoder.step()
        encoder.zero_grad()
        self.untoggle_optimizer(encoder)
        second = self.loss_of(batch)
        with head.toggle_model(sync_grad=bool(batch_idx % 2)):
            self.manual_backward(second / 2)
            if batch_idx % 2:
                head.step()
                head.zero_grad()
        self.log("loss", loss + second, on_step=True, on_epoch=True, sync_dist=True)
        return loss


JOBS = {"automatic": Job, "manual": ManualJob, "two-optimizers": TwoOptimizers}
