"""Safetensors files: a writer, a reader, and a thread pool for parallel reads."""
