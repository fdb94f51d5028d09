"""Tests without processes: specs, schedules, options, buckets, samplers, policies."""
