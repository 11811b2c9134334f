"""Values that TOML can write and no gateway can run with are mistakes at start, not crashes or silent hangs later."""

from __future__ import annotations

import pytest

from gateway.config import ConfigError, parse


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("listen.keep_alive_s = inf", "listen.keep_alive_s = inf: must be a finite number"),
        ("limits.body_timeout_s = inf", "limits.body_timeout_s = inf: must be a finite number"),
        (
            "listen.backlog_connections = 100000000000",
            "listen.backlog_connections = 100000000000: must be at most 65535",
        ),
        ("classes.standard.weight = inf", "classes.standard.weight = inf: must be a finite number"),
    ],
)
def test_numbers_without_an_end(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.lines == [line]


@pytest.mark.parametrize("url", ["http://a b:80", "http://a:80/x y", "http://a..b:80", "http://\u00e9:80"])
def test_addresses_that_would_break_the_head_of_a_request(url: str) -> None:
    with pytest.raises(ConfigError, match=r"replicas\[0\].url"):
        parse(f'replicas = [{{url = "{url}"}}]')
