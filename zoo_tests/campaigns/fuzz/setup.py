"""What both sides build from a case: model, optimizer, scheduler and batches. No line of the library."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from zoo_tests.campaigns.fuzz.case import Case
from zoo_tests.campaigns.fuzz.families import FAMILIES
from zoo_tests.harness.case import DTYPES
from zoo_tests.zoo import Batch, Family, Head
from zoo_tests.zoo.base import VOCAB_SIZE, num_rows

IGNORED = -100
_SPECIAL_TOKENS = 8  # low ids keep their meaning in any vocabulary


def family_of(case: Case) -> Family:
    return FAMILIES[case.family]


def head_of(case: Case) -> Head:
    return family_of(case).heads[case.head]


def build_model(case: Case) -> nn.Module:
    """The whole model, always the same, in training mode."""
    dtype = DTYPES[case.precision]
    model = family_of(case).build(case.head, dtype, **case.config)
    freeze(model, case.frozen, True)
    if case.lora:
        model = _with_adapters(model, dtype, dict(case.lora))
    return model


def _with_adapters(model: nn.Module, dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(21)
        model = get_peft_model(model, LoraConfig(**options)).to(dtype)
        for name, param in model.named_parameters():
            if "lora_B" in name:  # which peft starts at 0
                nn.init.normal_(param, std=0.1)
    return model.train()


def freeze(model: nn.Module, parts: tuple[str, ...] | list[str], frozen: bool) -> None:
    """Freeze or unfreeze the parameters with one of `parts` in their names."""
    for name, param in model.named_parameters():
        if any(part in name for part in parts):
            param.requires_grad_(not frozen)


# ----- optimizers -----


def build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """By the case's options over the groups that it asks for."""
    options = dict(case.optimizer)
    name, groups = options.pop("name"), options.pop("groups")
    for key in ("betas", "eps"):
        if isinstance(options.get(key), list):
            options[key] = tuple(options[key])
    return getattr(torch.optim, name)(_GROUPS[groups](model, options["lr"]), **options)


def _one(model: nn.Module, lr: float) -> Any:
    return list(model.parameters())


def _trainable(model: nn.Module, lr: float) -> Any:
    return [param for param in model.parameters() if param.requires_grad]


def _by_shape(model: nn.Module, lr: float) -> Any:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0, "lr": lr / 2}]


def _by_layer(model: nn.Module, lr: float) -> Any:
    """The deeper a layer, the higher its rate."""
    groups: dict[int, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        number = re.search(r"\.(\d+)\.", name)
        groups.setdefault(int(number.group(1)) + 1 if number else 0, []).append(param)
    return [{"params": params, "lr": lr * (1 + 0.3 * depth)} for depth, params in sorted(groups.items())]


_GROUPS = {"one": _one, "trainable": _trainable, "by shape": _by_shape, "by layer": _by_layer}


def build_scheduler(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler that is stepped after every optimizer step, or None."""
    options = dict(case.scheduler)
    if not options:
        return None
    name = options.pop("name")
    if name == "LambdaLR":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, _falling)
    return getattr(torch.optim.lr_scheduler, name)(optimizer, **options)


def _falling(step: int) -> float:
    return 1 / (1 + 0.5 * step)


# ----- batches -----


def batch_of(case: Case, data: int, rows: int, ignored: tuple[int, int] | None = None) -> Batch:
    """A global batch: `data` chooses content and length, and labels of the rows `ignored` are ignored."""
    made = family_of(case).batch(case.head, data, max(rows, 2), DTYPES[case.precision])
    batch = {key: value[:rows] for key, value in made.items()}
    batch = {key: _in_vocabulary(value, case.config.get("vocab_size", VOCAB_SIZE)) for key, value in batch.items()}
    if is_padded_text(batch) and case.padding != "mixed":
        batch = _padded(batch, case.padding, data)
    labels = batch.get("labels")
    if ignored is not None and labels is not None and not labels.is_floating_point():
        labels = labels.clone()
        has_decoder = any(name in family_of(case).config for name in ("decoder_layers", "num_decoder_layers"))
        rows_ignored = labels[ignored[0] : ignored[1]]
        rows_ignored[..., : -1 if has_decoder else None] = IGNORED  # mBART looks for the last label that is not
        if (labels[..., 1:] != IGNORED).any():  # with none at all plain transformers says NaN
            batch = batch | {"labels": labels}
    return batch


def is_padded_text(batch: Batch) -> bool:
    mask = batch.get("attention_mask")
    return mask is not None and mask.dim() == 2 and "input_ids" in batch and batch["input_ids"].shape == mask.shape


def _in_vocabulary(value: Any, size: int) -> Any:
    """Tokens and labels of the zoo's vocabulary, brought into a smaller one."""
    if not isinstance(value, Tensor) or value.is_floating_point() or size == VOCAB_SIZE:
        return value
    folded = _SPECIAL_TOKENS + (value - _SPECIAL_TOKENS) % (size - _SPECIAL_TOKENS)
    return torch.where(value < _SPECIAL_TOKENS, value, folded)


def _padded(batch: Batch, padding: str, data: int) -> Batch:
    """With the padding on one side, or with none."""
    mask = batch["attention_mask"]
    if padding in ("none", "no mask"):
        tokens = _SPECIAL_TOKENS + (torch.arange(mask.numel()).view(mask.shape) * 7 + data) % 50
        ids = torch.where(mask == 1, batch["input_ids"], tokens)
        batch = batch | {"input_ids": ids, "attention_mask": torch.ones_like(mask)}
        return batch if padding == "none" else {key: value for key, value in batch.items() if key != "attention_mask"}
    is_left = mask[:, 0] == 0
    pads = (mask == 0).sum(1)
    shifts = torch.where(is_left, -pads, 0) if padding == "right" else torch.where(is_left, 0, pads)
    shifts = shifts.tolist()

    def rolled(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != mask.shape:
            return value
        return torch.stack([row.roll(shift) for row, shift in zip(value, shifts, strict=True)])

    return {key: rolled(value) for key, value in batch.items()}


def first_row(batch: Batch, rank: int, world_size: int) -> int:
    return num_rows(batch) * rank // world_size


def fingerprint(outputs: Any, batch: Batch, first: int) -> Tensor:
    """A number that every element of the logits (or what comes first) has a part in, and how large these parts are.

    Those of shares add up.

    Args:
        first: the place of the share's first row in the global batch.
    """
    values = next(outputs[key] for key in _READ if outputs.get(key) is not None)
    values = values[0] if isinstance(values, tuple) else values
    mask = batch.get("attention_mask")
    if mask is not None and values.shape[:2] == mask.shape:
        values = values * mask.view(*mask.shape, *[1] * (values.dim() - 2))
    values = values.detach().double().flatten(1)
    parts = values * torch.cos(torch.arange(values.shape[1], dtype=torch.float64))
    parts = parts * (1 + torch.arange(first, first + len(values))[:, None] / 7)
    return torch.stack([parts.sum(), parts.abs().sum()])


_READ = (
    *("logits", "start_logits", "reconstruction", "prediction_logits", "seq_relationship_logits", "cls_logits"),
    *("last_hidden_state", "feature_maps"),
)
