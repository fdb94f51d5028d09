"""Batches: shares of replicas, random numbers of loading, micro-batches, and checks of what ranks got."""
