"""What torchrun's c10d rendezvous reads from the host's name, read from the network instead.

torchrun starts the store on the machine whose name stands for the address of `--rdzv-endpoint`, and tells the ranks the
name of the first machine. With Debian's `127.0.1.1 node1` in /etc/hosts no machine starts the store, and with a name
that only its own machine knows, no other machine finds rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import socket

from booster.network import address_towards, addresses_of, first_address, is_held, is_loopback

_BACKEND = "c10d"
_DEFAULT_PORT = 29400


def complete_rendezvous(options: argparse.Namespace) -> None:
    """Say which machine has the store, and this machine's address, where torchrun would not find out.

    Args:
        options: torchrun's, of which `rdzv_conf` and `local_addr` are set.
    """
    host, _, port = options.rdzv_endpoint.rpartition(":")
    host, port = (host, port) if host and port.isdecimal() else (options.rdzv_endpoint, str(_DEFAULT_PORT))
    host = host.strip("[]")
    addresses = addresses_of(host) if host else []
    own_name = socket.gethostname()
    if options.rdzv_backend != _BACKEND or not addresses or (host != own_name and is_loopback(addresses[0])):
        return  # another rendezvous, or agents of one machine
    held = next((address for address in addresses if is_held(address)), None)
    if "is_host" not in options.rdzv_conf and not _is_recognised(host, addresses, held is not None):
        # Of two agents of one machine, the second finds the port taken.
        has_store = held is not None and _is_free(held, int(port))
        options.rdzv_conf = ",".join(part for part in (options.rdzv_conf, f"is_host={has_store}") if part)
    if options.local_addr is None:
        own = held or address_towards(host)
        options.local_addr = first_address() if own is None or is_loopback(own) else own


def _is_recognised(host: str, addresses: list[str], is_here: bool) -> bool:
    """Return whether torchrun knows if the endpoint is this machine's: it looks up the machine's own name."""
    own = addresses_of(socket.gethostname())
    return host == socket.gethostname() or bool(own and (not is_here or set(own) & set(addresses)))


def _is_free(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return True
    return False
