"""The manifests hang together: everything that is referred to is there, and says what the other side expects."""

from __future__ import annotations

import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest

from gateway.config import Config, parse
from tests.deploy.kustomize import Manifest, build, containers

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("base", "overlays/production", "overlays/simulated")
VERSIONS = ("1.30", "1.37")  # of Kubernetes, whose schemas must hold
DURATION = r"0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?"
# kind: apiVersion, and fields of spec that the API server insists on
REQUIRED: dict[str, tuple[str, set[str]]] = {
    "Namespace": ("v1", set()),
    "ServiceAccount": ("v1", set()),
    "ConfigMap": ("v1", set()),
    "Role": ("rbac.authorization.k8s.io/v1", set()),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", set()),
    "Deployment": ("apps/v1", {"selector", "template"}),
    "Service": ("v1", {"ports"}),
    "HorizontalPodAutoscaler": ("autoscaling/v2", {"scaleTargetRef", "maxReplicas", "metrics"}),
    "PodDisruptionBudget": ("policy/v1", {"selector"}),
    "NetworkPolicy": ("networking.k8s.io/v1", {"podSelector", "policyTypes"}),
    "ServiceMonitor": ("monitoring.coreos.com/v1", {"selector", "endpoints"}),
}


@pytest.fixture(params=OVERLAYS)
def made(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(FOLDER / request.param)


def of_kind(made: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in made if m["kind"] == kind}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def pods(made: list[Manifest]) -> dict[str, dict[str, Any]]:
    """Pod templates by the name of their Deployment."""
    return {name: m["spec"]["template"] for name, m in of_kind(made, "Deployment").items()}


def config(made: list[Manifest]) -> Config:
    (one,) = of_kind(made, "ConfigMap").values()  # its name carries a hash of what it holds
    return parse(one["data"]["gateway.toml"])


def test_every_manifest_has_its_version_and_what_it_must_have(made: list[Manifest]) -> None:
    keys = [(m["kind"], m["metadata"]["name"]) for m in made]
    assert len(set(keys)) == len(keys)
    for m in made:
        version, fields = REQUIRED[m["kind"]]
        assert m["apiVersion"] == version
        assert fields <= m.get("spec", {}).keys()
        assert m["metadata"]["name"].replace("-", "").isalnum()


@pytest.mark.parametrize("version", VERSIONS)
def test_no_field_is_unknown_to_kubernetes_or_of_another_kind(made: list[Manifest], version: str) -> None:
    checked = [kubernetes_validate.validate(m, version, strict=True) for m in made if m["kind"] != "ServiceMonitor"]
    assert len(checked) == len(made) - 1  # that kind is defined by the operator of Prometheus, not by Kubernetes


def strange(monitor: Manifest) -> list[str]:
    """Fields of a ServiceMonitor that are none of those we use, or not of their kind.

    By the prometheus-operator's API reference (monitoring.coreos.com/v1), whose schema is not Kubernetes' own;
    the fields that may stand here and nothing else, so a misspelt one shows."""
    spec = monitor["spec"]
    found = [f"spec.{key}" for key in spec.keys() - {"selector", "endpoints"}]
    found += [f"selector.{key}" for key in spec["selector"].keys() - {"matchLabels"}]
    found += [f"{k}: {v!r}" for k, v in spec["selector"]["matchLabels"].items() if not isinstance(v, str)]
    for endpoint in spec["endpoints"]:
        found += [f"endpoints.{key}" for key in endpoint.keys() - {"port", "path", "interval"}]
        found += [f"{key}: {value!r}" for key, value in endpoint.items() if not isinstance(value, str) or not value]
        if not re.fullmatch(DURATION, str(endpoint.get("interval", "0"))):
            found.append(f"interval: {endpoint['interval']!r}")
    return found


def test_the_service_monitor_says_what_its_operator_knows(made: list[Manifest]) -> None:
    for monitor in of_kind(made, "ServiceMonitor").values():
        assert strange(monitor) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("intervall", "10s", "endpoints.intervall"),
        ("port", 8080, "port: 8080"),
        ("interval", "10 seconds", "interval: '10 seconds'"),
        ("interval", "10", "interval: '10'"),
    ],
)
def test_a_mistake_in_a_service_monitor_is_seen(field: str, value: object, said: str) -> None:
    (built,) = of_kind(build(FOLDER / "base"), "ServiceMonitor").values()
    monitor = deepcopy(built)  # what is built is built once for all
    monitor["spec"]["endpoints"][0][field] = value
    assert strange(monitor) == [said]


