"""Compiles the core with mypyc, so that a decision costs less CPU: python deploy/compile.py DIR

DIR receives copies of the three packages with the modules of `HOT` beside their sources as C extensions, which Python
imports first: PYTHONPATH=DIR is all that using them takes, and `forebay --version` says what runs. The sources are the
same and mean the same; `make compiled` builds them and runs the core's and the gateway's tests against the result.
Needs mypy, setuptools and a C compiler; without, DIR holds plain Python, one line says so, and nothing fails.
Only policies/ is compiled: it is pure, so nothing in it waits. Compiled coroutines lost a field while they waited
(mypyc 2.4, 2 of 136 requests of 400 KB), and what orjson writes must stay Python: it reads the fields of a class
where compiled ones have none. Hence no gateway/, and neither model nor objectives.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

PACKAGES = ("gateway", "policies", "loadtests")
HOT = (
    "admission affinity binding blind canonical classes core dispatching feedback fleet_state forebay homes index kv "
    "ledger pacing predictor prefix price queue room roster seen side_by_side sight tracked view working_set"
)


def copied(root: Path, into: Path) -> None:
    """The packages of `root` in `into`, without what was compiled there before."""
    into.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        shutil.rmtree(into / package, ignore_errors=True)
        shutil.copytree(root / package, into / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))


def compiler() -> str | None:
    """The C compiler that Python's own extensions are built with, or None: there is none."""
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return words[0] if words and shutil.which(words[0]) else None


def compile_into(into: Path) -> None:
    """Compiles `HOT` in place. Raises what mypyc or the compiler has to say against it."""
    work = into / "_compile"  # generated C and objects, kept: what has not changed is not compiled again
    work.mkdir(exist_ok=True)
    settings = work / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\nignore_missing_imports = True\n")
    os.chdir(into)
    from mypyc.build import mypycify
    from setuptools import setup

    # without mypy's cache: with it only what changed is generated, and mypyc trips over the rest
    options = [f"--config-file={settings}", "--cache-dir=/dev/null", *(f"policies/{name}.py" for name in HOT.split())]
    level = os.environ.get("MYPYC_OPT_LEVEL", "2")
    extensions = mypycify(options, opt_level=level, debug_level="0", separate=True, target_dir=str(work))
    argv = ["--quiet", "build_ext", "--inplace", "--build-temp", str(work), "--build-lib", str(work)]
    argv += ["-j", str(os.cpu_count() or 1)]
    setup(name="forebay-compiled", packages=[], ext_modules=extensions, script_args=argv)


def main(into: Path) -> None:
    copied(Path(__file__).resolve().parent.parent, into)
    if compiler() is None:
        print(f"no C compiler: {into} holds plain Python", file=sys.stderr)
        return
    try:
        compile_into(into)
    except (Exception, SystemExit) as e:  # no headers, a compiler that fails: whatever it is, the sources run
        for half in into.rglob("*.so"):
            half.unlink()
        print(f"not compiled ({e}): {into} holds plain Python", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python deploy/compile.py DIR")
    main(Path(sys.argv[1]).resolve())
