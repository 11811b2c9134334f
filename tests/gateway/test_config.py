"""Each mistake in the file gives one line that names key, value and what would be right."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.config import Config, ConfigError, load, parse
from gateway.mistakes import model_of
from gateway.sections import Table
from policies.classes import DEFAULT_CLASSES
from policies.settings import Settings

ROOT = Path(__file__).parents[2]
TENANT = f'[tenants.a]\nkeys_sha256 = ["{"0" * 64}"]\n'

MISTAKES = {
    '[limits]\nmax_bdy_bytes = 3': "limits.max_bdy_bytes: unknown key; the nearest valid one is max_body_bytes",
    "lissten = 3": "lissten: unknown key; the nearest valid one is listen",
    '[classes.gold]\ntppot_s = 1.0': "classes.gold.tppot_s: unknown key; the nearest valid one is tpot_s",
    '[classes.batch]\ntppot_s = 1.0': "classes.batch.tppot_s: unknown key; the nearest valid one is tpot_s",
    '[[replicas]]\nurl = "http://a"\nwieght = 2.0': "replicas[0].wieght: unknown key; the nearest valid one is weight",
    '[limits]\nmax_body_bytes = "32MB"': 'limits.max_body_bytes = "32MB": must be a whole number',
    "[limits]\nmax_body_bytes = 1.5": "limits.max_body_bytes = 1.5: must be a whole number",
    "[limits]\nmax_body_bytes = true": "limits.max_body_bytes = true: must be a whole number",
    "[limits]\nbody_timeout_s = -1": "limits.body_timeout_s = -1: must be above 0",
    "[listen]\nport = 70000": "listen.port = 70000: must be at most 65535",
    "[listen]\nhost = 1": "listen.host = 1: must be text in quotes",
    '[health]\ncanary = "yes"': 'health.canary = "yes": must be true or false',
    "[health]\npanic_share = 1.5": "health.panic_share = 1.5: must be at most 1",
    "[timeouts]\nidle_s = nan": "timeouts.idle_s = nan: must be a finite number",
    '[stream]\nusage = "yes"': "stream.usage = \"yes\": must be one of 'ask' or 'off'",
    "listen = 3": "listen = 3: must be a table",
    "replicas = 3": "replicas = 3: must be a list in [ ]",
    '[[replicas]]\nurl = "ftp://a"': 'replicas[0].url = "ftp://a": must be a base URL, as http://10.0.0.7:8000',
    '[[replicas]]\nurl = "a:80"': 'replicas[0].url = "a:80": must be a base URL, as http://10.0.0.7:8000',
    '[[replicas]]\nid = "a"': "replicas[0].url: is missing; Base URL, as http://10.0.0.7:8000; may have a path prefix.",
    '[[replicas]]\nurl = "http://a"\nid = "a b"': (
        'replicas[0].id = "a b": must be 1 to 64 letters, digits or . _ : -'
    ),
    '[[replicas]]\nurl = "http://a:1"\n[[replicas]]\nurl = "http://a:1/"': (
        'replicas[1].id = "a:1": is taken by replicas[0]; give it another id'
    ),
    '[[replicas]]\nurl = "https://a"\nca_file = "/nowhere.pem"': (
        'replicas[0].ca_file = "/nowhere.pem": must be a readable PEM file'
    ),
    'default_class = "gold"': 'default_class = "gold": must be one of the classes: interactive, standard, batch',
    'model_classes = {m = "gold"}': (
        'model_classes.m = "gold": must be one of the classes: interactive, standard, batch'
    ),
    TENANT + 'classes = ["gold"]': (
        'tenants.a.classes[0] = "gold": must be one of the classes: interactive, standard, batch'
    ),
    TENANT + 'classes = ["batch"]\ndefault_class = "standard"': (
        'tenants.a.default_class = "standard": must be one of its classes: batch'
    ),
    "[tenants.a]\nweight = 2.0": "tenants.a: has no key; give keys_sha256 or keys_env",
    TENANT + TENANT.replace("tenants.a", "tenants.b"): (
        "tenants.b.keys_sha256[0]: is also a key of tenant a; a key has one tenant"
    ),
    '[discovery.dns]\nnames = ["vllm"]': (
        'discovery.dns.names[0] = "vllm": must be http://NAME:PORT, as http://vllm.example:8000, or srv+http://NAME'
    ),
    '[policy]\nname = "robin"': 'policy.name = "robin": must be one of ',
    '[policy]\nname = "round_robin+x"': "policy.name = \"round_robin+x\": arm 'round_robin+x': unknown suffix 'x'",
    '[policy]\nname = "round_robin"\n[policy.settings]\nx = 1': (
        "policy.settings: policy 'round_robin' has no parameter 'x'"
    ),
    "[classes.batch]\nfloor_share = 0.6\n[classes.standard]\nfloor_share = 0.6": (
        "classes: the sum of floor_share is 1.2; it must be at most 1"
    ),
    "[health]\nbackoff_max_s = 1.0": "health.backoff_max_s = 1: must be at least health.backoff_s, which is 2",
    "[listen\nport = 1": "not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 8)",
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text.replace("\n", " ")[:50])
def test_a_mistake_is_one_line_with_key_value_and_what_would_be_right(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith(MISTAKES[text])
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("policy.seed = 18446744073709551616", "policy.seed: must be a whole number of at most 64 bits"),
        ("policy.settings.a = [1, -9223372036854775809]", "policy.settings.a[1]: must be a whole number of at most 64"),
        ('listen.host = "a\\u0000b"', "listen.host: must not hold a zero byte"),
        ("policy.seed = 0x" + "f" * 6000, "policy.seed: must be a whole number of at most 64 bits"),
        ("policy.seed = " + "9" * 6000, "not valid TOML: "),
        ("a = " + "[" * 5000, "not valid TOML: "),
    ],
    ids=["seed", "in a list", "zero byte", "hex", "digits", "depth"],
)
def test_what_no_message_or_journal_could_carry_is_refused(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.lines[0].startswith(line)


def test_every_mistake_of_a_file_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse('[listen]\nprot = 1\n[limits]\nmax_body_bytes = "x"\n[[replicas]]\nid = "a"')
    assert len(caught.value.lines) == 3


def test_mistakes_across_tables_are_told_with_the_others() -> None:
    key = "0" * 64
    with pytest.raises(ConfigError) as caught:
        parse(
            f'''[listen]
            port = "x"
            default_class = "batch"
            [limits]
            max_bdy_bytes = 3
            [tenants.team-a]
            keys_sha256 = ["{key}"]
            classes = ["platinum"]'''
        )
    assert sorted(caught.value.lines) == [
        "limits.max_bdy_bytes: unknown key; the nearest valid one is max_body_bytes",
        "listen.default_class: unknown key here; default_class belongs at the top level, above the first [table]"
        " or into [tenants.NAME]",
        'listen.port = "x": must be a whole number',
        'tenants.team-a.classes[0] = "platinum": must be one of the classes: interactive, standard, batch',
    ]


@pytest.mark.parametrize(
    "text",
    [
        '[tenants.a]\nkeys_sha256 = ["sk"]',
        '[limits]\nmax_body_bytes = "x"\nreceiving_bytes = 1000',
        'default_class = "gold"\n[classes]\ngold = 3',
        '[policy]\nname = 3\n[policy.settings]\nx = 1',
    ],
)  # fmt: skip
def test_what_follows_from_a_mistake_is_not_told_as_another(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert len(caught.value.lines) == 1


def test_a_mistake_of_syntax_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("[listen\n")
    with pytest.raises(ConfigError, match=r"^--config .*/gateway\.toml: not valid TOML: Expected"):
        load(file)


def test_a_key_pasted_where_its_hash_belongs_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse('[tenants.a]\nkeys_sha256 = ["sk-secret"]')
    assert str(caught.value) == "tenants.a.keys_sha256[0]: must be 64 lower-case hex digits, the SHA-256 of a key"


def test_a_password_in_a_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse('[[replicas]]\nurl = "http://me:secret@a"')
    assert str(caught.value) == "replicas[0].url: must not hold a user or password; use key_env"


def test_a_file_that_cannot_be_read_is_a_mistake_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read: No such file or directory"):
        load(tmp_path / "gone.toml")


def test_nothing_at_all_is_a_valid_configuration() -> None:
    config = load()
    assert config.listen.port == 8080
    assert config.default_class == "standard"
    assert config.service_classes() == {c.name: c for c in DEFAULT_CLASSES}


def test_the_command_line_is_laid_over_the_file() -> None:
    config = parse(
        "[listen]\nport = 1\nbacklog_connections = 7", {"listen": {"port": 2}, "replicas": [{"url": "http://a"}]}
    )
    assert (config.listen.port, config.listen.backlog_connections) == (2, 7)
    assert [r.name for r in config.replicas] == ["a:80"]


def test_a_table_for_a_built_in_class_changes_only_what_it_names() -> None:
    config = parse('[classes.interactive]\ntpot_s = "none"\n[classes.gold]\nttft_s = 1.0')
    assert list(config.classes) == ["interactive", "standard", "batch", "gold"]
    assert config.classes["interactive"].tpot_s is None
    assert config.classes["interactive"].ttft_s == 2.0
    assert config.classes["gold"].build("gold").ttft_s == 1.0


def test_replicas_are_named_by_address_unless_they_have_an_id() -> None:
    urls = ["http://10.0.0.7:8000", "https://gpu.example/v", "http://[::1]:8000/"]
    config = parse("", {"replicas": [*({"url": u} for u in urls), {"url": "http://b", "id": "big"}]})
    assert [r.name for r in config.replicas] == ["10.0.0.7:8000", "gpu.example:443/v", "[::1]:8000", "big"]
    assert config.replicas[2].url == "http://[::1]:8000"


def test_switches_of_the_file_and_parts_of_the_arm_are_combined() -> None:
    def on(text: str) -> tuple[bool, bool, bool]:
        settings = parse(text).arm().settings
        return settings.admission, settings.pacing, settings.working_set

    assert on('[policy]\nname = "round_robin"') == (False, False, False)
    assert on('[policy]\nname = "round_robin+admission+pacing"') == (True, True, False)
    assert on('[policy]\nname = "round_robin+admission+pacing"\n[pacing]\nenabled = false') == (True, False, False)


def test_every_setting_of_the_core_can_be_reached_and_has_the_core_s_default() -> None:
    from_file, own = parse("").arm().settings, Settings()
    ours = {"max_held", "max_held_bytes", "admission", "pacing", "working_set"}  # bounded by limits, set by the arm
    assert {f.name for f in fields(Settings) if getattr(from_file, f.name) != getattr(own, f.name)} <= ours


def tables(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, info in model.model_fields.items():
        if inner := model_of(info.annotation):
            yield from tables(inner, f"{path}.{name}".lstrip("."))


@pytest.mark.parametrize(("path", "model"), list(tables(Config)), ids=lambda x: x if isinstance(x, str) else "")
def test_every_key_has_a_description_and_a_default(path: str, model: type[BaseModel]) -> None:
    assert issubclass(model, Table)
    for name, info in model.model_fields.items():
        table_of_its_own = model_of(info.annotation) is not None
        assert table_of_its_own or (info.description and "\n" not in info.description), f"{path}.{name}"
        assert not info.is_required() or (path, name) == ("replicas", "url")


def keys(document: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in document.items():
        yield f"{path}.{name}".lstrip(".")
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from keys(inner, f"{path}.{name}".lstrip("."))


def test_the_example_file_is_valid_as_it_is() -> None:
    config = load(ROOT / "deploy" / "gateway.toml")
    assert [r.url for r in config.replicas] == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]


def test_the_example_file_shows_every_key_with_its_description_and_default() -> None:
    text = (ROOT / "deploy" / "gateway.toml").read_text()
    uncommented = re.sub(r"^# (?=[a-z_0-9]+ = |\[)", "", text, flags=re.MULTILINE)
    shown = set(keys(tomllib.loads(uncommented)))
    defaults = parse("").model_dump()
    for path, model in tables(Config):
        where = path.replace("classes", "classes.interactive").replace("tenants", "tenants.team-a")
        for name, info in model.model_fields.items():
            if model_of(info.annotation) is not None:
                continue
            key = f"{where}.{name}".lstrip(".")
            assert key in shown, f"{key} is not in deploy/gateway.toml"
            assert f"# {info.description}\n" in text, f"{key} is not explained as in the code"
    values = parse(re.sub(r"(?ms)^\[\[replicas.*?(?=^\[[^\[])", "", text)).model_dump()
    differ = [table for table in defaults if values[table] != defaults[table]]
    assert differ == []
