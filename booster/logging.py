"""Log lines of a job of many ranks: each names its rank, and what is no warning comes from rank 0 alone."""

from __future__ import annotations

import logging

import torch.distributed as dist


class RankFilter(logging.Filter):
    """Adds the rank to the message; drops records below WARNING on all ranks but 0."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not dist.is_initialized():
            return True
        rank = dist.get_rank()
        if rank != 0 and record.levelno < logging.WARNING:
            return False
        record.msg = f"[rank {rank}] {record.msg}"
        return True


def get_logger(name: str) -> logging.Logger:
    """The library's logger `name`; handlers and levels are the application's, as usual."""
    logger = logging.getLogger(name)
    if not any(isinstance(present, RankFilter) for present in logger.filters):
        logger.addFilter(RankFilter())
    return logger
