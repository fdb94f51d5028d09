"""Tests of the whole house: `ranks` runs them on processes, `compare` holds sharded training to plain training."""

import logging

# peft imports it, and it warns on some CPUs: tests compare what processes print.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
