"""Tests of `plugins/hybrid_parallel/compat/deepspeed_3d`."""
