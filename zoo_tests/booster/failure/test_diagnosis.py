"""Who is named, from what ranks say of themselves; and the single looks of the watch, without a job.

What fails here first is a diagnosis: see `booster/failure/diagnosis.py`. Whole jobs: `test_faults.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from booster.failure import guard, machine_links
from booster.failure.desync import _may_be_reported
from booster.failure.diagnosis import (
    Failure,
    RankSnapshot,
    compare_counts,
    diagnose_batches,
    diagnose_counts,
    diagnose_mismatch,
    diagnose_standstill,
    ending,
    is_about_communication,
    ranks_text,
)
from booster.failure.machine_links import Heartbeat, MachineLinks
from booster.failure.operation_log import GroupRecord, Operations, SharedStatus
from booster.failure.peers import STATUS_VARIABLE, Address, Peer, StoppedPeers, StoreClient, note_children
from booster.failure.stack_probe import Wait, acts_alone, wait_of, waits_for_ranks
from zoo_tests.harness.ranks import under_load

STEP, PIPELINE = "optimizer.step", "booster.execute_pipeline"


def record(ranks: list[int], *called: str, pending: int | None = None, name: str = "tp") -> GroupRecord:
    return GroupRecord(name, ranks, len(called), "role", True, list(enumerate(called, start=1)), True, pending)


def at(
    rank: int, operation: str, call: int, *, done: dict[str, int] | None = None, **groups: GroupRecord
) -> RankSnapshot:
    return RankSnapshot(
        rank,
        operation,
        call,
        f"in {operation} (call {call})",
        "waiting in all_reduce at x.py:1",
        5.0,
        done or {},
        groups,
    )


def test_the_odd_one_out_is_named() -> None:
    """Rank 2 did not step, and is in the next batch."""
    snapshots = [at(rank, STEP, 3) for rank in (0, 1, 3)] + [at(2, PIPELINE, 4)]
    found = diagnose_standstill(snapshots)
    assert found.line() == (
        "error: rank 2 skipped a collective: it is in booster.execute_pipeline (call 4), waiting in all_reduce at "
        "x.py:1, while ranks 0, 1 and 3 are in optimizer.step (call 3), waiting in all_reduce at x.py:1"
    )
    assert found.operation == STEP


def test_the_majority_that_waits_is_not_to_blame() -> None:
    """Rank 1 left its partner 0 alone in a group of two, and went on to where 2 and 3 are."""
    alone = at(0, PIPELINE, 5, tp=record([0, 1], "a", "b", pending=2))
    others = [at(rank, STEP, 5, done={PIPELINE: 5}) for rank in (1, 2, 3)]
    assert diagnose_standstill([alone, *others]).rank == 1


def test_a_rank_that_has_ended_is_named() -> None:
    ended = RankSnapshot(3, ended=True)
    found = diagnose_standstill([*(at(rank, PIPELINE, 2) for rank in range(3)), ended])
    assert found.rank == 3
    assert "it has ended, while ranks 0, 1 and 2 are in booster.execute_pipeline (call 2)" in found.message


def test_two_that_nothing_tells_apart_are_both_named() -> None:
    message = diagnose_standstill([at(0, STEP, 1), at(1, PIPELINE, 2)]).line()
    assert "rank 0" in message
    assert "rank 1" in message


def test_a_differing_collective_is_found_by_what_groups_of_the_same_name_did() -> None:
    """In a group of two nobody has the majority; the other groups of the axis did the same work."""
    usual = ("all_reduce of 4", "all_reduce of 8", "all_gather of 2")
    snapshots = [
        at(0, PIPELINE, 1, g0=record([0, 1], *usual)),
        at(1, PIPELINE, 1, g0=record([0, 1], usual[0], usual[2])),
        at(2, PIPELINE, 1, g1=record([2, 3], *usual)),
        at(3, PIPELINE, 1, g1=record([2, 3], *usual)),
    ]
    found = diagnose_mismatch(snapshots)
    assert found.rank == 1
    assert (
        "called all_gather of 2 on the group of ranks 0 and 1 (tp) where others called all_reduce of 8" in found.message
    )
    assert diagnose_mismatch(snapshots[2:]) is None


def test_stages_that_do_other_work_have_no_say() -> None:
    """Rank 1 left out the third collective. The other stage happens to call there what rank 1 did."""
    first = ("all_reduce of 1", "all_reduce of 4", "all_reduce of 5", "all_reduce of 6", "all_reduce of 7")
    second = ("all_reduce of 1", "all_reduce of 3", "all_reduce of 6")
    snapshots = [
        at(0, PIPELINE, 3, g0=record([0, 1], *first, pending=5)),
        at(1, STEP, 3, done={PIPELINE: 3}, g0=record([0, 1], *first[:2], *first[3:])),
        at(2, PIPELINE, 3, g1=record([2, 3], *second)),
        at(3, STEP, 3, done={PIPELINE: 3}, g1=record([2, 3], *second)),
    ]
    assert diagnose_standstill(snapshots).rank == 1
    assert diagnose_mismatch(snapshots) is None


def test_a_rank_that_does_not_repeat_itself_is_named() -> None:
    """All wait in one operation, for each other in a circle; only its own step before tells who has left the way."""
    circle = [at(rank, PIPELINE, 3) for rank in range(4)]
    for usual, odd in ((0, None), (0, 1), (1, 2)):
        assert diagnose_standstill([replace(one, left_out=odd if one.rank == 3 else usual) for one in circle]).rank == 3
    undecided = diagnose_standstill(circle)
    assert diagnose_standstill([replace(one, left_out=one.rank % 2) for one in circle]) == undecided


def test_counts_that_differ_name_the_rank_that_has_fewer() -> None:
    counts = {0: {"g0": 41}, 1: {"g0": 40}, 2: {"g1": 41}, 3: {"g1": 41}}
    differing = compare_counts(counts)
    assert differing == {"g0": {0: 41, 1: 40}}
    groups = {0: ("g0", [0, 1]), 1: ("g0", [0, 1]), 2: ("g1", [2, 3]), 3: ("g1", [2, 3])}
    snapshots = [at(rank, STEP, 7, **{key: record(ranks)}) for rank, (key, ranks) in groups.items()]
    found = diagnose_counts(6, differing, snapshots, counts)
    assert found.rank == 1
    assert "skipped a collective: at the end of optimizer.step (call 6) it had issued 40 on" in found.message
    assert "where the others had issued 41" in found.message


def test_counts_of_point_to_point_groups_prove_nothing() -> None:
    """The first stage of a pipeline only sends, the last only receives."""
    counts = {0: {"g": 9}, 1: {"g": 18}, 2: {"g": 9}}
    snapshots = [at(rank, STEP, 1, g=GroupRecord("", [0, 1, 2], 9)) for rank in range(3)]
    assert diagnose_counts(1, compare_counts(counts), snapshots, counts) is None
    assert compare_counts(counts, ignored={"g"}) == {}


def test_batches_of_one_replica_in_one_pass_are_compared() -> None:
    def batch(number: int, replica: int, **shapes: list[int]) -> str:
        return json.dumps([number, replica, shapes])

    alike = {0: batch(3, 0, x=[4, 12]), 1: batch(3, 0, x=[4, 12]), 2: batch(3, 1, x=[4, 13]), 3: batch(4, 0), 4: ""}
    assert diagnose_batches(alike) == ""
    said = diagnose_batches({**alike, 5: batch(3, 1, x=[5, 13])})
    assert said.startswith("'x' of the batch is [4, 13] on rank 2 and [5, 13] on rank 5; all ranks of a replica need")
    assert "'y' of the batch is missing on rank 2 and [1] on rank 5" in diagnose_batches(
        {**alike, 5: batch(3, 1, x=[4, 13], y=[1])}
    )


def test_over_a_network_only_a_missing_member_proves_a_standstill() -> None:
    waiting = at(0, STEP, 1, g=record([0, 1], "a", "b", pending=2))
    late, there = at(1, PIPELINE, 2, g=record([0, 1], "a")), at(1, STEP, 1, g=record([0, 1], "a", "b", pending=2))
    assert _may_be_reported([waiting, late], one_machine=False)
    assert not _may_be_reported([waiting, there], one_machine=False)
    assert _may_be_reported([waiting, there], one_machine=True)


def test_the_words() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [2, 0], [0, 1, 2, 3])] == ["rank 3", "ranks 0 and 2", "ranks 0 to 3"]
    assert (ending(9), ending(7 << 8), ending(None)) == ("was ended by SIGKILL", "ended with exit code 7", "died")
    assert Failure.found(2, "is stopped").line() == "error: rank 2 is stopped"
    assert is_about_communication(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    assert not is_about_communication(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_about_communication(IndexError("timeout"))


def test_what_the_main_thread_does_is_in_the_page() -> None:
    operations = Operations()
    seen = SharedStatus(f"/proc/self/fd/{operations.page.descriptor}")
    assert seen.phrase == "before its first operation"
    operations.enter(STEP)
    operations.enter("inner")
    assert (seen.phrase, operations.current) == ("in inner (call 1)", ("inner", 1))
    operations.leave("inner", well=True)
    assert seen.phrase == f"in {STEP} (call 1)"
    operations.leave(STEP, well=True, count=lambda: {"g": 4})
    assert (seen.phrase, list(operations.points)) == (f"after {STEP} (call 1)", [(1, {"g": 4})])
    thread = threading.Thread(target=operations.enter, args=("elsewhere",))
    thread.start()
    thread.join()
    assert seen.phrase == f"after {STEP} (call 1)", "another thread is not the main thread"


def test_one_process_gets_the_word() -> None:
    page = SharedStatus()
    assert [
        page.claim_report(),
        page.claim_report(),
        SharedStatus(f"/proc/self/fd/{page.descriptor}").claim_report(),
    ] == [
        True,
        False,
        False,
    ]


@pytest.fixture
def other() -> Iterator[Peer]:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    own = Address.own(None)
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    yield Peer(1, Address(own.machine, process.pid, started, -1))
    process.kill()
    process.wait()


def wait_until(what: Callable[[], bool]) -> None:
    until = time.monotonic() + under_load(10)
    while not what() and time.monotonic() < until:
        time.sleep(0.01)


def test_a_dead_process_is_seen_with_its_signal(other: Peer) -> None:
    assert not other.is_dead()
    os.kill(other.address.pid, signal.SIGTERM)
    wait_until(other.is_dead)
    assert other.is_dead()
    assert ending(other.status()) == "was ended by SIGTERM"


def reap_after_noting(folder: str) -> None:
    """A launcher that looks for ended children from time to time, as torchrun's agent does, and reaps them."""
    note_children(Path(folder))
    children = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sh", "-c", "exit 3"])]
    children[0].kill()
    while any([each.poll() is None for each in children]):
        time.sleep(0.05)
    print(*(each.pid for each in children))


