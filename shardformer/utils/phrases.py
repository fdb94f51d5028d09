"""Phrases of error messages."""

from __future__ import annotations


def divisors_phrase(count: int) -> str:
    """Return the divisors of `count` as a phrase: "1, 2 or 4"."""
    divisors = [str(size) for size in range(1, count + 1) if count % size == 0]
    return divisors[0] if len(divisors) == 1 else f"{', '.join(divisors[:-1])} or {divisors[-1]}"
