"""Policies built from tensor-parallel plans, either of transformers or declared in this package."""
