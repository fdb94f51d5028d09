"""Errors of one rank that are raised on all."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from booster.errors import ConfigurationError
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from zoo_tests.harness.ranks import distributed


@distributed(2)
def test_a_key_that_is_missing_is_told_with_the_line_that_asked_for_it() -> None:
    found = {} if dist.get_rank() else {"size": 3}
    with pytest.raises(ConfigurationError, match=r"KeyError on rank 1: 'size' is not there \(test_agreement.py, line "):
        raise_on_all_ranks(lambda: found["size"])