@pytest.mark.slow
def test_a_process_that_its_launcher_has_reaped_is_named_with_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from {__name__} import reap_after_noting as run; run({str(tmp_path)!r})"
    pids = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    reaped = [Peer(1, Address(Address.own(None).machine, int(pid), "1", -1)) for pid in pids]
    assert [ending(each.status()) for each in reaped] == ["died"] * 2
    monkeypatch.setenv(STATUS_VARIABLE, str(tmp_path))
    assert [ending(each.status()) for each in reaped] == ["was ended by SIGKILL", "ended with exit code 3"]


def test_a_number_that_another_process_has_got_is_no_sign_of_life(other: Peer) -> None:
    later = Peer(1, Address(other.address.machine, other.address.pid, "1", -1))
    later.handle = None
    assert later.is_dead()
    later.kill()
    assert not other.is_dead(), "a stranger was killed"


def test_a_stopped_process_is_seen_after_a_while(other: Peer) -> None:
    looks = StoppedPeers(after_s=0.2)
    assert looks.look([other]) is None
    os.kill(other.address.pid, signal.SIGSTOP)
    wait_until(other.is_stopped)
    assert looks.look([other]) is None
    time.sleep(0.25)
    assert looks.look([other]) is other


def test_a_job_that_was_suspended_as_a_whole_is_no_stopped_rank(other: Peer) -> None:
    """This rank did not run either: what it sees first is from before it was resumed."""
    looks = StoppedPeers(after_s=0.2, longest_gap_s=0.1)
    os.kill(other.address.pid, signal.SIGSTOP)
    wait_until(other.is_stopped)
    for _ in range(3):
        assert looks.look([other]) is None
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("file", "call"),
    [("site-packages/torch/distributed/distributed_c10d.py", "all_reduce"), ("site-packages/torch/nn/linear.py", None)],
)
def test_a_wait_for_ranks_is_read_off_the_stack(file: str, call: str | None) -> None:
    """A function of torch.distributed that does not return waits for ranks; one of another part of torch does not."""
    code: dict[str, Callable] = {}
    exec(compile("def all_reduce(lock):\n    lock.acquire()\n", f"/somewhere/{file}", "exec"), code)
    found = wait_while_inside(code["all_reduce"])
    assert (found and found.call) == call
    if found is not None:
        assert "failure/test_diagnosis.py:" in found.place


