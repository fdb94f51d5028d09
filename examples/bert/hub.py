"""Check that the Hugging Face hub can be reached, before its client retries for half a minute."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

_TIMEOUT_S = 3.0


def go_offline_if_unreachable() -> None:
    """Restrict the hub client to its cache if the hub does not answer, so that uncached files fail at once."""
    from huggingface_hub import constants

    if getproxies() or constants.HF_HUB_OFFLINE:
        return
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_TIMEOUT_S).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True
