"""Logging for multi-rank jobs: each line names its rank, and only rank 0 logs below WARNING."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class RankFilter(logging.Filter):
    """Filter that adds the rank to the message, and drops records below WARNING on all ranks but 0."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log `record`; prefix its message with the rank once there is a process group."""
        if not dist.is_initialized():
            return True
        rank = dist.get_rank()
        if rank != 0 and record.levelno < logging.WARNING:
            return False
        record.msg = f"[rank {rank}] {record.msg}"
        return True


def get_logger(name: str) -> logging.Logger:
    """Return the library's logger `name`; handlers and levels are left to the application."""
    logger = logging.getLogger(name)
    if not any(isinstance(present, RankFilter) for present in logger.filters):
        logger.addFilter(RankFilter())
    return logger


def lower_missing_kernel() -> None:
    """Log at INFO that bitsandbytes lacks a kernel for CPUs, of which it warns whenever peft imports it."""

    def asked(record: logging.LogRecord) -> bool:
        is_it = record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")
        return not is_it or logging.getLogger(record.name).isEnabledFor(logging.INFO)

    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(asked)


def announce(logger: logging.Logger, line: str) -> None:
    """Log a line at INFO; if the application has configured no logging, write it to stderr, on rank 0 only."""
    if logger.hasHandlers():
        logger.info("%s", line)
    elif not dist.is_initialized() or dist.get_rank() == 0:
        sys.stderr.write(f"{line}\n")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence log messages: transformers logs per configuration, torch per operator that fails on fake tensors."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
