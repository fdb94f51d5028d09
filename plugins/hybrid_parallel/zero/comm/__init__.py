"""Communication of ZeRO-1: reduce-scatter and all-gather, between processes or through shared memory."""
