"""Engines that start jobs on several machines: torchrun, SLURM, Kubernetes and Ray, each with real ranks."""
