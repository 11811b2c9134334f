"""What `kubectl kustomize` makes of our overlays: resources, patches, labels, namespace, images, generated ConfigMaps.

Only the fields that ours use are understood, and any other is an error, so that a test never reads something else than
a cluster would get. Patches are strategic merges: tables key by key, lists of things with a name by name.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]
UNDERSTOOD = {
    *("apiVersion", "kind", "resources", "patches", "labels", "namespace", "images", "configMapGenerator"),
}
CLUSTER_WIDE = {"Namespace"}


def documents(path: Path) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def build(folder: Path) -> list[Manifest]:
    """Every manifest of an overlay or base."""
    (spec,) = documents(folder / "kustomization.yaml")
    assert spec.keys() <= UNDERSTOOD, spec.keys() - UNDERSTOOD
    made: list[Manifest] = []
    for resource in spec.get("resources", []):
        path = folder / resource
        made += build(path) if path.is_dir() else documents(path)
    for generator in spec.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in generator["files"]}
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}}
        made.append({**head, "data": data})
    for patch in spec.get("patches", []):
        for over in documents(folder / patch["path"]):
            (target,) = [m for m in made if _key(m) == _key(over)]
            made[made.index(target)] = merged(target, over)
    for one in made:
        for labels in spec.get("labels", []):
            one["metadata"].setdefault("labels", {}).update(labels["pairs"])
        if "namespace" in spec and one["kind"] not in CLUSTER_WIDE:
            one["metadata"]["namespace"] = spec["namespace"]
            for subject in one.get("subjects", []):  # which the API server insists on
                subject["namespace"] = spec["namespace"]
        for image in spec.get("images", []):
            for container in containers(one):
                if container["image"] == image["name"]:
                    container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    return made


def merged(below: Any, over: Any) -> Any:
    if isinstance(below, dict) and isinstance(over, dict):
        return {key: merged(below.get(key), over.get(key, below.get(key))) for key in {**below, **over}}
    if isinstance(below, list) and isinstance(over, list) and all("name" in item for item in [*below, *over]):
        named = {item["name"]: item for item in below}
        return list({**named, **{item["name"]: merged(named.get(item["name"], {}), item) for item in over}}.values())
    return copy.deepcopy(over)


def containers(manifest: Manifest) -> list[Manifest]:
    pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("containers", []), *pod.get("initContainers", [])]


def _key(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]
