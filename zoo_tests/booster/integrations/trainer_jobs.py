"""Jobs of transformers' Trainer, run by one plain process and, boosted, by the ranks of a layout.

A job is the same script for both: the models, data and arguments come from here, and `run` makes the trainer. The
samples of all lengths, the odd sizes and the short last batch are the point: a mean of means would show.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from zoo_tests.booster.integrations import trainer_losses

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "tp2pp2": {"tp_size": 2, "pp_size": 2},
}
_WORDS = 61
_PAD = 0


def ranks_of(layout: str) -> int:
    return 4 if layout == "tp2pp2" else 2


def replicas_of(layout: str | None) -> int:
    return 2 if layout == "dp2" else 1


# ----- models and data -----


def bert(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A classifier of pairs, without dropout."""
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
    return BertForSequenceClassification(config).to(dtype)


def new_bert() -> PreTrainedModel:
    """`bert`, as `model_init` wants it."""
    return bert()


def t5(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model that translates, without dropout."""
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=_WORDS,
        d_model=24,
        d_kv=6,
        d_ff=34,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=_PAD,
        pad_token_id=_PAD,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config).to(dtype)


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples like MRPC's: two sentences of different lengths, and whether they say the same."""
    generator = torch.Generator().manual_seed(seed)

    def sentence() -> list[int]:
        length = int(torch.randint(2, 12, (), generator=generator))
        return torch.randint(4, _WORDS, (length,), generator=generator).tolist()

    samples = []
    for index in range(count):
        first, second = sentence(), sentence()
        kinds = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        words = [1, *first, 2, *second, 2]
        samples.append({"input_ids": words, "token_type_ids": kinds, "labels": index % 3, "idx": index})
    return samples


def translations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences, and the same ones backwards: of different lengths, so that replicas have other numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(2, 9, (), generator=generator))
        words = torch.randint(4, _WORDS, (length,), generator=generator).tolist()
        samples.append({"input_ids": [*words, 1], "labels": [*words[::-1][: length - length % 3 or 1], 1]})
    return samples


def table(count: int, seed: int) -> Any:
    """The pairs as a table of `datasets`, with a column that no model reads."""
    from datasets import Dataset

    return Dataset.from_list(pairs(count, seed))