def test_a_namespace_is_set_on_everything_or_on_nothing(made: list[Manifest]) -> None:
    assert len({m["metadata"].get("namespace") for m in made if m["kind"] != "Namespace"}) == 1
    for name in of_kind(made, "Namespace"):
        assert {m["metadata"].get("namespace") for m in made if m["kind"] != "Namespace"} == {name}


def test_selectors_select_the_pods_they_mean(made: list[Manifest]) -> None:
    templates = pods(made)
    for name, m in of_kind(made, "Deployment").items():
        assert selects(m["spec"]["selector"]["matchLabels"], templates[name]["metadata"]["labels"])
    for kind, path in (("Service", ()), ("PodDisruptionBudget", ("matchLabels",))):
        for name, m in of_kind(made, kind).items():
            selector = m["spec"]["selector"]
            for part in path:
                selector = selector[part]
            chosen = [n for n, t in templates.items() if selects(selector, t["metadata"]["labels"])]
            assert chosen == [name], f"{kind} {name}"
    policy = of_kind(made, "NetworkPolicy")["forebay"]["spec"]
    assert selects(policy["podSelector"]["matchLabels"], templates["forebay"]["metadata"]["labels"])
    monitor = of_kind(made, "ServiceMonitor")["forebay"]["spec"]
    wanted = monitor["selector"]["matchLabels"]
    services = of_kind(made, "Service").items()
    watched = [name for name, m in services if selects(wanted, m["metadata"].get("labels", {}))]
    assert watched == ["forebay"]


def test_ports_are_those_of_the_container_and_of_the_gateway(made: list[Manifest]) -> None:
    templates = pods(made)
    for name, m in of_kind(made, "Service").items():
        (container,) = templates[name]["spec"]["containers"]
        named = {p["name"]: p["containerPort"] for p in container["ports"]}
        for port in m["spec"]["ports"]:
            assert port["targetPort"] in named
        arguments = container["args"]
        if name == "redis":
            continue
        assert int(arguments[arguments.index("--port") + 1]) == named["http"]
        assert arguments[arguments.index("--host") + 1] == "0.0.0.0"
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in named
    for endpoint in of_kind(made, "ServiceMonitor")["forebay"]["spec"]["endpoints"]:
        assert endpoint["port"] in {p["name"] for p in of_kind(made, "Service")["forebay"]["spec"]["ports"]}
        assert endpoint["path"] == "/metrics"
    for rule in of_kind(made, "NetworkPolicy")["forebay"]["spec"]["ingress"]:
        (container,) = templates["forebay"]["spec"]["containers"]
        assert {p["port"] for p in rule["ports"]} <= {p["name"] for p in container["ports"]}


