"""A machine made of Linux namespaces: its own processes, network, files in /tmp and /dev/shm, and host name.

The first process of a machine ends with the process that started it, and the kernel ends all others with the first. A
network interface and a mount end with their namespace. So nothing outlives a test, whatever ends the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from zoo_tests.harness.environment import REPOSITORY, environment_of_a_job
from zoo_tests.harness.ranks import under_load

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_POLL_S = 0.02
_START_S = 20.0
_OF_A_MACHINE = ("--mount", "--uts", "--ipc", "--net", "--pid")
# All mounts are private to the machine. /mnt holds the folders that it sees while /tmp, which may contain them, gets
# hidden.
_SETUP = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /mnt
printf '%s' "$2" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
: > /mnt/resolv.conf
mount --bind /mnt/resolv.conf /etc/resolv.conf
shift 2
number=0
for seen in "$@"; do number=$((number + 1)); mkdir "/mnt/$number"; mount --bind "$seen" "/mnt/$number"; done
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
number=0
for seen in "$@"; do number=$((number + 1)); mkdir -p "$seen"; mount --move "/mnt/$number" "$seen"; done
ip link set lo up
echo ready
exec 1>&2
while :; do sleep 1000 & wait; done
"""
_PROBE = """
ip link add probe type veth peer name other && ip link add bridge type bridge && tc qdisc add dev probe clsact &&
tc qdisc add dev probe root tbf rate 1mbit burst 65536 latency 1ms &&
tc filter add dev probe egress prio 1 handle 1 protocol all bpf da bytecode '1,6 0 0 2'
"""


class Process:
    """A process of a machine; its output goes to files, so that it can be read at any time."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 (read as long as this lives)
        self._process = subprocess.Popen(
            command, stdout=self._files[0], stderr=self._files[1], env=environment, preexec_fn=_end_with_parent
        )

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    @property
    def out(self) -> str:
        return self._read(0)

    @property
    def err(self) -> str:
        return self._read(1)

    def wait(self, limit_s: float) -> int:
        """Wait for its end; return its exit code.

        Raises:
            AssertionError: it runs longer.
        """
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs:\n{self.out[-3000:]}\n{self.err[-3000:]}") from None

    def wait_for(self, what: Callable[[], bool], limit_s: float) -> bool:
        """Whether something came true before the limit and the end of the process."""
        until = time.monotonic() + under_load(limit_s)
        while not what():
            if time.monotonic() > until or self.code is not None:
                return what()
            time.sleep(_POLL_S)
        return True

    def interrupt(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        """The process in the machine, as this process sees it: the child of the `nsenter` that has started it."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0]) if children else self._process.pid

    def _read(self, which: int) -> str:
        # Not seek and read: the job's writes go through the same file position.
        return os.pread(self._files[which].fileno(), 2**22, 0).decode(errors="replace")


class Namespace:
    """The namespaces of a machine or, without a name, a network namespace alone, as a switch needs.

    Args:
        name: host name.
        hosts: contents of /etc/hosts.
        shared: a folder of this machine that the other one sees too, as if a file server had it.
    """

    def __init__(self, name: str | None = None, hosts: str = "", shared: Path | None = None) -> None:
        if name is None:
            kinds = [*_OF_A_MACHINE[3:], "--fork", "--kill-child", "--mount-proc"]
            script = ["bash", "-c", "echo ready; exec sleep infinity"]
        else:
            kinds = [*_OF_A_MACHINE, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
            script = ["bash", "-c", _SETUP, "init", name, hosts, *map(str, _seen_in_tmp(shared))]
        self._unshare = subprocess.Popen(
            ["unshare", *kinds, *script], stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent
        )
        self._enters = _OF_A_MACHINE if name is not None else ("--net",)
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            self.stop()
            raise AssertionError(f"machine {name} does not start")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        self.pid = int(children[0])

    def start(self, *command: str, **environment: str) -> Process:
        """Start a command in the machine; it sees the files of this one, but for /tmp and /dev/shm."""
        return Process(self.entering(command), environment_of_a_job(**environment))

    def run(self, *command: str, limit_s: float = 60.0, **environment: str) -> str:
        """Run a command in the machine; return what it wrote to stdout.

        Raises:
            AssertionError: it fails, or runs longer than `limit_s`.
        """
        process = self.start(*command, **environment)
        code = process.wait(limit_s)
        assert code == 0, f"{' '.join(command)} ended with {code}:\n{process.out[-3000:]}\n{process.err[-3000:]}"
        return process.out

    def stop(self) -> None:
        """End all its processes, as a loss of power does."""
        self._unshare.kill()
        self._unshare.wait()
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()

    def entering(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "--target", str(self.pid), *self._enters, f"--wdns={REPOSITORY}", "--", *command]


@cache
def problem() -> str | None:
    """Return why this machine cannot hold others, None if it can."""
    try:
        done = subprocess.run(
            ["unshare", *_OF_A_MACHINE, "--fork", "--mount-proc", "bash", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=under_load(_START_S),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no machines can be made of namespaces here: {error}"
    if done.returncode == 0:
        return None
    return f"no machines can be made of namespaces here: {' '.join(done.stderr.split()) or 'unshare failed'}"


def _seen_in_tmp(shared: Path | None) -> list[Path]:
    """Return the folders in /tmp that a machine sees: the shared one, and this package if it is there."""
    folders = {REPOSITORY, Path(sys.prefix).resolve(), *([] if shared is None else [shared.resolve()])}
    hidden = {folder for folder in folders if folder.is_relative_to("/tmp")}
    return sorted(folder for folder in hidden if not any(folder.is_relative_to(other) for other in hidden - {folder}))


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
