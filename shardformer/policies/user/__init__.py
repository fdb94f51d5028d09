"""Policies that users describe: TPInfo, slots, and layers cut one by one."""
