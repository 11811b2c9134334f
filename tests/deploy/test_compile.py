"""Compiling is an option: what is compiled never waits, and without a compiler everything runs all the same."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "compile.py"


def hot() -> list[Path]:
    spec = importlib.util.spec_from_file_location("deploy_compile", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return [ROOT / "policies" / f"{name}.py" for name in script.HOT.split()]


def test_what_is_compiled_exists_and_never_waits() -> None:
    waits = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    for path in hot():
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, waits)], path


def test_the_words_that_orjson_writes_are_not_compiled() -> None:
    from policies.model import Alternative, Prediction, Shadowed
    from policies.objectives import Objectives

    compiled = {f"policies.{path.stem}" for path in hot()}
    assert not compiled & {word.__module__ for word in (Alternative, Prediction, Shadowed, Objectives)}


def test_without_a_compiler_it_is_plain_python_and_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "CC": "no-such-compiler", "PYTHONPATH": str(tmp_path)}
    made = subprocess.run([sys.executable, SCRIPT, tmp_path], env=environment, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, f"no C compiler: {tmp_path} holds plain Python\n")
    ask = [sys.executable, "-c", "import gateway.version as v; print(v.__file__, v.built())"]
    told = subprocess.run(ask, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert told.stdout == f"{tmp_path / 'gateway' / 'version.py'} plain Python\n"
