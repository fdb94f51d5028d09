"""Differentiable collectives, and random streams per rank."""
