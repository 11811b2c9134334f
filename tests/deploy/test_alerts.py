"""Alert rules: valid, tested one by one, with a runbook each. promtool comes with Debian's package `prometheus`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "prometheus"
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]


def promtool(*arguments: str) -> None:
    assert shutil.which("promtool"), "promtool is missing: apt-get install --no-install-recommends prometheus"
    ran = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_rules_and_configuration_are_valid() -> None:
    promtool("check", "rules", "rules.yaml", "alerts.yaml")
    promtool("check", "config", "prometheus.yml")


def test_alerts_fire_where_they_should_and_are_silent_where_they_should_not() -> None:
    promtool("test", "rules", "alerts.test.yaml")


def test_every_alert_is_tested_firing_and_silent() -> None:
    firing: set[str] = set()
    silent: set[str] = set()
    for test in yaml.safe_load((FOLDER / "alerts.test.yaml").read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (firing if case["exp_alerts"] else silent).add(case["alertname"])
    assert firing == silent == set(NAMES)


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_every_alert_says_how_urgent_it_is_and_has_a_runbook(rule: dict[str, dict[str, str]]) -> None:
    name = str(rule["alert"])
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["runbook"] == f"deploy/runbooks.md#{name.lower()}"
    book = (DEPLOY / "runbooks.md").read_text()
    chapter = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", book, re.MULTILINE | re.DOTALL)
    assert chapter, f"{name} has no runbook"
    for part in ("**Means**", "**Look**", "**Do**"):
        assert part in chapter[1], f"runbook of {name} lacks {part}"
