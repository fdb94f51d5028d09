"""Several machines in one network, for as long as a `with` block lasts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from zoo_tests.cluster.links import Link, know_each_other
from zoo_tests.cluster.namespaces import Namespace, Process

PORT = 29400
_NETWORK = "10.77.0"


@dataclass(frozen=True)
class Machine:
    """One of the machines.

    Attributes:
        name, address: host name and address.
        inside: its namespaces, in which commands run.
        link: its link to the switch.
    """

    name: str
    address: str
    inside: Namespace
    link: Link

    def run(self, *command: str, limit_s: float = 60.0, **environment: str) -> str:
        """Run a command in it; see `Namespace.run`."""
        return self.inside.run(*command, limit_s=limit_s, **environment)

    def start(self, *command: str, **environment: str) -> Process:
        """Start a command in it; see `Namespace.start`."""
        return self.inside.start(*command, **environment)

    def lose_power(self) -> None:
        """End the machine: its link first, so that nothing tells the others."""
        self.link.cut()
        self.inside.stop()


class Cluster:
    """Machines node1, node2, ... joined by a switch; ended with the block, or with this process.

    Args:
        size: number of machines.
        shared: a folder that all machines see, see `Namespace`.
        own_names: for each machine, what its own name stands for in its /etc/hosts: the address in the network by
            default, "127.0.1.1" as Debian's installer writes it, or "" if the name is not there.
    """

    def __init__(self, size: int, shared: Path | None = None, own_names: Sequence[str] = ()) -> None:
        self.size, self.shared, self.own_names = size, shared, own_names
        self.machines: list[Machine] = []
        self._all: list[Namespace] = []

    def __enter__(self) -> Cluster:
        try:
            self._build()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start_job(self, ranks: int, *command: str, launcher: str = "booster", **environment: str) -> list[Process]:
        """Start an agent on every machine, joined by the c10d rendezvous on the first; `ranks` on each machine."""
        return [
            machine.start(*self.agent(ranks, *command, launcher=launcher), **{"OMP_NUM_THREADS": "1", **environment})
            for machine in self.machines
        ]

    def agent(self, ranks: int, *command: str, launcher: str = "booster") -> list[str]:
        """Return the command of an agent: of `booster run`, or of torchrun."""
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        start = [sys.executable, "-m", "booster", "run"] if launcher == "booster" else [torchrun]
        place = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{_NETWORK}.1:{PORT}"]
        return [*start, "--nnodes", str(self.size), "--nproc-per-node", str(ranks), *place, *command]

    def _build(self) -> None:
        self._all.append(switch := Namespace())
        subprocess.run(switch.entering(["ip", "link", "add", "bridge", "type", "bridge"]), check=True)
        subprocess.run(switch.entering(["ip", "link", "set", "bridge", "up"]), check=True)
        names = {f"node{number}": f"{_NETWORK}.{number}" for number in range(1, self.size + 1)}
        for number, (name, address) in enumerate(names.items(), 1):
            known = {**names, name: self.own_names[number - 1] if self.own_names else address}
            hosts = "".join(f"{where} {host}\n" for host, where in known.items() if where)
            self._all.append(inside := Namespace(name, f"127.0.0.1 localhost\n{hosts}", self.shared))
            link = Link(inside, switch, number, f"{address}/24")
            self.machines.append(Machine(name, address, inside, link))
        know_each_other({machine.address: machine.inside for machine in self.machines})

    def _stop(self) -> None:
        for namespace in reversed(self._all):
            namespace.stop()
