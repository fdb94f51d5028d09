"""Imported last by the server that forks ranks: what each of them would otherwise compute for itself at first use."""

from __future__ import annotations

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import plugins.hybrid_parallel.checkpoint.io  # noqa: F401
import zoo_tests.harness.train_sharded  # noqa: F401
from shardformer.policies.registry import family_policies

family_policies()
get_checkpoint_conversion_mapping("bert")  # compiles the patterns of all models
# Collecting garbage would write to every page that the ranks share with the server.
gc.collect()
gc.freeze()
