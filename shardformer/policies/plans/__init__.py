"""Policies made from tensor-parallel plans, those of transformers or our own."""
