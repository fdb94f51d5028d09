"""The `booster` command, independent of modules in the current directory."""

from __future__ import annotations

from booster.cli import main

__all__ = ["main"]
