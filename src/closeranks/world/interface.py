"""By which network interface this machine reaches another: the kernel's routing table knows.

Gloo would otherwise look up the name of its own host, which on many machines means the loopback
interface, where nobody else can reach it. Asking sends nothing. Needs no torch.
"""

from __future__ import annotations

import contextlib
import socket

_ANY_PORT = 9


def address_towards(address: str) -> str:
    """This machine's own address on the way to another; "" if there is no way."""
    with contextlib.suppress(OSError):
        family = socket.getaddrinfo(address, _ANY_PORT)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    return ""


def interface_towards(address: str) -> str:
    """The interface on the way to another machine; "" if nobody knows."""
    import psutil  # type: ignore[import-untyped]

    own = address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if own and own in [each.address.partition("%")[0] for each in addresses]:
            return str(name)
    return ""
