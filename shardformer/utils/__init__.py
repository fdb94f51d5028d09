"""Helpers without torch.distributed: JSON, module paths, names of parameters."""
