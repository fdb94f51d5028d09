"""Diagnostics: where numbers became non-finite, and where ranks diverged."""
