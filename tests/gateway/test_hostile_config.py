"""Values that TOML can write and no gateway can run with are mistakes at start, not crashes or silent hangs later."""

from __future__ import annotations

import pytest

from gateway.app import Gateway
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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("listen.keep_alive_s = 0.3", "listen.keep_alive_s = 0.3: must be at least 1"),
        ('listen.host = ""', 'listen.host = "": must not be empty'),
        ('replicas = [{url = "http://a:0"}]', 'replicas[0].url = "http://a:0": must name a port from 1 to 65535'),
        (
            'replicas = [{url = "http://:80"}]',
            'replicas[0].url = "http://:80": must be a base URL, as http://10.0.0.7:8000',
        ),
    ],
)
def test_values_that_nothing_can_listen_on_or_connect_to(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.lines == [line]


@pytest.mark.parametrize("key", ["sk-1\n", " sk-1", "sk\r\nx: y", "sk-\u00e9"])
def test_a_replica_key_that_would_break_the_head_of_a_request_is_refused_without_being_shown(key: str) -> None:
    config = parse('[[replicas]]\nurl = "http://a"\nkey_env = "REPLICA_KEY"')
    with pytest.raises(ConfigError) as caught:
        Gateway(config, None, {}, {"REPLICA_KEY": key})
    assert caught.value.lines == [
        'replicas[0].key_env = "REPLICA_KEY": the value of this variable must be plain text on one line, '
        "without spaces or a newline at its ends"
    ]
