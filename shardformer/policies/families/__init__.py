"""Policies written for single families, one file each."""
