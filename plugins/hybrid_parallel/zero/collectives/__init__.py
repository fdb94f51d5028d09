"""Collectives of ZeRO; `exchange_of` in `setup/optimizer.py` chooses between them."""
