"""ZeRO-1: gradients, optimizer states and master weights over flat buckets."""