def test_probes_ask_what_they_should(made: list[Manifest]) -> None:
    (container,) = pods(made)["forebay"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"  # never touches a replica
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_accounts_config_and_volumes_that_are_used_are_there(made: list[Manifest]) -> None:
    for template in pods(made).values():
        spec = template["spec"]
        if account := spec.get("serviceAccountName"):
            assert account in of_kind(made, "ServiceAccount")
        volumes = {v["name"]: v for v in spec.get("volumes", [])}
        for container in spec["containers"]:
            mounts = {m["name"]: m for m in container.get("volumeMounts", [])}
            assert mounts.keys() == volumes.keys()
            for argument in container["args"]:
                if argument.startswith("/etc/forebay/"):
                    assert mounts["config"]["mountPath"] == "/etc/forebay"
                    name = volumes["config"]["configMap"]["name"]
                    assert argument.removeprefix("/etc/forebay/") in of_kind(made, "ConfigMap")[name]["data"]
    (binding,) = of_kind(made, "RoleBinding").values()
    assert binding["roleRef"]["name"] in of_kind(made, "Role")
    for subject in binding["subjects"]:
        account = of_kind(made, "ServiceAccount")[subject["name"]]
        assert subject.get("namespace") == account["metadata"].get("namespace")


def test_the_account_may_do_what_discovery_does_and_nothing_else(made: list[Manifest]) -> None:
    (role,) = of_kind(made, "Role").values()
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    service_account = "/var/run/secrets/kubernetes.io/serviceaccount/"
    kubernetes = config(made).discovery.kubernetes
    assert (kubernetes.token_file, kubernetes.ca_file) == (service_account + "token", service_account + "ca.crt")
    assert pods(made)["forebay"]["spec"].get("automountServiceAccountToken", True)


def test_the_configuration_is_valid_and_finds_the_replicas_of_the_overlay(made: list[Manifest]) -> None:
    kubernetes = config(made).discovery.kubernetes
    label, _, service = (kubernetes.selector or "").partition("=")
    assert (label, service) == ("kubernetes.io/service-name", "vllm")
    if (replicas := of_kind(made, "Service").get("vllm")) is not None:
        assert kubernetes.port in {p["name"] for p in replicas["spec"]["ports"]}
    allowed = of_kind(made, "NetworkPolicy")["forebay"]["spec"]["egress"][0]
    if (template := pods(made).get("vllm")) is not None:
        assert selects(allowed["to"][0]["podSelector"]["matchLabels"], template["metadata"]["labels"])
        (container,) = template["spec"]["containers"]
        assert [p["port"] for p in allowed["ports"]] == [p["containerPort"] for p in container["ports"]]


def test_redis_is_where_the_gateways_look_for_it_and_only_they_reach_it(made: list[Manifest]) -> None:
    redis = urlsplit(config(made).redis.url or "")
    ports = {p["port"] for p in of_kind(made, "Service")[redis.hostname or ""]["spec"]["ports"]}
    assert ports == {redis.port}
    outside = [rule for rule in of_kind(made, "NetworkPolicy")["forebay"]["spec"]["egress"] if "to" in rule][-1]
    labels = pods(made)["redis"]["metadata"]["labels"]
    assert selects(outside["to"][0]["podSelector"]["matchLabels"], labels)
    assert {p["port"] for p in outside["ports"]} == ports
    inside = of_kind(made, "NetworkPolicy")["redis"]["spec"]
    assert selects(inside["podSelector"]["matchLabels"], labels)
    (rule,) = inside["ingress"]
    assert selects(rule["from"][0]["podSelector"]["matchLabels"], pods(made)["forebay"]["metadata"]["labels"])


def test_bodies_that_wait_take_half_of_a_gateway_s_memory_at_most(made: list[Manifest]) -> None:
    (container,) = pods(made)["forebay"]["spec"]["containers"]
    limits = config(made).limits
    memory = {"1Gi": 1 << 30, "2Gi": 2 << 30}[container["resources"]["limits"]["memory"]]
    assert 2 * (limits.held_bytes + limits.receiving_bytes) <= memory


def test_streams_have_time_to_end(made: list[Manifest]) -> None:
    spec = pods(made)["forebay"]["spec"]
    sleep, seconds = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert spec["terminationGracePeriodSeconds"] >= int(seconds) + config(made).listen.drain_s + 2


def test_autoscalers_scale_what_is_there_on_a_metric_that_moves(made: list[Manifest]) -> None:
    scalers = of_kind(made, "HorizontalPodAutoscaler")
    for scaler in scalers.values():
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == ("apps/v1", "Deployment")
        assert scaler["spec"]["minReplicas"] >= 2
        assert scaler["spec"]["maxReplicas"] > scaler["spec"]["minReplicas"]
    assert scalers["forebay"]["spec"]["scaleTargetRef"]["name"] in pods(made)
    (metric,) = scalers["forebay"]["spec"]["metrics"]
    assert metric["resource"]["name"] == "cpu"
    (container,) = pods(made)["forebay"]["spec"]["containers"]
    assert "cpu" in container["resources"]["requests"]  # utilisation is measured against it
    if "vllm" in scalers:
        (metric,) = scalers["vllm"]["spec"]["metrics"]
        recorded = (FOLDER.parent / "prometheus" / "rules.yaml").read_text()
        series = metric["external"]["metric"]["name"].replace("forebay_demand_requests", "forebay:demand:requests")
        assert f"record: {series}\n" in recorded


def test_containers_run_as_nobody_with_nothing_to_write_to(made: list[Manifest]) -> None:
    for template in pods(made).values():
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"]
        assert pod["runAsUser"] > 0
        assert pod.get("fsGroup", pod["runAsUser"]) == pod["runAsUser"]  # a volume is its own
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in template["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]


def test_images_without_a_tag_are_not_pulled_when_the_node_has_them(made: list[Manifest]) -> None:
    for manifest in of_kind(made, "Deployment").values():
        for container in containers(manifest):
            assert ":" in container["image"] or container["imagePullPolicy"] == "IfNotPresent"


def test_overlays_change_what_they_say() -> None:
    made = build(FOLDER / "overlays/production")
    deployment = of_kind(made, "Deployment")["forebay"]
    assert deployment["spec"]["replicas"] == 3
    (container,) = containers(deployment)
    assert container["image"] == "registry.example/forebay:0.1.0"
    assert container["resources"]["limits"] == {"memory": "2Gi"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"  # what the patch leaves alone stays


def test_the_configuration_in_the_documentation_is_valid() -> None:
    text = (FOLDER.parent / "discovery.md").read_text()
    example = text.split("## Examples")[1].split("Kubernetes needs")[0]
    lines = "\n".join(line.removeprefix("    ") for line in example.splitlines() if line.startswith("    "))
    assert parse(lines).discovery.any
    assert tomllib.loads(lines)