def test_a_wait_for_a_thread_is_none_for_ranks() -> None:
    assert wait_while_inside(lambda lock: threading.Thread(target=lock.acquire).start() or lock.acquire()) is None


def test_a_wait_that_says_so_is_one() -> None:
    """By other means than torch's; the innermost of the marked functions need not be the one to name."""
    wait = waits_for_ranks(lambda lock: lock.acquire())

    @waits_for_ranks
    def receive(lock: threading.Lock) -> None:
        wait(lock)

    found = wait_while_inside(receive)
    assert found is not None and found.call == "receive"
    assert "failure/test_diagnosis.py:" in found.place


def wait_while_inside(function: Callable[[threading.Lock], object]) -> Wait | None:
    """What is read off the stack of a thread that is blocked in `function`."""
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lambda: function(lock), daemon=True)
    thread.start()
    time.sleep(0.3)
    found = wait_of(sys._current_frames()[thread.ident])
    while thread.is_alive():
        with contextlib.suppress(RuntimeError):
            lock.release()
        thread.join(0.05)
    return found


def test_a_thread_of_the_script_may_go_on_by_itself() -> None:
    """Ranks may wait for what it will issue: that all main threads wait proves no standstill then."""
    event, held, taken = threading.Event(), SimpleNamespace(works=queue.SimpleQueue()), threading.Lock()
    taken.acquire()

    def take_all() -> None:
        for _ in iter(held.works.get, None):
            pass

    def enter() -> None:
        with taken:
            pass

    works = {
        (lambda: time.sleep(1)): True,
        (lambda: event.wait(1)): True,
        (lambda: held.works.get(timeout=1)): True,
        (lambda: event.wait()): False,
        (lambda: held.works.get()): False,
        take_all: False,
        enter: False,
        event.wait: False,  # as idle threads of libraries
    }
    threads = {threading.Thread(target=work, daemon=True): acts for work, acts in works.items()}
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    frames = sys._current_frames()
    assert [acts_alone(frames[thread.ident]) for thread in threads] == list(threads.values())
    event.set(), taken.release()
    for _ in range(2):
        held.works.put(None)


