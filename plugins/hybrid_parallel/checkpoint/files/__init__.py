"""Safetensors files: writing, reading, and threads that read."""
