"""Tests of `plugins/hybrid_parallel/planner`."""
