"""Kills inside of saves, and what is found afterwards.

After each kill other ranks look at the folder: the latest checkpoint has to be the one that was complete before or the
one that was being saved, whole; everything that counts as a checkpoint has to load; the next save has to succeed, and
to clean up.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.checkpoint.atomic_save import checkpoints_in
from zoo_tests.campaigns.crashes.marked import MarkedTraining
from zoo_tests.campaigns.crashes.victims import ARMED, FAILED, HUNG, KILLED, KINDS, MOMENTS, Kill, Nursery
from zoo_tests.harness.ranks import run_on_ranks

_GOLDEN = 0.6180339887498949  # multiples of it, without their whole part, fill [0, 1) evenly


@dataclass(frozen=True)
class Outcome:
    """What a kill led to.

    Attributes:
        is_new: whether the save that was hit is the latest checkpoint.
        hanging: ranks that did not end.
        problems: what should not be, in words.
    """

    kill: Kill
    is_new: bool
    hanging: int
    problems: tuple[str, ...]


def kills(number: int, seed: int = 0) -> Iterator[Kill]:
    """Kinds, layouts, modes and moments in turn, at moments that fill a save evenly."""
    numbers = random.Random(seed)
    scenarios = list(itertools.product(KINDS, (1, 2, 4), (False, True), MOMENTS))
    numbers.shuffle(scenarios)
    for index, scenario in enumerate(itertools.islice(itertools.cycle(scenarios), number)):
        kind, world_size, asynchronous, moment = scenario
        # The first rank makes most of the calls; what happens between them is much the same on all others.
        trigger = numbers.choice([0, numbers.randrange(world_size)])
        yield Kill(kind, asynchronous, world_size, trigger, numbers.random() < 0.5, moment, index * _GOLDEN % 1)


def carry_out(kill: Kill, directory: Path, nursery: Nursery) -> Outcome | None:
    """Kill, and look at what is left; None if the moment did not come within the save."""
    directory.mkdir()
    codes = nursery.lives(kill, directory)
    if not (directory / ARMED).exists() or not {KILLED, FAILED} & set(codes):
        return None  # on a busy machine ranks may not even find each other
    if FAILED in codes:
        raise AssertionError(f"ranks ended with {codes} in {kill}")
    is_new, problems = run_on_ranks(kill.world_size, look, kill, directory / "saves")[0]
    return Outcome(kill, is_new, codes.count(HUNG), tuple(problems))


def look(kill: Kill, folder: Path) -> tuple[bool, list[str]]:
    """On other ranks: whether the pending save is the latest, and what is wrong."""
    training, problems = MarkedTraining(), []
    latest = None
    try:
        latest = training.load(folder, resume="latest")
        if latest not in (kill.complete[-1], kill.pending):
            problems.append(f"the latest is step {latest}")
        named = training.booster.latest_checkpoint(folder)
        if named is None or training.load(Path(named)) != latest:
            problems.append(f"{named} is called the latest, and is not")
        for path in {kill.path(folder, step) for step in kill.complete} | set(checkpoints_in(folder)):
            training.load(path)
    except (ConfigurationError, AssertionError) as error:
        problems.append(str(error))
    problems += _next_save(training, kill, folder)
    return latest == kill.pending, problems


def _next_save(training: MarkedTraining, kill: Kill, folder: Path) -> Iterator[str]:
    """The interrupted save is made again, by a run that knows nothing of it."""
    path, step = kill.path(folder, kill.pending), kill.pending + 1
    training.save(path, step, **kill.options)
    if training.load(folder, resume="latest") != step or training.load(path) != step:
        yield "the next save is not the latest"
    steps = {"new names": kill.pending, "one name": 1, "keep_last=2": 2}[kill.kind]
    entries = sorted(entry.name for entry in folder.iterdir())
    files = [len(list(entry.iterdir())) for entry in folder.iterdir()]
    if len(entries) != steps or set(files) != {kill.world_size + 1}:
        yield f"the next save leaves {dict(zip(entries, files, strict=True))}"
