"""Policies of model families, in one file for each kind of architecture."""
