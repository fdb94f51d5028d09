"""Helpers without torch.distributed: JSON, module paths, parameter names."""
