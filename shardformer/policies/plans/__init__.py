"""Policies built from tensor-parallel plans: of transformers, declared in this package, or derived from a model."""
