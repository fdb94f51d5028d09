"""Units: the samples that every pass runs over, whatever the layout, and their random numbers.

How a matrix product rounds may depend on its shape. A unit has a fixed number of samples, so that its products have the
same shapes on every rank of every layout.

The generator (`UnitStream`) is seeded when a pass enters a layer or another module outside of
the layers, and when it leaves one. What is drawn in between depends on nothing but the seed, the step, the position of
the unit of samples in the global batch, the name of the module and how often it was called in this pass.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.data.microbatch import split_batch
from plugins.hybrid_parallel.distributed.mesh import DP_CP, HybridMesh
from shardformer.distributed.random import SharedStream, seed_default_generators
from shardformer.utils.untraced import in_backward


class UnitStream(SharedStream):
    """Random stream of a model that is seeded by position.

    Args:
        seed: the same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._step, self._first, self._next, self._unit = -1, 0, 0, 0
        self._calls: Counter[str] = Counter()
        self._seeds: dict[tuple[str, int], int] = {}  # (name, seed before its call) -> seed, for recomputation
        self._is_active = False
        self._attached: set[nn.Module] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitStream:
        """Serve the copies of a model too."""
        return self

    def restart(self, step: int) -> None:
        """Do nothing: a step that is resumed has its numbers."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: the numbers follow from the number of the step."""
        return {}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Do nothing, see `state_dict`."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the default generator inside the context; restore the user's states afterwards."""
        before, self._is_active = self._is_active, True
        try:
            with super().active():
                yield
        finally:
            self._is_active = before

    def begin_pass(self, step: int, units_before: int, units: int) -> None:
        """Note which samples come next.

        Args:
            step: number of optimizer steps so far.
            units_before: units of this batch on the replicas before this one.
            units: units of this batch on all replicas.
        """
        if step != self._step:
            self._step, self._next = step, 0
            self._seeds.clear()
        self._first = self._next + units_before
        self._next += units

    def begin_unit(self, index: int) -> None:
        """Seed for unit `index` of this replica's part of the batch."""
        if self._is_active:
            self._unit = self._first + index
            self._calls.clear()
            seed_default_generators(self._seed_of(""))

    def attach(self, model: nn.Module) -> None:
        """Seed at the layers of `model`, and at its other modules that have no modules inside; call it once a stage."""
        self._attach_below(model, "")

    def _attach_below(self, module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            if child in self._attached:
                continue
            if isinstance(module, nn.ModuleList) or not any(True for _ in child.children()):
                self._attached.add(child)
                child.register_forward_pre_hook(partial(self._enter, where))
                child.register_forward_hook(partial(self._leave, where))
            else:
                self._attach_below(child, where)

    def _enter(self, name: str, *_: Any) -> None:
        if not self._is_active:
            return
        key = (name, torch.initial_seed())
        if not in_backward():
            self._calls[name] += 1
            self._seeds[key] = self._seed_of(f"{name}:{self._calls[name]}")
        # Recomputation restores the generator first, so that the key is that of the forward pass.
        if key in self._seeds:
            seed_default_generators(self._seeds[key])

    def _leave(self, name: str, *_: Any) -> None:
        if self._is_active and not in_backward():
            seed_default_generators(self._seed_of(f"{name}:{self._calls[name]}:after"))

    def _seed_of(self, place: str) -> int:
        text = f"{self.seed}:{self._step}:{self._unit}:{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class Units:
    """Cuts batches into units.

    Args:
        size: samples of a unit.
        mesh: the grid of ranks.
        stream: draws the random numbers of the units.

    Attributes:
        counts_positions: whether positions are counted from the first token that is no padding, as `generate` does.
    """

    counts_positions: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, size: int, mesh: HybridMesh, stream: UnitStream) -> None:
        self.size, self._mesh, self.stream = size, mesh, stream

    def begin(self, rows: int, step: int, replicas_wait: bool) -> int:
        """Begin a pass over a batch; all replicas call it, with their own `rows`.

        Args:
            rows: samples of this replica.
            step: number of optimizer steps so far.
            replicas_wait: whether replicas wait for one another in each pass.

        Returns:
            The number of passes of this replica; those after its own units are over placeholders.

        Raises:
            ConfigurationError: if the samples of a replica are no whole units; raised on all replicas.
        """
        everyone = self._rows_of_replicas(rows)
        for number in everyone:
            if number % self.size:
                raise ConfigurationError(
                    f"reproducible_unit={self.size} does not divide the {number} samples of a replica; use batches of "
                    "a multiple of it with drop_last=True, or reproducible_unit=1"
                )
        units = [number // self.size for number in everyone]
        rank = self._mesh.rank("dp")
        self.stream.begin_pass(step, sum(units[:rank]), sum(units))
        return max(units) if replicas_wait else units[rank]

    def refuse_sums(self) -> None:
        """Refuse a loss (sum, count), of which each replica has a sum of its own.

        Raises:
            ConfigurationError: if there are several replicas.
        """
        if self._mesh.size(DP_CP) > 1:
            raise ConfigurationError(
                "booster.backward got (sum, count), whose sums over replicas round in another way than that of all, so "
                "that reproducible=True does not hold; use outputs.loss, or a criterion of execute_pipeline"
            )

    def cut(self, batch: Mapping[str, Any], rows: int, tokens: Mapping[str, int]) -> list[dict[str, Any]]:
        """Return the units of a batch, in memory of their own: how a kernel rounds may depend on where it begins.

        Args:
            batch: its samples are whole units.
            rows: number of its samples.
            tokens: of images and sounds, see `media_tokens`.
        """
        batch = _with_positions(batch) if rows and self.counts_positions() else batch
        units = split_batch(batch, rows // self.size, tokens=tokens, rows=rows) if rows else []
        return [{name: _copied(value) for name, value in unit.items()} for unit in units]

    def _rows_of_replicas(self, rows: int) -> Sequence[int]:
        if self._mesh.size("dp") == 1:
            return [rows]
        found = [torch.zeros((), dtype=torch.int64) for _ in range(self._mesh.size("dp"))]
        dist.all_gather(found, torch.tensor(rows), group=self._mesh.group("dp"))
        return [int(each) for each in found]


def _copied(value: Any) -> Any:
    is_values = isinstance(value, Tensor) and value.is_floating_point()
    return value.clone(memory_format=torch.contiguous_format) if is_values else value


def _with_positions(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch of texts with positions, if there is padding in front of a text and they are not given."""
    mask = batch.get("attention_mask")
    is_text = not any(isinstance(each, Tensor) and each.is_floating_point() for each in batch.values())
    if "position_ids" in batch or not is_text or mask is None or mask.dim() != 2 or bool(mask[:, 0].all()):
        return batch
    return {**batch, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
