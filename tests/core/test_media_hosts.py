"""Links in requests reach public addresses, and those that the settings name."""

from __future__ import annotations

import pytest

from serve_app.core.media_hosts import may_be_fetched_from, named_networks

INSIDE = (
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.3.4", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "239.1.2.3", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1",
    "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:db8::1",
    "192.0.0.1", "192.0.0.9", "192.0.0.192", "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::a83f:8110",
)  # fmt: skip
PUBLIC = (
    "93.184.216.34",
    "168.63.129.17",
    "192.0.1.1",
    "8.8.8.8",
    "2606:4700:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
)
NO_ADDRESSES = ("", "localhost", "127.1", "2130706433", "0x7f.0.0.1", "1.2.3.4.5")


@pytest.mark.parametrize("address", INSIDE)
def test_an_address_inside_the_network_is_refused(address: str) -> None:
    assert not may_be_fetched_from(address, ())


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert may_be_fetched_from(address, ())


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_is_refused(address: str) -> None:
    assert not may_be_fetched_from(address, named_networks(("0.0.0.0/0", "::/0")))


def test_an_address_or_network_of_the_settings_is_allowed_and_no_other() -> None:
    networks = named_networks(("images.example.org", "10.2.0.0/16", "127.0.0.1", "[fd00::7]"))
    assert len(networks) == 3
    for address in ("10.2.3.4", "127.0.0.1", "fd00::7", "::ffff:10.2.3.4"):
        assert may_be_fetched_from(address, networks)
    for address in ("10.3.0.1", "127.0.0.2", "fd00::8", "169.254.169.254"):
        assert not may_be_fetched_from(address, networks)


def test_a_name_allows_no_address() -> None:
    assert named_networks(("localhost", "metadata.example.org", "media.invalid")) == ()
