"""Which addresses media may be fetched from, so that a link in a request reads nothing inside the network. Pure.

`models[].media_domains` has names, addresses and networks (`10.2.0.0/16`). A name that leads to an address which is not
public (loopback, link-local, private, shared, multicast, reserved, or at which clouds answer for the machine) is
refused: whoever answers for it in the DNS would read the cloud's metadata or the cluster's own services through the
engine. An address that the list has, or that is in a network of it, is allowed, whatever name leads there.

Invariant: an address counts by the IPv4 address in it, if it has one: mapped, 6to4 or NAT64.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052
_CLOUDS = (IPv4Network("192.0.0.0/24"), IPv4Network("168.63.129.16/32"))  # Oracle's metadata; Azure's host


def named_networks(hosts: Iterable[str]) -> tuple[Network, ...]:
    """The addresses and networks among the hosts of `media_domains`."""
    found = list[Network]()
    for host in hosts:
        try:
            found.append(ip_network(host.strip("[]"), strict=False))
        except ValueError:  # a name
            continue
    return tuple(found)


def may_be_fetched_from(address: str, networks: Iterable[Network]) -> bool:
    """Whether an address is public, or in one of these networks. What is no address is refused."""
    try:
        found = _inner(ip_address(address.partition("%")[0]))  # without the zone of a link-local one
    except ValueError:
        return False
    if any(found in network for network in networks):
        return True
    if any(found in network for network in _CLOUDS):
        return False
    is_site = isinstance(found, IPv6Address) and found.is_site_local
    return found.is_global and not (found.is_multicast or found.is_reserved or is_site)


def _inner(address: Address) -> Address:
    """The IPv4 address that routers on the way take out of an IPv6 address; else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
