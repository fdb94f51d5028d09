"""The `booster` command, whatever lies in the current directory."""

from __future__ import annotations

from booster.cli import main

__all__ = ["main"]
