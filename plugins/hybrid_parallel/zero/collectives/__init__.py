"""Collectives of ZeRO; `exchange_of` in `shared_memory.py` chooses between them."""
