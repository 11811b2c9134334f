"""What a value that changes from request to request is, told from the value itself, and what to do about it.

Only the words that differ from the request before are looked at, so a constant date beside a changing name is no
date. The first rule that fits names it: a clock or an epoch number is a timestamp, a day a date, eight or more hex
digits or a mix of letters and digits a nonce, digits alone a counter, capitalised words or what follows "user" or
"dear" a name. Trade-off: rules, not understanding; what fits none is "text", with the same place and the same loss.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Leak(StrEnum):
    """Closed set: labels of metrics and keys of reports."""

    TIMESTAMP = "timestamp"
    DATE = "date"
    UUID = "uuid"
    NONCE = "nonce"
    COUNTER = "counter"
    USER_NAME = "user_name"
    TOOL_ORDER = "tool_order"
    TOOL_KEYS = "tool_keys"
    EXAMPLE_ORDER = "example_order"
    CACHE_SALT = "cache_salt"
    TEXT = "text"


ADVICE = {
    Leak.TIMESTAMP: "move the time behind the shared text, into the last user message, or give it to the minute or day",
    Leak.DATE: "move the date behind the shared text, into the last user message",
    Leak.UUID: "move the id into the request's metadata or behind the shared text",
    Leak.NONCE: "move the random value into the request's metadata or behind the shared text",
    Leak.COUNTER: "move the number into the request's metadata or behind the shared text",
    Leak.USER_NAME: "move what is about the user behind the shared text, into the last user message",
    Leak.TOOL_ORDER: "send the tools in one fixed order, sorted by name",
    Leak.TOOL_KEYS: "write the tools' JSON with its keys in one fixed order, sorted",
    Leak.EXAMPLE_ORDER: "give the examples in one fixed order, or behind the shared text",
    Leak.CACHE_SALT: "give one salt to all who may share a cache; a salt for each request shares nothing",
    Leak.TEXT: "put the text that all requests share first, and what differs behind it",
}

_EDGES = b" \t\r\n\"'`()[]{}<>,.;:!?*#=|"
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.I)
_CLOCK = re.compile(rb"(?<!\d)\d{1,2}:\d{2}(:\d{2})?|\d{4}-?\d{2}-?\d{2}T\d{2}")
_EPOCH = re.compile(rb"1[4-9]\d{8}(\.\d+|\d{3}|\d{6}|\d{9})?")
_DAY = re.compile(
    rb"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    rb"|(mon|tues|wednes|thurs|fri|satur|sun)day|(jan|febr)uary|march|april|june|july|august"
    rb"|(septem|octo|novem|decem)ber|(mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)",
    re.I,
)
_MONTH_BEFORE = re.compile(rb"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?\s+$", re.I)
_MAIL = re.compile(rb"[\w.+-]+@[\w-]+\.[\w.-]+")
_HEX = re.compile(rb"(0x)?[0-9a-f]{8,}", re.I)
_MIXED = re.compile(rb"(?=[\w+/=.:-]*\d)(?=[\w+/=.:-]*[a-z])[\w+/=.:-]{8,}", re.I)
_NUMBER = re.compile(rb"[+-]?\d[\d,._]*")
_NAME = re.compile(r"[^\W\d_][\w'’.-]*")
_BEFORE_NAME = re.compile(rb"(user|name|customer|client|employee|student|patient|dear|hello|hi|mr|mrs|ms)\W*$", re.I)
MOST_NAME_WORDS = 4


def kind_of(changed: bytes, before: bytes = b"") -> Leak:
    """changed: the words that differ, at most a few dozen bytes of use; before: the text that leads to them."""
    words = [w for w in (word.strip(_EDGES) for word in changed.split()) if w]
    found = {_of_word(word) for word in words[:64]}
    for kind in (Leak.UUID, Leak.TIMESTAMP, Leak.DATE):
        if kind in found:
            return kind
    if words and len(words) <= MOST_NAME_WORDS and (_names(words) or _BEFORE_NAME.search(before[-24:])):
        return Leak.USER_NAME
    if found == {Leak.COUNTER} and _MONTH_BEFORE.search(before[-24:]):
        return Leak.DATE
    for kind in (Leak.USER_NAME, Leak.NONCE, Leak.COUNTER):  # USER_NAME: an address
        if kind in found and len(words) <= MOST_NAME_WORDS:
            return kind
    return Leak.TEXT


def _of_word(word: bytes) -> Leak | None:
    if _UUID.search(word):
        return Leak.UUID
    if _CLOCK.search(word) or _EPOCH.fullmatch(word):
        return Leak.TIMESTAMP
    if _DAY.fullmatch(word):
        return Leak.DATE
    if _MAIL.fullmatch(word):
        return Leak.USER_NAME
    if _NUMBER.fullmatch(word):
        return Leak.COUNTER
    if _HEX.fullmatch(word) or _MIXED.fullmatch(word):
        return Leak.NONCE
    return None


def _names(words: list[bytes]) -> bool:
    """Each a capitalised word of letters."""
    texts = [word.decode("utf-8", "replace") for word in words]
    return all(_NAME.fullmatch(text) and text[0].isupper() for text in texts)
