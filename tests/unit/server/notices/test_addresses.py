"""Where notices may go."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.notices.addresses import AllowList, is_public, parse, require_permitted, resolve
from etfarm.server.notices.errors import BadWebhook, HostRefused

NOTHING_LISTED = AllowList.of([])

PRIVATE = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
    "239.1.2.3", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::", "::1", "fe80::1", "fc00::1", "fd12::1",
    "ff02::1", "168.63.129.16", "192.0.0.8", "192.88.99.1",
    "::ffff:127.0.0.1", "::ffff:93.184.215.14", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::",
    "2001:0:1::1", "fec0::1", "2001:db8::1",
]  # fmt: skip
PUBLIC = ["93.184.215.14", "8.8.8.8", "2606:4700::1111"]

# IANA's registries of special-purpose addresses for IPv4 and IPv6 of 2026-11, those of multicast, and deprecated ranges.
# Addresses that a registry calls globally reachable are no receivers either: they lead to relays, or to a server of each network.
SPECIAL = [
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.0.9/32",
    "192.0.0.10/32", "192.0.0.170/32", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16",
    "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "255.255.255.255/32",
    "::/128", "::1/128", "::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64",
    "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:1::1/128", "2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32",
    "2001:4:112::/48", "2001:10::/28", "2001:20::/28", "2001:30::/28", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48",
    "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "4000::/3", "e000::/4", "200::/7",
]  # fmt: skip
BESIDE = [
    "1.0.0.0", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0", "172.15.255.255",
    "172.32.0.0", "192.0.1.0", "192.0.3.0", "192.88.98.255", "192.88.100.0", "198.17.255.255", "198.20.0.0", "198.51.99.255",
    "198.51.101.0", "203.0.112.255", "203.0.114.0", "223.255.255.255", "2001:200::", "2001:db7:ffff::", "2001:db9::",
    "2003::", "2620:4f:7fff::", "2620:4f:8001::", "3ffe:ffff::", "3fff:1000::",
]  # fmt: skip


@pytest.mark.parametrize("text", SPECIAL)
def test_no_address_of_a_special_range_is_public(text: str) -> None:
    network = ipaddress.ip_network(text)
    step = max(1, network.num_addresses // 64)
    for address in (network[0], network[-1], *(network[at] for at in range(0, network.num_addresses, step))):
        assert not is_public(address), address


@pytest.mark.parametrize("text", BESIDE)
def test_the_addresses_beside_special_ranges_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PRIVATE)
def test_an_address_that_is_not_public_is_refused_as_text_and_after_resolution(text: str) -> None:
    literal = f"http://[{text}]:8080/" if ":" in text else f"http://{text}:8080/"
    with pytest.raises(HostRefused, match="not public"):
        require_permitted(parse(literal), NOTHING_LISTED)
    with pytest.raises(HostRefused, match="not public"):
        resolve(parse("https://rebound.example/"), NOTHING_LISTED, lambda host, port: [text])


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_is_the_one_to_connect_to(text: str) -> None:
    assert resolve(parse("https://hooks.example/x"), NOTHING_LISTED, lambda host, port: [text]) == text


def test_a_name_with_a_public_and_a_private_address_is_refused() -> None:
    with pytest.raises(HostRefused, match="not public"):
        resolve(parse("https://two.example/"), NOTHING_LISTED, lambda host, port: ["8.8.8.8", "127.0.0.1"])


@pytest.mark.parametrize("address", ["10.1.2.3", "fd12::abcd", "fe80::1%eth0"])
def test_a_refusal_does_not_tell_to_what_a_name_resolves(address: str) -> None:
    with pytest.raises(HostRefused, match="not public") as refused:
        resolve(parse("https://router.lab.example/"), NOTHING_LISTED, lambda host, port: [address])
    shown = f"{refused.value.message} {refused.value.remedy} {refused.value.metadata}"
    assert address.partition("%")[0] not in shown and "router.lab.example" in shown


@pytest.mark.parametrize(
    "spelling", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost.", "LOCALHOST", "a.localhost"]
)
def test_odd_spellings_of_loopback_are_refused(spelling: str) -> None:
    with pytest.raises((HostRefused, BadWebhook)):
        resolve(parse(f"http://{spelling}/"), NOTHING_LISTED, lambda host, port: ["127.0.0.1"])


def test_listed_hosts_and_networks_may_be_private() -> None:
    listed = AllowList.of(["hooks.lab", "*.farm.lab", "10.0.0.0/8", "::1"])
    for url, address in (
        ("http://hooks.lab:99/", "192.168.1.1"),
        ("https://a.b.farm.lab/", "127.0.0.1"),
        ("http://10.2.3.4/", "10.2.3.4"),
        ("http://named.example/", "10.2.3.4"),
        ("http://[::1]:8080/", "::1"),
    ):
        assert resolve(parse(url), listed, lambda host, port, address=address: [address]) == address  # type: ignore[misc]
    for url, address in (
        ("http://farm.lab/", "192.168.1.1"), ("http://xhooks.lab/", "192.168.1.1"), ("http://named.example/", "192.168.1.1"),
    ):  # fmt: skip
        with pytest.raises(HostRefused):
            resolve(parse(url), listed, lambda host, port, address=address: [address])  # type: ignore[misc]


def test_only_listed_hosts_are_reached_if_the_admin_says_so() -> None:
    listed = AllowList.of(["hooks.example", "9.9.9.0/24"], only_listed=True)
    assert resolve(parse("https://hooks.example/"), listed, lambda host, port: ["8.8.8.8"]) == "8.8.8.8"
    assert resolve(parse("https://other.example/"), listed, lambda host, port: ["9.9.9.9"]) == "9.9.9.9"
    with pytest.raises(HostRefused, match="not listed"):
        resolve(parse("https://other.example/"), listed, lambda host, port: ["8.8.8.8"])
    with pytest.raises(HostRefused, match="not listed"):
        require_permitted(parse("https://other.example/"), AllowList.of(["hooks.example"], only_listed=True))


@pytest.mark.remedy("WEBHOOK_HOST_REFUSED")
def test_ports_of_other_protocols_are_refused_on_hosts_that_are_not_listed() -> None:
    with pytest.raises(HostRefused, match="port 25"):
        require_permitted(parse("http://mail.example:25/"), NOTHING_LISTED)
    require_permitted(parse("http://mail.example:25/"), AllowList.of(["mail.example"]))
    require_permitted(parse("http://hooks.example:8080/"), NOTHING_LISTED)


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://example.com/", "file:///etc/passwd", "http://", "http:///x", "http://user:pass@example.com/", "http://@example.com/",
        "http://example.com/#part", "http://example.com:0/", "http://example.com:99999/", "http://exa mple.com/", "http://a\\@b/",
        "http://example.com/\r\nX: y", "http://é.example/", "http://[::1", "http://[fe80::1%25eth0]/", "http://" + "a" * 2000,
        "gopher://x/", "http://-a.example/", "http://a..example/", "javascript:alert(1)", "//example.com/",
    ],
)  # fmt: skip
def test_what_is_no_address_for_notices_is_refused(url: str) -> None:
    with pytest.raises(BadWebhook):
        parse(url)


def test_an_address_is_taken_apart() -> None:
    target = parse("https://Hooks.Example:8443/a/b?c=d&e")
    assert (target.host, target.port, target.path, target.origin) == (
        "hooks.example", 8443, "/a/b?c=d&e", "https://hooks.example:8443",
    )  # fmt: skip
    assert parse("http://[2606:4700::1]").origin == "http://[2606:4700::1]"


@pytest.mark.parametrize("entry", ["", "a b", "10.0.0.1/8", "http://x", "*.*.x", "x/24"])
def test_a_listed_host_must_be_one(entry: str) -> None:
    with pytest.raises(BadWebhook):
        AllowList.of([entry])


@given(st.ip_addresses(v=4), st.sampled_from(["::ffff:{}", "::{}", "64:ff9b::{}", "::ffff:0:{}"]))
def test_no_address_that_leads_to_another_counts_as_public(address: ipaddress.IPv4Address, form: str) -> None:
    assert not is_public(ipaddress.IPv6Address(form.format(address)))


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        target = parse(f"http://{text}")
    except BadWebhook:
        return
    assert target.host and 0 < target.port < 65536 and target.path.isascii() and "\r" not in target.path
