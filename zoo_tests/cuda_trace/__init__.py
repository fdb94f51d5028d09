"""Whole training steps on fake CUDA tensors: devices, collectives and host synchronizations, without a GPU."""
