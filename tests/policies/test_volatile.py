"""What a changing value is called."""

from __future__ import annotations

import pytest

from policies.volatile import ADVICE, Leak, kind_of


@pytest.mark.parametrize(
    ("changed", "before", "kind"),
    [
        (b"2026-06-03T21:14:38Z", b"Current time: ", Leak.TIMESTAMP),
        (b"21:14", b"Sunday, 29 November 2026 ", Leak.TIMESTAMP),
        (b"1780000123", b"now=", Leak.TIMESTAMP),
        (b"1780000123.25", b"now=", Leak.TIMESTAMP),
        (b"2026-06-03", b"Today: ", Leak.DATE),
        (b"03.06.2026.", b"Heute ist der ", Leak.DATE),
        (b"Monday", b"Today is ", Leak.DATE),
        (b"29", b"Today is November ", Leak.DATE),
        (b"4f2c8d0e-1a2b-4c3d-8e4f-5a6b7c8d9e0f", b"id ", Leak.UUID),
        (b"urn:uuid:4F2C8D0E-1A2B-4C3D-8E4F-5A6B7C8D9E0F", b"", Leak.UUID),
        (b"9f86d081884c7d65", b"nonce ", Leak.NONCE),
        (b"req_8fk3jd92ls", b"", Leak.NONCE),
        (b"#10482", b"request ", Leak.COUNTER),
        (b"1,204", b"Ticket ", Leak.COUNTER),
        (b"Anna Kowalski", b"You are helping ", Leak.USER_NAME),
        ("Zoë".encode(), b"", Leak.USER_NAME),
        (b"anna@example.org", b"Mail: ", Leak.USER_NAME),
        (b"xiaoming", b"Dear ", Leak.USER_NAME),
        (b"a text about rivers and what they carry", b"Read this: ", Leak.TEXT),
        (b"\xff\xfe", b"", Leak.TEXT),
    ],
)
def test_a_value_has_its_name(changed: bytes, before: bytes, kind: Leak) -> None:
    assert kind_of(changed, before) is kind


def test_every_kind_has_advice() -> None:
    assert set(ADVICE) == set(Leak)
