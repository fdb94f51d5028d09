"""Device models of the planner: compute speed, memory and links, with presets for common GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.config.groups import CPU


@dataclass(frozen=True)
class Link:
    """Link in the alpha-beta model (Hockney): a message of n bytes takes `latency + n / bandwidth`."""

    latency: float  # minimum seconds of a message
    bandwidth: float  # bytes per second that one rank sends while it receives as many
    rates: Mapping[str, float] = field(default_factory=dict)  # kind of collective -> its measured bandwidth, if known

    def collective(self, kind: str, size: float, ranks: int) -> float:
        """Return the seconds of a collective over a ring (Thakur et al., 2005, for the number of steps).

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send".
            size: bytes of the whole buffer: the output of an all-gather, the input of a reduce-scatter.
        """
        if ranks < 2 or not size:
            return 0.0
        if kind in ("send", "broadcast"):
            return self.latency + size / self.bandwidth
        steps = (ranks - 1) * (2 if kind == "all_reduce" else 1)
        return steps * (self.latency + size / ranks / self.rates.get(kind, self.bandwidth))


@dataclass(frozen=True)
class Device:
    """Device and the links around it."""

    name: str  # name of the preset, or "this-machine"
    memory: float  # bytes that a rank may use
    # precision -> dense peak FLOP/s by the vendor's specification; without "fp8" where there are no such products
    flops: Mapping[str, float]
    matmul_efficiency: float  # fraction of the peak that large matmuls reach
    bandwidth: float  # bytes per second that elementwise operators reach
    inside: Link  # link between the devices of a node
    between: Link  # link between nodes
    node_size: int = 8
    # FLOPs of a matmul that reaches half of that fraction; smaller ones utilize the device less
    matmul_half: float = 2e9
    attention_efficiency: float = 0.5  # fraction of the peak that fused attention reaches
    # fraction of the memory traffic of elementwise operators that remains: 1 for the unfused operators of transformers,
    # less if they are fused
    elementwise: float = 1.0
    operator: float = 6e-6  # minimum seconds of an operator launched from Python
    optimizer_bytes: float = 32.0  # bytes that a step moves per updated element: 28 of fused AdamW, 4 of the norm
    master_bytes: float = 18.0  # further ones for a copy of an element in 16 bit: 12 to compare them, 6 to write it
    overlap: float = 0.7  # fraction of a pass that collectives over replicas and copies to the host can overlap with
    host_link: float = 0.8 * 32e9  # bytes per second between the device and the memory of its machine, in one direction
    host_bandwidth: float = 25e9  # bytes per second of the memory of the machine, for each device
    disk: float = 1.6e9  # bytes per second of a directory, for each device

    def place_bandwidth(self, place: str | None) -> float:
        """Return the bytes per second between the device and a place of offload: "cpu", or a directory."""
        if place is None:
            return float("inf")
        return self.host_link if place == CPU else min(self.host_link, self.disk)

    @property
    def type(self) -> str:
        """Torch's name of this kind of device: "cpu" or "cuda"."""
        is_cpu = self.name == "this-machine" and not torch.cuda.is_available()
        return "cpu" if is_cpu else "cuda"

    def link(self, span: int) -> Link:
        """Return the link of a group of ranks whose first and last rank are `span` apart."""
        return self.inside if span < self.node_size else self.between

    def ring(self, ranks: int, stride: int, has_all_adapters: bool = True) -> Link:
        """Return the link of a ring of ranks that are `stride` apart.

        Of several ranks on a machine, one sends to the next machine. The others leave it their share of the network:
        ranks on CPUs have one adapter together, and NCCL makes a ring for the adapter of each GPU.

        Args:
            has_all_adapters: False for messages between two GPUs, each of which has the adapter of its sender.
        """
        here = self.node_size // stride
        is_far = (ranks - 1) * stride >= self.node_size
        if not is_far or here < 2 or not (has_all_adapters or self.type == "cpu"):
            return self.link((ranks - 1) * stride)
        most = float("inf") if self.type == "cpu" else self.inside.bandwidth
        rates = {kind: min(rate * here, most) for kind, rate in self.between.rates.items()}
        return replace(self.between, bandwidth=min(self.between.bandwidth * here, most), rates=rates)

    def all_to_all(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds in which ranks `stride` apart exchange `size` bytes each: all messages at once.

        Those to other machines share a rank's adapter, and those within its machine its link there.
        """
        near = min(ranks, max(1, self.node_size // stride))
        counts = (self.inside, near - 1), (self.between, ranks - near)  # of messages
        seconds = max(count / link.bandwidth for link, count in counts) * size / ranks
        return self.link((ranks - 1) * stride).latency + seconds

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of all that training in `precision` does not multiply in 8 bit."""
        return self.flops["bf16" if precision == "fp8" else precision]

    def matmul_seconds(self, flops: float, size: float, peak: float) -> float:
        """Return the seconds of a matmul of `flops` FLOPs, `peak` a second, with matrices of `size` bytes in total."""
        rate = peak * self.matmul_efficiency * flops / (flops + self.matmul_half)
        return max(flops / rate, size / self.bandwidth)


# Peak FLOP/s, memory and links are from the vendors' specifications (one direction of NVLink; the usual network of such
# a node: eight adapters of 200, 400, 400 and 400 Gb/s). Efficiencies are those that large kernels and NCCL reach in
# published measurements of bf16 matmuls and all-reduces; docs/planner.md compares the predictions with published runs.
# The link to the host is four fifths of PCIe 4.0 x16 (32 GB/s) for A100 and of PCIe 5.0 x16 (64 GB/s) for the others.
# The memory of the host is that of two sockets with eight channels of DDR4-3200 or DDR5-4800, half of which streams,
# shared by eight devices. The directory of a device is assumed to have half of what an NVMe drive of PCIe 3.0 x4 reads
# (3.2 GB/s), since as much is written as read; `--disk` gives another number.
_H100 = Device(
    name="H100",
    memory=80e9,
    flops={"bf16": 989e12, "fp16": 989e12, "fp32": 67e12, "fp8": 1979e12},
    matmul_efficiency=0.70,
    matmul_half=6e9,
    bandwidth=0.85 * 3.35e12,
    inside=Link(5e-6, 0.80 * 450e9),
    between=Link(12e-6, 0.85 * 50e9),
    host_link=0.8 * 64e9,
    host_bandwidth=38e9,
)
_A100 = Device(
    name="A100",
    memory=80e9,
    flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    matmul_efficiency=0.72,
    bandwidth=0.85 * 2.04e12,
    inside=Link(5e-6, 0.78 * 300e9),
    between=Link(12e-6, 0.85 * 25e9),
)
_H200 = replace(_H100, name="H200", memory=141e9, matmul_efficiency=0.78, bandwidth=0.85 * 4.8e12)
_B200 = replace(
    _H100,
    name="B200",
    memory=180e9,
    flops={"bf16": 2250e12, "fp16": 2250e12, "fp32": 80e12, "fp8": 4500e12},
    matmul_half=12e9,
    bandwidth=0.85 * 8e12,
    inside=Link(5e-6, 0.80 * 900e9),
)
PRESETS: dict[str, Device] = {device.name: device for device in (_A100, _H100, _H200, _B200)}


def preset(name: str, **changes: float | int | Link | None) -> Device:
    """Return the preset called `name` (in any case), with the fields in `changes` replaced unless they are None."""
    found = {known.lower(): device for known, device in PRESETS.items()}.get(name.lower())
    if found is None:
        raise ConfigurationError(f"no device '{name}' is known; use {', '.join(PRESETS)} or this-machine")
    return replace(found, **{key: value for key, value in changes.items() if value is not None})
