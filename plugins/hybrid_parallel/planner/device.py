"""What the planner knows of devices: how fast they compute, how much they hold, how they are connected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from booster.errors import ConfigurationError

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """A connection, by the alpha-beta model (Hockney): a message of n bytes takes `latency + n / bandwidth`.

    Attributes:
        latency: seconds a message takes at least.
        bandwidth: bytes a second that one rank sends while it receives as many.
        rates: kind of collective -> its own bandwidth, where that is known.
    """

    latency: float
    bandwidth: float
    rates: Mapping[str, float] = field(default_factory=dict)

    def collective(self, kind: str, size: float, ranks: int) -> float:
        """Seconds of a collective over a ring of `ranks` (Thakur et al., 2005, for the number of steps).

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send".
            size: bytes of the whole: what an all-gather ends with, a reduce-scatter begins with.
        """
        if ranks < 2 or not size:
            return 0.0
        if kind in ("send", "broadcast"):
            return self.latency + size / self.bandwidth
        steps = (ranks - 1) * (2 if kind == "all_reduce" else 1)
        return steps * (self.latency + size / ranks / self.rates.get(kind, self.bandwidth))


@dataclass(frozen=True)
class Device:
    """One device, and what is around it.

    Attributes:
        memory: bytes that a rank may use.
        flops: precision -> dense FLOP/s that the maker promises.
        matmul_efficiency: the share of these that large products of matrices reach.
        matmul_half: FLOPs of a product that reaches half of that share; smaller ones fill the device less.
        attention_efficiency: the share that fused attention reaches.
        bandwidth: bytes a second that elementwise operators reach.
        elementwise: the share of the traffic of elementwise operators that is left: 1 for those of transformers as
            they are, less where they are fused.
        operator: seconds that an operator takes at least, launched from Python.
        node_size: devices that `inside` connects; `between` connects the others.
        optimizer_bytes: bytes that a step of the optimizer moves for each parameter that it updates.
        overlap: the share of the last backward pass behind which the reduction of gradients can hide.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    matmul_efficiency: float
    bandwidth: float
    inside: Link
    between: Link
    node_size: int = 8
    matmul_half: float = 2e9
    attention_efficiency: float = 0.5
    elementwise: float = 1.0
    operator: float = 6e-6
    optimizer_bytes: float = 40.0
    overlap: float = 0.7

    def link(self, span: int) -> Link:
        """What connects ranks of which the first and the last are `span` apart."""
        return self.inside if span < self.node_size else self.between

    def matmul_seconds(self, flops: float, size: float, precision: str) -> float:
        """A product of matrices of `size` bytes in all."""
        rate = self.flops[precision] * self.matmul_efficiency * flops / (flops + self.matmul_half)
        return max(flops / rate, size / self.bandwidth)


# Peaks, memory and connections are the makers' (one direction of NVLink; the usual network of such a node: eight
# adapters of 200, 400, 400 and 400 Gb/s). Shares are what large kernels and NCCL reach, as published measurements of
# bf16 products and all-reduces have them; the page docs/planner.md compares what comes of them with published runs.
PRESETS: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="A100",
            memory=80e9,
            flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
            matmul_efficiency=0.72,
            bandwidth=0.85 * 2.04e12,
            inside=Link(5e-6, 0.78 * 300e9),
            between=Link(12e-6, 0.85 * 25e9),
        ),
        Device(
            name="H100",
            memory=80e9,
            flops={"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
            matmul_efficiency=0.70,
            matmul_half=6e9,
            bandwidth=0.85 * 3.35e12,
            inside=Link(5e-6, 0.80 * 450e9),
            between=Link(12e-6, 0.85 * 50e9),
        ),
        Device(
            name="H200",
            memory=141e9,
            flops={"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
            matmul_efficiency=0.78,
            matmul_half=6e9,
            bandwidth=0.85 * 4.8e12,
            inside=Link(5e-6, 0.80 * 450e9),
            between=Link(12e-6, 0.85 * 50e9),
        ),
        Device(
            name="B200",
            memory=180e9,
            flops={"bf16": 2250e12, "fp16": 2250e12, "fp32": 80e12},
            matmul_efficiency=0.70,
            matmul_half=12e9,
            bandwidth=0.85 * 8e12,
            inside=Link(5e-6, 0.80 * 900e9),
            between=Link(12e-6, 0.85 * 50e9),
        ),
    )
}


def preset(name: str, **changes: float | int | Link | None) -> Device:
    """A device by its name, with what the user knows better.

    Raises:
        ConfigurationError: there is no such preset.
    """
    found = {known.lower(): device for known, device in PRESETS.items()}.get(name.lower())
    if found is None:
        raise ConfigurationError(f"no device '{name}' is known; use {', '.join(PRESETS)} or this-machine")
    return replace(found, **{key: value for key, value in changes.items() if value is not None})
