"""Compiling is an option: what is compiled never waits, and without a compiler everything runs all the same."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "compile.py"


def hot() -> list[Path]:
    spec = importlib.util.spec_from_file_location("deploy_compile", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return [ROOT / package / f"{name}.py" for package, names in script.HOT.items() for name in names.split()]


def test_what_is_compiled_exists_and_never_waits() -> None:
    waits = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    for path in hot():
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, waits)], path


def test_sums_in_what_is_compiled_say_where_they_start() -> None:
    """mypyc takes a sum without a start for an int where it is none: "int object expected; got float" at run time."""
    for path in hot():
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        sums = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "sum"]
        assert [ast.unparse(call) for call in sums if len(call.args) < 2] == [], path


def test_no_class_attribute_that_is_a_union_of_several_has_a_default() -> None:
    """mypyc gives such a one none: it is undefined until it is set, so `__init__` has to do it."""
    for path in hot():
        for made in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]:
            for line in made.body:
                if (
                    isinstance(line, ast.AnnAssign)
                    and isinstance(line.value, ast.Constant)
                    and line.value.value is None
                ):
                    assert "Decision" not in ast.unparse(line.annotation), (path, ast.unparse(line))
                    assert ast.unparse(line.annotation).count("|") < 2, (path, ast.unparse(line))


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, SCRIPT, *arguments], env=env, capture_output=True, text=True)


def test_without_a_compiler_it_is_plain_python_and_says_so(tmp_path: Path) -> None:
    made = run(tmp_path, CC="no-such-compiler")
    assert (made.returncode, made.stderr) == (0, f"no C compiler: {tmp_path} holds plain Python\n")
    ask = [sys.executable, "-c", "import gateway.version as v; print(v.__file__, v.built())"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(ask, env=environment, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert told.stdout == f"{tmp_path / 'gateway' / 'version.py'} plain Python\n"


def test_what_must_be_compiled_and_is_not_fails(tmp_path: Path) -> None:
    """In CI and for a wheel: falling back in silence would test and ship the plain core under the other's name."""
    assert run("--must", tmp_path, CC="no-such-compiler").returncode == 1
    told = run("--can", CC="no-such-compiler")
    assert (told.returncode, told.stderr) == (1, "no C compiler\n")


def test_what_it_makes_is_installed_by_pip_and_named_after_the_platform(tmp_path: Path) -> None:
    """A wheel of extensions that called itself pure would be installed where they cannot be loaded."""
    made, wheels = tmp_path / "made", tmp_path / "wheels"
    run(made, CC="no-such-compiler")
    ask = [sys.executable, "-c", f"import setuptools.build_meta as b; print(b.build_wheel({str(wheels)!r}))"]

    def wheel() -> zipfile.ZipFile:
        told = subprocess.run(ask, cwd=made, capture_output=True, text=True, check=True)
        return zipfile.ZipFile(wheels / told.stdout.split()[-1])

    with wheel() as plain:
        assert str(plain.filename).endswith("-py3-none-any.whl")
    library = f"policies/ledger{sysconfig.get_config_var('EXT_SUFFIX')}"
    (made / library).write_bytes(b"stands for what was compiled")
    with wheel() as native:
        assert not str(native.filename).endswith("-any.whl")
        assert {library, "policies/ledger.py", "gateway/dashboard.html"} <= set(native.namelist())
