"""What `booster run --elastic` refuses, in one sentence."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from booster.cli.run import parser
from booster.elastic.agent import MachineMemory
from booster.elastic.command import fingerprint_of, is_elastic, limits_of, places_of
from booster.elastic.rendezvous import END, Decision, Endpoint, Rendezvous, Report
from booster.errors import ConfigurationError


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--min-ranks 2", "--min-ranks is an option of elastic jobs; add --elastic"),
        ("--elastic", "--elastic needs the number of ranks that the layout is for; add --max-ranks 4, say"),
        ("--elastic --min-ranks 5 --max-ranks 4", "--min-ranks 5 --max-ranks 4 is no range; use 1 <= MIN <= MAX"),
        ("--elastic --max-ranks 4 --tee 3", "--tee has no effect with --elastic; leave it out"),
        ("--elastic --max-ranks 4 --rejoin-after -1", "--rejoin-after -1 is no number of seconds; use 0 or more"),
        ("--elastic --max-ranks 4 --snapshot-dir /no/such", "--snapshot-dir /no/such is no directory"),
        ("--elastic --max-ranks 4 --nnodes 2", "add --rdzv-endpoint HOST:29400"),
        ("--elastic --max-ranks 4 --rdzv-conf timeout=3", "--rdzv-conf timeout is not known with --elastic"),
        ("--elastic --max-ranks 4 --rdzv-endpoint here:1", "needs this machine's ranks; add --nproc-per-node"),
    ],
)
def test_bad_input(options: str, sentence: str) -> None:
    given = parser().parse_args([*options.split(), "script.py"])
    with pytest.raises(ConfigurationError) as found:
        is_elastic(given)
        limits_of(given)
        places_of(given)
    assert sentence in str(found.value)


@pytest.mark.parametrize("text", ["node1", "node1:", ":29400", "node1:port"])
def test_endpoints_have_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
        Endpoint.parse(text)


def _free_endpoint() -> Endpoint:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Endpoint("127.0.0.1", probe.getsockname()[1])


def test_two_jobs_do_not_mix_at_one_rendezvous(tmp_path: Path) -> None:
    endpoint = _free_endpoint()
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    given = parser().parse_args(["--elastic", "--max-ranks", "4", str(script)])
    first = Rendezvous([endpoint], "job", fingerprint_of(given), 5.0)
    second = Rendezvous([endpoint], "job", fingerprint_of(given), 5.0)
    assert (first.leads, first.number, second.leads, second.number) == (True, 1, False, 2)
    with pytest.raises(ConfigurationError, match=rf"another job \(--rdzv-id job\) is at {endpoint}"):
        Rendezvous([endpoint], "other", fingerprint_of(given), 5.0)
    script.write_text("print(2)\n")
    with pytest.raises(ConfigurationError, match="has the content of the script .*, and this machine"):
        Rendezvous([endpoint], "job", fingerprint_of(given), 5.0)
    with pytest.raises(ConfigurationError, match="has the torch .*, and this machine 1.0; start the same"):
        Rendezvous([endpoint], "job", {"torch": "1.0"}, 5.0)


def test_other_processes_neither_command_a_job_nor_reach_it_from_elsewhere() -> None:
    endpoint = _free_endpoint()
    leader = Rendezvous([endpoint], "job", {}, 5.0, "secret")
    member = Rendezvous([endpoint], "job", {}, 5.0, "secret")
    with pytest.raises(ConnectionRefusedError):  # another address of this machine stands for its other interfaces
        socket.create_connection(("127.0.0.2", endpoint.port), 5.0)
    with pytest.raises(ConfigurationError, match="set the same on all machines of the job"):
        Rendezvous([endpoint], "job", {}, 5.0, "another")
    member.report(Report(beat=3))
    client = member._store
    client.set("report/1", Report(beat=99).to_json())
    assert leader.reports() == {2: Report(beat=3)}
    client.set("report/1", client.get("report/2"))  # signed, for another place
    assert leader.reports() == {2: Report(beat=3)}
    leader.tell_modules(["json"])
    assert (member.modules(), member.decision()) == (["json"], Decision())
    for key, text, read in (
        ("modules", '["antigravity"]', member.modules),
        ("decision", Decision(1, END).to_json(), member.decision),
    ):
        client.set(key, text)
        with pytest.raises(ConfigurationError, match=f"'{key}' in the store at {endpoint} is not signed"):
            read()


def test_links_and_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    target, abandoned = tmp_path / "target", tmp_path / "booster-elastic-killed"
    planted = [tmp_path / f"booster-elastic-{name}" for name in ("link", "lock", "open")]
    (tmp_path / "elsewhere").mkdir(0o700)
    planted[0].symlink_to(tmp_path / "elsewhere")
    for folder, mode in ((planted[1], 0o700), (planted[2], 0o755), (abandoned, 0o700)):
        folder.mkdir()
        folder.chmod(mode)
    (planted[1] / "lock").symlink_to(target)
    if os.geteuid() == 0:
        planted.append(tmp_path / "booster-elastic-owner")
        planted[-1].mkdir(0o700)
        os.chown(planted[-1], 12345, 12345)
    memory = MachineMemory(tmp_path)
    try:
        assert not target.exists() and not list((tmp_path / "elsewhere").iterdir())
        assert all(folder.exists() for folder in planted) and not abandoned.exists()
    finally:
        memory.remove()
