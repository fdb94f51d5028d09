"""Mutants of the library, and the proof that tests notice them."""
