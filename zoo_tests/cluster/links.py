"""The cable between a machine and the switch: its rate, losses and cuts, which may change while a job runs.

The rate is a token bucket at both ends (`tc tbf`). Losses and cuts are programs of the classic packet filter, which see
packets as they leave an end (`tc filter bpf`, with the kernel's random numbers): so one direction can be cut alone, and
no sender is told, as with a switch that fails.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Literal

from zoo_tests.cluster.namespaces import Namespace

Direction = Literal["both", "in", "out"]
_MTU = 9000
_QUEUE_MS = 100  # what waits longer for its turn is dropped
_SEGMENT = 65536  # the largest packet that TCP hands to an interface
_MAX_SEGMENTS = 65535
_FILTER = "egress prio 1 handle 1 protocol all"
_DROP_ALL = "1,6 0 0 2"  # return TC_ACT_SHOT
_RANDOM = 2**32 - 0x1000 + 56  # where the filter's loads find a random number
_PASS = 2**32 - 1  # TC_ACT_UNSPEC


class Link:
    """A link of a machine to the switch.

    Args:
        machine, switch: their namespaces.
        number: of the machine, from 1.
        address: of the machine, with the length of the network's prefix.
    """

    def __init__(self, machine: Namespace, switch: Namespace, number: int, address: str) -> None:
        port = f"port{number}"
        self._ends = {"out": (machine, "eth0"), "in": (switch, port)}
        peer = f"peer name eth0 mtu {_MTU} address {hardware_address(number)} netns {machine.pid}"
        _do(
            switch,
            f"ip link add {port} mtu {_MTU} type veth {peer}",
            f"ip link set {port} master bridge up",
            f"tc qdisc add dev {port} clsact",
        )
        _do(machine, f"ip address add {address} dev eth0", "ip link set eth0 up", "tc qdisc add dev eth0 clsact")
        self._losses = dict.fromkeys(self._ends, 0.0)

    def set(self, rate: str | None = None, loss: float = 0.0) -> None:
        """Change the link in both directions.

        Args:
            rate: such as "100mbit" or "5mbit"; None for as much as this machine can move.
            loss: share of packets that are lost.
        """
        for direction, (namespace, name) in self._ends.items():
            self._lose(direction, loss)
            # Losses are of packets on the wire, not of the large ones that the kernel would divide later.
            segments = f"ip link set {name} gso_max_segs {1 if loss else _MAX_SEGMENTS}"
            if rate is None:
                _do(namespace, segments, f"(tc qdisc del dev {name} root 2> /dev/null || true)")
            else:
                burst = max(2 * _SEGMENT, _bits_per_s(rate) // 8 // 200)  # 5 ms at full rate
                bucket = f"tbf rate {rate} burst {burst} latency {_QUEUE_MS}ms"
                _do(namespace, segments, f"tc qdisc replace dev {name} root {bucket}")

    def cut(self, direction: Direction = "both") -> None:
        """Lose all packets, those that the machine sends ("out"), those that it should get ("in"), or both."""
        for each in self._ends if direction == "both" else (direction,):
            self._lose(each, 1.0)

    def mend(self) -> None:
        """Lose no packet any more."""
        for direction in self._ends:
            self._lose(direction, 0.0)

    def _lose(self, direction: str, share: float) -> None:
        if share == self._losses[direction]:
            return
        namespace, name = self._ends[direction]
        if share == 0.0:
            _do(namespace, f"tc filter del dev {name} egress prio 1")
        else:
            # Load a random number; lose the packet unless it is at least `share` of the largest.
            some = f"4,32 0 0 {_RANDOM},53 0 1 {int(share * 2**32)},6 0 0 {_PASS},6 0 0 2"
            program = _DROP_ALL if share >= 1 else some
            _do(namespace, f"tc filter replace dev {name} {_FILTER} bpf da bytecode '{program}'")
        self._losses[direction] = share


def know_each_other(machines: Mapping[str, Namespace]) -> None:
    """Tell each machine the hardware addresses of all: a cut then stops packets alone, not the search for addresses.

    Args:
        machines: address -> the machine of that number.
    """
    numbered = [(address, hardware_address(number)) for number, address in enumerate(machines, 1)]
    for own, machine in machines.items():
        others = [(address, hardware) for address, hardware in numbered if address != own]
        _do(machine, *(f"ip neighbour replace {each} lladdr {on} dev eth0 nud permanent" for each, on in others))


def hardware_address(number: int) -> str:
    """Return the hardware address of a machine."""
    return f"02:00:00:00:00:{number:02x}"


def _bits_per_s(rate: str) -> int:
    units = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
    return int(rate[:-4]) * units[rate[-4:]]


def _do(namespace: Namespace, *commands: str) -> None:
    script = " && ".join(commands)
    done = subprocess.run(namespace.entering(["bash", "-c", script]), capture_output=True, text=True)
    assert done.returncode == 0, f"{script}: {done.stderr}"