class Stream(IterableDataset):
    """The pairs as a stream, whose length nobody knows."""

    def __init__(self, count: int, seed: int) -> None:
        self.samples = pairs(count, seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad to the longest sample of the batch."""
    batch = {"input_ids": _padded([each["input_ids"] for each in samples], _PAD)}
    batch["attention_mask"] = _padded([[1] * len(each["input_ids"]) for each in samples], 0)
    if "token_type_ids" in samples[0]:
        batch["token_type_ids"] = _padded([each["token_type_ids"] for each in samples], 0)
    if isinstance(samples[0]["labels"], list):
        return {**batch, "labels": _padded([each["labels"] for each in samples], -100)}
    return {**batch, "labels": torch.tensor([each["labels"] for each in samples])}


def collate_with_decoder(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """`collate`, and the decoder's inputs, which label smoothing needs: the labels come too late for the model."""
    batch = collate(samples)
    begins = torch.full((len(samples), 1), _PAD)
    shifted = torch.cat([begins, batch["labels"][:, :-1]], dim=1)
    return {**batch, "decoder_input_ids": shifted.masked_fill(shifted == -100, _PAD)}


def _padded(rows: list[list[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def accuracy(prediction: Any) -> dict[str, float]:
    """Share of right labels, and the mean of what was predicted: it shows an order that is not the dataset's."""
    found, labels = prediction.predictions.argmax(-1), prediction.label_ids
    order = sum(index * value for index, value in enumerate(prediction.predictions[:, 0].tolist()))
    return {"accuracy": float((found == labels).mean()), "order": order, "count": len(labels)}


def running_count(prediction: Any, compute_result: bool) -> dict[str, float]:
    """Metrics that are called for each batch: those of the last one, and whether it is the last."""
    found, labels = torch.as_tensor(prediction.predictions).argmax(-1), torch.as_tensor(prediction.label_ids)
    losses = float(torch.as_tensor(prediction.losses).mean())
    return {"right": float((found == labels).sum()), "rows": len(labels), "last": float(compute_result), "own": losses}


def inputs_too(prediction: Any) -> dict[str, float]:
    """Metrics that read what the model was given."""
    words = prediction.inputs
    order = sum((row + 1) * int(token) for row, line in enumerate(words) for token in line if token > 0)
    return {**accuracy(prediction), "words": float(order)}


def overlap(prediction: Any) -> dict[str, float]:
    """Share of right tokens in what was generated, and the sum of all tokens, by place."""
    found, labels = prediction.predictions, prediction.label_ids
    width = min(found.shape[1] - 1, labels.shape[1])
    right = (found[:, 1 : width + 1] == labels[:, :width]) & (labels[:, :width] > _PAD)
    tokens = sum((row + 1) * int(token) for row, line in enumerate(found) for token in line if token > 1)
    return {"overlap": float(right.mean()), "tokens": float(tokens)}


# ----- jobs -----


@dataclasses.dataclass(frozen=True)
class Job:
    """One training script.

    Attributes:
        name: "bert" or "t5".
        arguments: of `TrainingArguments`; batch sizes are those of all replicas together.
        options: of the Trainer, by name; a text is a function of this module.
        samples, eval_samples: how many of them.
        dtype: of the weights.
        data: function of this module that makes the samples; None for the usual one.
        trainer: class of the Trainer, by the name in this module; None for the usual one.
        plugin: more options of the layout.
        callbacks: classes of callbacks, by name in this module.
    """

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: int = 11
    eval_samples: int = 7
    dtype: str = "float64"
    data: str | None = None
    trainer: str | None = None
    plugin: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: tuple[str, ...] = ()


@dataclasses.dataclass
class Outcome:
    """What a job left.

    Attributes:
        history: `log_history`.
        weights: whole weights.
        notes: what the callback noted.
        state: numbers of the Trainer's state.
    """

    history: list[dict[str, Any]]
    weights: dict[str, Tensor]
    notes: list[Any]
    state: dict[str, Any]


def make_trainer(job: Job, folder: str, layout: str | None, **more: Any) -> Trainer:
    """Make the job's Trainer: a plain one without a layout."""
    from booster.integrations.transformers import boosted
    from plugins.hybrid_parallel import HybridParallelPlugin

    is_bert = job.name == "bert"
    base: type = _named(job.trainer) if job.trainer else (Trainer if is_bert else Seq2SeqTrainer)
    replicas = replicas_of(layout)
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4} | job.arguments
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        sizes[name] = sizes[name] // replicas
    kind = TrainingArguments if is_bert else Seq2SeqTrainingArguments
    defaults = {"logging_steps": 1, "learning_rate": 2e-3, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = kind(folder, **{**defaults, "save_strategy": "no", **sizes})
    make_data = _named(job.data) if job.data else (pairs if is_bert else translations)
    options: dict[str, Any] = {
        "model": (bert if is_bert else t5)(getattr(torch, job.dtype)),
        "train_dataset": make_data(job.samples, 0),
        "eval_dataset": make_data(job.eval_samples, 1),
        "data_collator": collate,
    }
    options |= {name: _named(value) if isinstance(value, str) else value for name, value in job.options.items()} | more
    if layout is None:
        return base(args=args, **options)
    plugin = HybridParallelPlugin(**LAYOUTS[layout], **job.plugin)
    return boosted(base)(args=args, plugin=plugin, **options)


def run(job: Job, folder: str, layout: str | None = None, resume: str | None = None) -> Outcome:
    """Run a job on this rank, or in this process."""
    as_a_new_process()
    notes = Notes()
    trainer = make_trainer(job, folder, layout, callbacks=[notes, *callbacks_of(job)])
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer, folder, notes)


def outcome(trainer: Trainer, folder: str, notes: Notes) -> Outcome:
    """Return what a trained Trainer holds; a boosted one writes its weights first, which plain code then reads."""
    state = trainer.state
    if dist.is_initialized():
        assert trainer.args.world_size == trainer.plugin.dp_size, "scripts scale learning rates by it"
        assert trainer.args.should_save == (dist.get_rank() == 0)
    numbers = {name: getattr(state, name) for name in ("global_step", "total_flos", "num_input_tokens_seen")}
    target = f"{folder}/saved-{'boosted' if hasattr(trainer, 'plugin') else 'plain'}"
    trainer.save_model(target)
    whole = type(trainer.accelerator.unwrap_model(trainer.model)).from_pretrained(target, dtype="auto")
    return Outcome(state.log_history, dict(whole.state_dict()), notes.found, numbers)


def as_a_new_process() -> None:
    """Forget what accelerate keeps for a process, and set torchrun's variables if this is a rank."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        # Workers of loaders are processes, which daemons such as the pool's ranks may not start.
        multiprocessing.current_process()._config["daemon"] = False


class Notes(TrainerCallback):
    """What a user's callback reads of the model, the optimizer, the schedule and the metrics."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        model, optimizer = objects["model"], objects["optimizer"]
        rate = optimizer.param_groups[0]["lr"]
        self.found.append((state.global_step, model.config.vocab_size, model.num_parameters(), rate))
        self.found.append((objects["lr_scheduler"].last_epoch, objects["train_dataloader"] is not None))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **objects: Any) -> None:
        self.found.append((state.global_step, sorted(metrics), len(objects["eval_dataloader"].dataset)))


class Patience(EarlyStoppingCallback):
    """Ends training when the metric has not become better."""

    def __init__(self) -> None:
        super().__init__(early_stopping_patience=2)


def callbacks_of(job: Job) -> list[TrainerCallback]:
    """Return the callbacks that a job's options name."""
    return [_named(name)() for name in job.callbacks]


# ----- comparison -----

_OF_TIME = ("runtime", "per_second", "total_flos", "model_preparation_time")
_OF_TRAINING = ("loss", "train_loss")  # added up in single precision, whatever the model's


def difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, float]:
    """Return the worst difference of two `log_history` by name, relative where a value is above 1.

    Raises:
        AssertionError: they have other entries, or a value that is no number.
    """
    worst: dict[str, float] = {}
    assert [_kept(each) for each in found] == [_kept(each) for each in expected]
    for one, other in zip(found, expected, strict=True):
        for name in _kept(one):
            apart = abs(one[name] - other[name]) / max(abs(other[name]), 1.0)
            assert apart == apart, f"{name} is {one[name]} instead of {other[name]}"
            worst[name] = max(worst.get(name, 0.0), apart)
    return worst


def check_same(found: Outcome, expected: Outcome, tolerance: float = 1e-9) -> None:
    """Compare what two runs in double precision left: losses of training are added up in single precision."""
    for name, apart in difference(found.history, expected.history).items():
        assert apart < (3e-7 if name in _OF_TRAINING else tolerance), (name, apart)
    assert found.notes == expected.notes
    assert found.state["global_step"] == expected.state["global_step"]
    assert set(found.weights) == set(expected.weights)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=tolerance, atol=tolerance)


def _kept(entry: dict[str, Any]) -> list[str]:
    return sorted(name for name in entry if not name.endswith(_OF_TIME))


def _named(name: str) -> Callable[..., Any]:
    return globals().get(name) or getattr(trainer_losses, name)
