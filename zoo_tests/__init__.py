"""Tests of the whole house: `ranks` runs them on processes, `compare` holds sharded training to plain training."""
