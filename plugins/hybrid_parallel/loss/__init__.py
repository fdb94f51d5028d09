"""The loss of a step: which one, how it is weighted over ranks, and the fp16 scale."""
