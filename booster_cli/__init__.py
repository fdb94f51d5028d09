"""What the `booster` command answers without torch, whose import takes seconds: help, versions, and copies of examples.

It needs the standard library alone. All other commands are in `booster.cli` and in plugins.
"""
