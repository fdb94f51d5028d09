"""Addresses of this machine: which of them other machines reach, and what the host's name says."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_ANY_PORT = 9  # nothing is sent there


def addresses_of(host: str) -> list[str]:
    """Return the addresses that a host's name stands for here; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Return whether an address is of this machine alone, as 127.0.1.1 of Debian's /etc/hosts."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_held(address: str) -> bool:
    """Return whether an address is one of this machine's."""
    with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def address_towards(host: str) -> str | None:
    """Return the address from which this machine reaches another; None if there is no route."""
    for address in addresses_of(host):
        with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))  # asks the kernel for a route
            return str(probe.getsockname()[0])
    return None


def address_to_listen(host: str) -> str:
    """Return the address by which others know this machine as `host`; "" (all) if the name is a local one."""
    held = [address for address in addresses_of(host) if is_held(address)]
    reachable = [address for address in held if not is_loopback(address)]
    is_own_name = host == socket.gethostname()
    return next(iter(reachable or ([] if is_own_name else held)), "")


def listener(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address, or on all for ""; raises OSError if the port is taken."""
    if address:
        return socket.create_server((address, port), family=_family(address))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def hold_store(host: str, port: int = 0) -> TCPStore:
    """Return a new store that listens where `host` says, not on all interfaces; OSError if the port is taken."""
    from torch.distributed import TCPStore

    address = address_to_listen(host)
    server = listener(address, port)
    port = server.getsockname()[1]
    return TCPStore(address or host, port, None, True, wait_for_workers=False, master_listen_fd=server.detach())


def name_is_usable() -> bool:
    """Return whether others reach the address of this machine's name, where gloo listens; not 127.0.1.1."""
    addresses = addresses_of(socket.gethostname())
    return bool(addresses) and not is_loopback(addresses[0]) and is_held(addresses[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address, None if no interface has it."""
    return next((name for name, held in _held_addresses() if held == address), None)


def first_address() -> str | None:
    """Return the address of the first interface that other machines may reach."""
    return next((address for _, address in _held_addresses() if not is_loopback(address)), None)


def _held_addresses() -> list[tuple[str, str]]:
    """Return the interfaces and their addresses, IPv4 first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
