"""Differentiable collectives, and random streams of ranks."""