def test_the_first_failure_counts_and_one_rank_speaks() -> None:
    store = dist.HashStore()
    links = [StoreClient(dist.PrefixStore("job", store), rank) for rank in range(2)]
    for link in links:
        link.start()
    first = links[0].publish(Failure.found(1, "is stopped"))
    assert links[1].publish(Failure.found(0, "died")) == first
    assert [link.may_speak() for link in links] == [True, False]
    later = StoreClient(dist.PrefixStore("next attempt", store), 0)
    later.start()
    later.refresh()
    assert later.failure is None, "an earlier attempt's failure is none of this one"
    for link in (*links, later):
        link.stop()


def test_duties_are_done_however_much_is_asked() -> None:
    """A rank that asks for news in a loop must still answer the others."""
    link, looks = StoreClient(dist.HashStore(), 0), []
    link.periodic_tasks.append(looks.append)
    link.start()
    until = time.monotonic() + under_load(5)
    while time.monotonic() < until and len(looks) < 3:
        link.refresh()
    link.stop()
    assert len(looks) >= 3


def test_a_machine_that_gives_no_sign_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    store, found = dist.HashStore(), []
    own = Heartbeat(0, ["here", "here", "there", "there"], 12.0, found.append)
    theirs = Heartbeat(2, ["here", "here", "there", "there"], 12.0, found.append)
    for second in range(40):
        clock[0] = float(second)
        own.look(store)
        if second < 20:
            theirs.look(store)
        if second < 30:
            assert not found
    assert "on machine there, with ranks 2 and 3, has not been heard of for 12 s" in found[0].message


@pytest.mark.parametrize("hears", [True, False])
def test_a_machine_that_is_not_heard_is_told_so(hears: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own kernel hears the other machine until that one ends; see `zoo_tests/cluster` for links that are cut."""
    store, names, found = dist.HashStore(), ["here", "there"], [list[Failure](), list[Failure]()]
    here, there = (MachineLinks(rank, names, "127.0.0.1", 8.0, found[rank].append) for rank in range(2))
    for links in (here, there, here):
        links.look(store)
        links.watch()
    assert here.descriptors()[1:], "no connection"
    (link,) = there._links
    if hears:
        link.close()  # its process has ended
    else:
        monkeypatch.setattr(machine_links, "_silence_s", lambda asked: 9.0 if asked is link else 0.0)
        there.watch()
        assert "rank 0 on machine here cannot be reached from machine there for 8 s" in found[1][0].line()
    here.watch()
    said = [failure.line() for failure in found[0]]
    assert not here._links and (not said) == hears
    assert hears or "rank 1 on machine there cannot be reached from machine here for 8 s" in said[0]


def test_a_rank_that_was_suspended_does_not_judge_by_what_it_saw_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    store, found = dist.HashStore(), []
    own = Heartbeat(0, ["here", "there"], 12.0, found.append)
    for now in (0.0, 1.0, 60.0, 61.0):
        clock[0] = now
        own.look(store)
    assert not found


def test_guard_costs_microseconds() -> None:
    start = time.perf_counter()
    for _ in range(1000):
        with guard("x"):
            pass
    assert time.perf_counter() - start < 0.2
