"""The test cluster itself: what its machines share, what its links do, and that nothing is left of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zoo_tests.cluster.cluster import Cluster, Machine
from zoo_tests.cluster.namespaces import problem
from zoo_tests.harness.environment import environment_of_a_job
from zoo_tests.harness.ranks import under_load

pytestmark = pytest.mark.skipif(problem() is not None, reason=problem() or "")
_PACKETS = 1000
_BYTES = 2**20
_COUNT = """
import socket
at = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
at.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
at.bind(("", 7000))
print("ready", flush=True)
count = 0
while at.recv(2048):
    count += 1
print(count, flush=True)
"""
_SEND = """
import socket, sys
to = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    to.sendto(bytes(int(sys.argv[3])), (sys.argv[1], 7000))
"""
_RECEIVE = """
import socket, time
server = socket.create_server(("", 7001))
print("ready", flush=True)
connection, _ = server.accept()
began, left = time.monotonic(), int(2**20)
while left:
    left -= len(connection.recv(left))
print(time.monotonic() - began)
"""
_FILL = """
import socket, sys
socket.create_connection((sys.argv[1], 7001)).sendall(bytes(2**20))
"""
_HOLD = """
import sys, time
from zoo_tests.cluster.cluster import Cluster
with Cluster(2) as cluster:
    job = cluster.machines[0].start("sleep", "600")
    print(*(machine.inside.pid for machine in cluster.machines), job.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(2, shared=tmp_path) as machines:
        yield machines


def python(script: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-IS", "-c", script, *arguments)


def heard(source: Machine, target: Machine, then: Callable[[], None] = lambda: None) -> int:
    """How many datagrams arrive. `then` is called when they are sent, before one more that ends the count."""
    listener = target.start(*python(_COUNT))
    assert listener.wait_for(lambda: "ready" in listener.out, 30)
    source.run(*python(_SEND, target.address, str(_PACKETS), "100"))
    then()
    source.run(*python(_SEND, target.address, "1", "0"))
    listener.wait(under_load(60))
    return int(listener.out.split()[-1])


@pytest.mark.slow
def test_machines_share_one_folder_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.machines
    first.run("bash", "-c", f"touch /tmp/mine /dev/shm/mine {tmp_path}/ours")
    names = second.run("bash", "-c", f"hostname; ls /tmp /dev/shm {tmp_path}; ps -e --no-headers | wc -l").split()
    assert "node2" in names and "ours" in names and "mine" not in names
    assert int(names[-1]) < 8, "the processes of others are seen"
    assert (tmp_path / "ours").exists() and not Path("/tmp/mine").exists()


@pytest.mark.slow
def test_a_rate_and_losses_of_a_link(cluster: Cluster) -> None:
    first, second = cluster.machines
    second.link.set(rate="8mbit")
    server = first.start(*python(_RECEIVE))
    assert server.wait_for(lambda: "ready" in server.out, 10)
    second.run(*python(_FILL, first.address))
    server.wait(under_load(60))
    assert float(server.out.split()[-1]) > 0.4 * _BYTES / 1e6, "a second, less what is buffered, and starting"
    second.link.set(loss=0.2)
    assert 0.7 * _PACKETS < heard(first, second, then=second.link.set) < 0.9 * _PACKETS
    assert heard(first, second) == _PACKETS


@pytest.mark.slow
def test_a_cut_of_one_direction(cluster: Cluster) -> None:
    first, second = cluster.machines
    first.link.cut("out")
    assert heard(second, first) == _PACKETS, "the other direction works"
    assert heard(first, second, then=first.link.mend) == 0
    assert heard(first, second) == _PACKETS


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_cluster(number: int) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment_of_a_job(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert holder.stdout is not None
    processes = [Path("/proc", pid) for pid in holder.stdout.readline().split()]
    assert len(processes) == 3 and all(process.exists() for process in processes)
    holder.send_signal(number)
    holder.wait(under_load(60))
    limit = time.monotonic() + under_load(5)
    while any(process.exists() for process in processes):
        assert time.monotonic() < limit, "processes of the machines are left"
        time.sleep(0.05)
    holder.stdout.close()
