"""A CUDA device in host memory, under the rules of CUDA and NCCL: the CUDA path of the library runs on any machine.

Tensors are really on `cuda:0`; every kernel is the CPU's, on the same memory. `device.load()` puts the device into a
process of stock CPU torch, `nccl.py` is its communication, `rules.py` says what is checked.
"""
