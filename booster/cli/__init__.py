"""The `booster` command.

Help, versions and copies of examples need the standard library alone: `front`, `init` and `command_parser` import
nothing else, so that they answer before torch could be imported.
"""
