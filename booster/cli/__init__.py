"""The `booster` command."""

from booster.cli.main import main

__all__ = ["main"]
