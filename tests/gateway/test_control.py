"""A configuration is taken whole or not at all, also when a part that should not fail does."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import build
from gateway.control import Control, differences
from tests.gateway.running import Running, running

PATCH = {
    "classes": {"standard": {"ttft_s": 3.0}, "night": {"ttft_s": 60.0}},
    "policy": {"name": "least_request"},
    "admission": {"target_attainment": 0.5},
    "tenants": {"small": {"keys_sha256": ["00" * 32], "concurrency": 1}},
    "replicas": [{"url": "http://127.0.0.1:9", "id": "other"}],
    "health": {"slow_start_s": 7.0},
    "listen": {"drain_s": 45.0},
}
PARTS = ("proxy.configure", "members.told", "sources.configure", "watch.configure", "metrics.configure",
         "experiments.leave", "scheduler.reclass", "shadows.configure", "scheduler.use", "scheduler.configure",
         "experiments.enter")  # fmt: skip


def runs_with(g: Running) -> dict[str, Any]:
    """What every part of the gateway lives by."""
    control: Control = g.gateway.control
    core = g.gateway.balancer
    return {
        "version": control.versions[-1].number,
        "config": control.config.model_dump(),
        "classes": dict(core.classes),
        "classes of the proxy": set(g.gateway.proxy._classes),
        "labels": g.gateway.metrics.counted.classes | g.gateway.metrics.counted.tenants,
        "policy": core.policy.name,
        "target": core.settings.target_attainment,
        "tenants": {name: tenant.concurrency for name, tenant in g.gateway.proxy.tenants.by_name.items()},
        "replicas": [(r.id, r.url) for r in g.gateway.fleet.replicas.values()],
        "slow start": (g.gateway.members.slow_start_s, g.gateway.fleet.health.settings.slow_start_s),
    }


@pytest.mark.parametrize("part", PARTS)
async def test_a_part_that_fails_leaves_the_configuration_before_in_all_parts(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = {"small": {"keys_sha256": ["00" * 32], "concurrency": 9}}
    async with running("http://127.0.0.1:9", ready=False, tenants=tenants) as g:
        before = runs_with(g)
        owner, _, method = part.partition(".")
        of = type(getattr(g.gateway.control, owner))
        done = getattr(of, method)

        def fails_once(*given: Any, **named: Any) -> None:
            monkeypatch.setattr(of, method, done)
            raise RuntimeError("a mistake of ours")

        monkeypatch.setattr(of, method, fails_once)
        assert (await g.http.patch("/admin/config", json=PATCH)).status_code == 500
        assert "what was changed is taken back" in caplog.text
        assert runs_with(g) == before

        assert (await g.http.patch("/admin/config", json=PATCH)).status_code == 200
        after = runs_with(g)
        assert after["version"] == before["version"] + 1
        assert [name for name in before if after[name] == before[name]] == []


async def test_the_bound_of_a_drain_is_true_at_once_and_said_to_be() -> None:
    async with running() as g:
        answer = await g.http.patch("/admin/config", json={"listen": {"drain_s": 45.0}})
        assert answer.json()["changed"] == ["listen.drain_s: 30.0 -> 45.0"]
        assert g.server.gateway.config.listen.drain_s == 45.0


def test_what_changed_of_replicas_is_said_replica_by_replica() -> None:
    one, two = {"url": "http://a:1", "id": "one"}, {"url": "http://b:2"}
    heavier = one | {"weight": 2.0}

    def said(before: list[Any], after: list[Any]) -> list[str]:
        whole = (build({"replicas": rows}).model_dump() for rows in (before, after))
        return list(differences(*whole))

    assert said([one], [one, two]) == ["replicas.b:2: added at http://b:2"]
    assert said([one, two], [heavier]) == ["replicas.one.weight: 1.0 -> 2.0", "replicas.b:2: removed"]
    assert said([one, two], [two, one]) == ["replicas: in another order"]
    assert said([one, two], [one, two]) == []
