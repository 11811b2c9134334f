"""Which headers go on, which stay, and which are ours."""

from __future__ import annotations

import string
import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway import headers
from gateway.headers import Headers

HOST = (b"host", b"gateway.example")


def forwarded(*given: tuple[bytes, bytes], **more: Any) -> list[tuple[bytes, bytes]]:
    """The header lines that a replica gets, in order; host, request id and length are added by the caller."""
    arguments: dict[str, Any] = {"peer": "10.0.0.9", "scheme": "http"}
    return headers.split(b"".join(headers.upstream([HOST, *given], **(arguments | more))))


OURS = [
    (b"x-forwarded-for", b"10.0.0.9"),
    (b"x-forwarded-proto", b"http"),
    (b"x-forwarded-host", b"gateway.example"),
]


def test_a_bare_request_gets_ours() -> None:
    assert forwarded() == OURS


def test_what_is_of_one_hop_or_made_anew_stays() -> None:
    dropped = [
        (name, b"x")
        for name in (*headers.HOP_BY_HOP - {b"connection"}, b"content-length", b"expect", b"accept-encoding")
    ]
    assert forwarded(*dropped, (b"x-request-id", b"other"), (b"connection", b"close")) == OURS


def test_what_connection_names_stays_and_the_rest_goes_on_in_order() -> None:
    kept = [(b"x-mine", b"1"), (b"x-mine", b"2"), (b"accept", b"*/*")]
    found = forwarded(kept[0], (b"x-secret", b"s"), kept[1], (b"connection", b"keep-alive, X-Secret"), kept[2])
    assert found[:3] == kept
    assert b"x-secret" not in dict(found)


def test_connection_cannot_take_away_what_is_ours() -> None:
    names = b"host, x-request-id, x-forwarded-for, content-length, authorization"
    assert forwarded((b"connection", names), authorization=b"Bearer own") == [
        (b"authorization", b"Bearer own"),
        *OURS,
    ]


def test_keys_pass_are_removed_or_replaced() -> None:
    clients = ((b"authorization", b"Bearer client"), (b"x-api-key", b"client"))
    assert forwarded(*clients)[:2] == list(clients)
    assert forwarded(*clients, drop_authorization=True) == OURS
    assert forwarded(*clients, authorization=b"Bearer own")[0] == (b"authorization", b"Bearer own")
    assert b"x-api-key" not in dict(forwarded(*clients, authorization=b"Bearer own"))


CLAIMS = (
    (b"x-forwarded-for", b"1.1.1.1"),
    (b"x-forwarded-proto", b"https"),
    (b"x-forwarded-host", b"public.example"),
    (b"forwarded", b"for=1.1.1.1"),
    (b"x-real-ip", b"1.1.1.1"),
)


def test_claims_of_strangers_are_replaced_and_those_of_trusted_proxies_extended() -> None:
    assert forwarded(*CLAIMS) == OURS
    assert forwarded(*CLAIMS, trusted={"10.0.0.9"}) == [
        (b"x-forwarded-for", b"1.1.1.1, 10.0.0.9"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"public.example"),
        (b"forwarded", b"for=1.1.1.1, for=10.0.0.9"),
    ]
    v6 = dict(forwarded(*CLAIMS, peer="2001:db8::1", trusted={"2001:db8::1"}))
    assert v6[b"forwarded"] == b'for=1.1.1.1, for="[2001:db8::1]"'


def test_an_id_is_taken_where_it_is_short_and_printable() -> None:
    assert headers.request_id(b"mine-1") == b"mine-1"
    made = [headers.request_id(given) for given in (None, b"", b"a b", b"a\x7f", b"x" * 201, "ü".encode())]
    assert len(set(made)) == 6
    assert all(len(one) == 24 and one.isalnum() for one in made)


def test_what_goes_back_to_the_client() -> None:
    given: Headers = [
        (b"content-type", b"text/plain"), (b"content-length", b"5"), (b"connection", b"close, X-Hop"), (b"x-hop", b"1"),
        (b"transfer-encoding", b"chunked"), (b"x-request-id", b"theirs"), (b"set-cookie", b"a"), (b"set-cookie", b"b"),
    ]  # fmt: skip
    assert headers.downstream(given) == [
        (b"content-type", b"text/plain"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]


NAMES = st.text(string.ascii_lowercase + "-", min_size=1, max_size=12).map(str.encode)
VALUES = st.text(string.ascii_letters + string.digits + " ,;=/", max_size=20).map(str.encode)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12), st.lists(NAMES, max_size=3))
def test_whatever_comes_ours_stands_once_and_nothing_that_was_named(
    given_: list[tuple[bytes, bytes]], named: list[bytes]
) -> None:
    found = forwarded(*given_, (b"connection", b", ".join(named)))
    names = [name for name, _ in found]
    assert [names.count(name) for name, _ in OURS] == [1, 1, 1]
    assert not {b"host", b"content-length", b"x-request-id"} & set(names)
    assert not headers.HOP_BY_HOP & set(names)
    ours = {name for name, _ in OURS}
    assert not (set(named) - ours) & set(names)


FORKED = """
import os
from gateway.headers import request_id
if os.fork() == 0:
    print(request_id(None).decode(), flush=True)
    os._exit(0)
os.wait()
print(request_id(None).decode())
"""


def test_two_processes_never_give_the_same_id() -> None:
    """Hands are forked from one process, and vLLM names its answer by the id that it is given."""
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    of_child, of_parent = ran.stdout.split()
    assert of_child[:16] != of_parent[:16]
    assert of_child[16:] == of_parent[16:] == "00000001"
