"""Progress of training while it runs: loss, speed, utilization, memory and the time that is left."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.logging import get_logger
from booster.plugin import Plugin
from shardformer.distributed.process_groups import world_group

_logger = get_logger(__name__)
_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids")
_SHOWN = {
    "loss": ".4f",
    "learning_rate": ".2e",
    "tokens_per_second": ",.0f",
    "samples_per_second": ",.1f",
    "generated_tokens_per_second": ",.0f",
    "generating_share": ".0%",
    "training_share": ".0%",
}


class Meter:
    """Counts what passes through a boosted model; ranks talk to each other only where figures are made.

    Example:
        ```python
        meter = Meter(booster.plugin, model, total_steps=1000)
        for batch in loader:
            ...
            meter.step(result.loss, batch, lr=scheduler.get_last_lr()[0])
        meter.close()
        ```

    Args:
        plugin: the parallel training strategy, which counts the model's FLOPs.
        model: the boosted model.
        total_steps: steps of the whole run, for the progress bar and the time that is left; None if unknown.
        initial_step: steps before this run, as after a resume.
        every: steps between two sets of figures.
        peak_flops: FLOP/s that one device promises; None for the plugin's, if it knows the device.
        bar: whether rank 0 shows a progress bar, or log lines if tqdm is not installed.
    """

    def __init__(
        self,
        plugin: Plugin,
        model: nn.Module,
        total_steps: int | None = None,
        initial_step: int = 0,
        every: int = 10,
        peak_flops: float | None = None,
        bar: bool = True,
    ) -> None:
        self.plugin, self.model, self.total_steps = plugin, model, total_steps
        self.initial_step = self.current_step = initial_step
        self.every = max(1, every)
        self.peak_flops = plugin.peak_flops() if peak_flops is None else peak_flops
        self._counts = {"samples": 0.0, "tokens": 0.0, "flops": 0.0, "generated": 0.0}
        self._generating = self._training = 0.0  # seconds
        self._knows_flops = self.peak_flops is not None
        self._figures: dict[str, float] = {}
        self._began = self._since = time.perf_counter()
        self._bar = _progress_bar(total_steps, initial_step) if bar and _is_rank_0() else None
        self._shows = bar and _is_rank_0()

    def restart(self, step: int, total_steps: int | None = None) -> None:
        """Begin to count time from now, at a step of a run."""
        self.initial_step = self.current_step = step
        self.total_steps = total_steps
        self._began = self._since = time.perf_counter()

    def count(self, batch: Any) -> None:
        """Count a batch of this rank: its samples, tokens and FLOPs; padding is no token."""
        tensors = batch if isinstance(batch, Mapping) else {"": batch}
        rows = next((len(each) for each in tensors.values() if isinstance(each, Tensor) and each.dim()), 0)
        self._counts["samples"] += rows
        self._counts["tokens"] += _num_tokens(tensors)
        if self._knows_flops and rows:
            flops = self.plugin.model_flops(self.model, tensors)
            self._knows_flops = flops is not None
            self._counts["flops"] += flops or 0.0

    @contextmanager
    def generating(self) -> Iterator[Callable[[Tensor | float], None]]:
        """Time what makes samples in this context; all ranks enter it.

        Yields:
            A function that counts the new tokens of this replica: a number, or a mask of them.
        """

        def count(tokens: Tensor | float) -> None:
            self._counts["generated"] += float(tokens.sum() if isinstance(tokens, Tensor) else tokens)

        began = time.perf_counter()
        yield count
        self._generating += time.perf_counter() - began

    @contextmanager
    def training(self) -> Iterator[None]:
        """Time what trains in this context, without `generating` inside of it; all ranks enter it."""
        began = time.perf_counter() - self._generating
        yield
        self._training += time.perf_counter() - self._generating - began

    def step(self, loss: Tensor | float | None = None, batch: Any = None, lr: float | None = None) -> None:
        """Note the end of an optimizer step; all ranks call it.

        Args:
            loss: of the step; read only where figures are made, so that a device is not waited for at each step.
            batch: this rank's batch; None if `count` was called with each of its parts.
            lr: the learning rate.
        """
        if batch is not None:
            self.count(batch)
        self.current_step += 1
        if self._bar is not None:
            self._bar.update(1)
        if (self.current_step - self.initial_step) % self.every == 0 or self.current_step == self.total_steps:
            self.measure(loss, lr)

    def measure(self, loss: Tensor | float | None = None, lr: float | None = None) -> dict[str, float]:
        """Make figures of what was counted since the last ones; all ranks call it, and get the same figures."""
        now = time.perf_counter()
        own = [now - self._since, now - self._began, _memory_of_this_rank(), self._generating, self._training]
        seconds, whole, memory, generating, training = _largest(own)
        self._since = now
        ranks_of_a_replica = max(1, _world_size() // getattr(self.plugin, "dp_size", 1))
        counts = _summed(list(self._counts.values()), ranks_of_a_replica)
        samples, tokens, flops, generated = counts
        figures = {} if loss is None else {"loss": float(loss)}
        if lr is not None:
            figures["learning_rate"] = float(lr)
        if tokens:
            figures["tokens_per_second"] = tokens / seconds
        figures["samples_per_second"] = samples / seconds
        if generating:
            figures["generated_tokens_per_second"] = generated / seconds
            figures["generating_share"] = min(generating / seconds, 1.0)
        if training:
            figures["training_share"] = min(training / seconds, 1.0)
        if self._knows_flops and flops:
            # A backward pass costs twice the forward pass.
            figures["mfu"] = 3 * flops / seconds / (self.peak_flops * _world_size())
        if load := self.plugin.expert_load(self.model):
            figures["max_vio"] = max(float(each.max() / each.double().mean()) - 1.0 for each in load.values())
        figures["memory_mib"] = memory / 2**20
        if self.total_steps is not None:
            done = self.current_step - self.initial_step
            figures["eta_s"] = whole / max(done, 1) * (self.total_steps - self.current_step)
        self._counts, self._generating, self._training = dict.fromkeys(self._counts, 0.0), 0.0, 0.0
        self._figures = figures
        self._show()
        return figures

    def figures(self) -> dict[str, float]:
        """Return the latest figures, as trackers take them.

        `loss`; `learning_rate`; `tokens_per_second` and `samples_per_second` over all ranks;
        `generated_tokens_per_second` over all ranks, and `generating_share` and `training_share`, the shares of the
        time in `generating` and `training`, if those were entered; `mfu`, the FLOP/s of the model over those that the
        devices promise, if both are known; `max_vio`, the most by which the fullest expert of a layer exceeds the mean
        of its layer (arXiv 2408.15664), if the plugin counts tokens; `memory_mib` of the fullest rank; `eta_s`.
        """
        return dict(self._figures)

    def line(self) -> str:
        """Return the latest figures as one line of text; "-" is what nothing knows."""
        shown = [
            f"{name.replace('_per_second', '/s')} {self._figures[name]:{form}}"
            for name, form in _SHOWN.items()
            if name in self._figures
        ]
        shown.append(f"MFU {self._figures['mfu']:.1%}" if "mfu" in self._figures else "MFU -")
        if "memory_mib" in self._figures:
            shown.append(f"memory {self._figures['memory_mib']:,.0f} MiB")
        return " · ".join(shown)

    def __getattr__(self, name: str) -> NoReturn:
        instead = "; use step(loss, batch) after each optimizer step" if name == "update" else ""
        raise AttributeError(f"Meter has no {name}{instead}", name=name, obj=self)

    def close(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self.line(), refresh=False)
        elif self._shows:
            of = "" if self.total_steps is None else f" of {self.total_steps}"
            _logger.info("step %d%s: %s", self.current_step, of, self.line())


def _progress_bar(total: int | None, initial: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=initial, dynamic_ncols=True)


def _num_tokens(batch: Mapping[str, Any]) -> float:
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.device.type == "cpu":
        return float(mask.sum())
    # Reading a mask on a device would wait for it.
    ids = next((batch[name] for name in _TOKENS if isinstance(batch.get(name), Tensor)), None)
    return 0.0 if ids is None else float(ids.shape[0] * ids.shape[1] if ids.dim() > 1 else ids.shape[0])


def _memory_of_this_rank() -> float:
    """Return the bytes that this rank has had at most: allocated on its GPU, or resident in host memory."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _summed(values: list[float], copies: int) -> list[float]:
    """Return sums over all ranks of values that `copies` ranks have each counted."""
    total = torch.tensor(values, dtype=torch.float64) / copies
    if _world_size() > 1:
        dist.all_reduce(total, group=world_group())
    return total.tolist()


def _largest(values: list[float]) -> list[float]:
    """Return the largest of each value over all ranks, so that ranks whose clocks differ find the same figures."""
    largest = torch.tensor(values, dtype=torch.float64)
    if _world_size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=world_group())
    return largest.tolist()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
