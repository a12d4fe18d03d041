"""The address and the network interface over which this machine reaches another machine."""

import socket
import struct
import sys
from ipaddress import ip_address

SIOCGIFADDR = 0x8915
"""Linux's question for the IPv4 address of an interface."""


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that `host` sees; nothing is sent.

    Raises:
        OSError: the name is not known, or there is no route.
    """
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(place)
        return s.getsockname()[0]


def interface_of(address: str) -> str:
    """Return the interface that has an IPv4 address; "" where it is not known."""
    if sys.platform != "linux" or ip_address(address).version != 4:
        return ""
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                found = ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
