"""ZeRO-1: gradients, optimizer states and master weights in flat buckets."""
