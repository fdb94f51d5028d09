"""What all tests share: the end of the pools of ranks, and the matrix of what was proved."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zoo_tests.gpu import device as gpu
from zoo_tests.harness.long_tests import LongTests, function_of, long_tests, slow_cases
from zoo_tests.harness.poison import poison_fresh_memory
from zoo_tests.harness.ranks import DEVICE_VARIABLE, start_server, stop_pools
from zoo_tests.harness.sample import SHARES, sampled, sampled_of_long, seed_of_commit
from zoo_tests.harness.support import SupportMatrix
from zoo_tests.simcuda import build

_MANY_TESTS = 400
_WHOLE = ("zoo_tests/architecture/", "zoo_tests/docs/")  # of whose cases each is about other files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-support", action="store_true", help="write docs/results/support.md from what passes")
    devices = "device of the ranks: simcuda is CUDA in host memory, gpu the GPUs of this machine"
    parser.addoption("--device", choices=("cpu", "simcuda", "gpu"), help=devices)
    parser.addoption("--campaigns", action="store_true", help="run the campaigns too, of which the suite has samples")
    of_slow = f"run one of {SHARES} tests that are marked slow, and of each function in its turn; of the functions in "
    of_slow += "zoo_tests/long_tests.txt, a part of the cases"
    parser.addoption("--sample", action="store_true", help=of_slow)
    parser.addoption("--sample-seed", type=int, help="number of the sample; the number of commits if it is not given")
    parser.addoption("--quick", action="store_true", help="leave out what zoo_tests/long_tests.txt names")
    parser.addoption("--write-long-tests", action="store_true", help="write zoo_tests/long_tests.txt from this run")


def pytest_configure(config: pytest.Config) -> None:
    # Tests start hundreds of interpreters, each of which would compile the library again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Thousands of boosts of tiny models, each compared with plain training anyway.
    os.environ.setdefault("BOOSTER_CHECK_LAYOUT", "off")
    poison_fresh_memory()
    if config.getoption("--device"):
        _choose_device(config.getoption("--device"))
    if config.getoption("--write-support") and config.getoption("--sample"):
        raise pytest.UsageError("--write-support writes what all cases prove; use it without --sample")
    if config.getoption("--sample") and config.getoption("--sample-seed") is None:
        config.option.sample_seed = seed_of_commit()  # workers are given the options of this process
    is_worker = hasattr(config, "workerinput")
    matrix = SupportMatrix(config.getoption("--write-support"), is_worker)
    config.pluginmanager.register(matrix, "support-matrix")
    config.pluginmanager.register(LongTests(config.getoption("--write-long-tests"), is_worker), "long-tests")


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("--sample"):
        return None
    seed = config.getoption("--sample-seed")
    return f"sample {seed % SHARES} of {SHARES} of the slow tests; repeat it with --sample --sample-seed {seed}"


def _choose_device(name: str) -> None:
    """Let tests on ranks run on a device; the simulated one is built first, if it can be."""
    if name == "simcuda":
        try:
            build.library()
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from None
    if name == "gpu" and (problem := gpu.problem()):
        raise pytest.UsageError(problem)
    os.environ[DEVICE_VARIABLE] = name


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the simulated device to those who ask for it: the library behind it takes a minute to build."""
    asked = any("simcuda" in str(argument) for argument in config.invocation_params.args)
    return True if collection_path.name == "simcuda" and not asked else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--campaigns"):
        _leave_out(config, items, {item for item in items if item.get_closest_marker("campaign") is not None})
    if config.getoption("--sample"):
        _leave_out(config, items, _beyond_the_sample(config, items))
    if config.getoption("--quick"):
        long = long_tests()
        _leave_out(config, items, {item for item in items if function_of(item.nodeid) in long})


def _leave_out(config: pytest.Config, items: list[pytest.Item], which: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in which])
    items[:] = [item for item in items if item not in which]


def _beyond_the_sample(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    slow = {item.nodeid: item for item in items if item.get_closest_marker("slow") is not None}
    others = {item.nodeid: item for item in items if item.nodeid not in slow}
    long, seed = long_tests(), config.getoption("--sample-seed")
    of_long = [name for name in others if function_of(name) in long and not name.startswith(_WHOLE)]
    chosen = sampled(slow, others, seed, slow_cases()) | sampled_of_long(of_long, seed)
    return {(slow | others)[name] for name in (*slow, *of_long) if name not in chosen}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare for many tests: import once what every rank would, and look at no library when collecting garbage."""
    if len(session.items) >= _MANY_TESTS and not session.config.option.collectonly:
        start_server(dict.fromkeys(item.module.__name__ for item in session.items if isinstance(item, pytest.Function)))
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    stop_pools()


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    """This process is rank 0 of two; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _messages_after_a_test_that_silences_them() -> Iterator[None]:
    """A command that a test runs in this process may disable logging for the rest of it."""
    before = logging.root.manager.disable
    yield
    logging.disable(before)


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that leaves a process group in this process fails, instead of the next one that makes a group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left the default process group initialized in the process of pytest")
