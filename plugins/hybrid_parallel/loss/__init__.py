"""The loss of a step: its choice, its weighting over ranks, and the fp16 loss scale."""
