"""Tests of the whole house. `ranks` runs them on several processes, `compare` holds sharded training to plain training."""
