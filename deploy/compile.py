"""Compiles the hot modules with mypyc, so that a request costs less CPU: python deploy/compile.py DIR

DIR receives copies of the three packages with the modules of `HOT` beside them as C extensions. Python imports these
instead of the sources, so PYTHONPATH=DIR is all that using them
takes. Needs a C compiler, mypy and setuptools; nothing else of the project needs this. The sources are the same and
mean the same: `make compiled` runs the tests of the core and the gateway against the result. Not compiled: what
inherits from classes of other packages (wire, cycle, metrics), what runs once or per scrape, and every module with a
coroutine: an exchange compiled by mypyc 2.4 lost a field while it waited (2 of 136 requests of 400 KB). An experiment
so far: `make compiled` says whether it holds on this machine; the container image runs the sources. One C file per
module, so that a change compiles again in seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

PACKAGES = ("gateway", "policies", "loadtests")
HOT = {
    "policies": (
        "admission affinity binding canonical classes core dispatching families feedback fleet_state forebay homes "
        "index kv ledger model objectives pacing predictor prefix price queue seen settings sight strata tracked "
        "working_set"
    ),
    "gateway": (
        "admit answer chunks distribution door endpoints fleet headers health http1 openai pinning pulses record relay "
        "request_head response_head retry scheduler signals sse stall tally tenants timeline usage"
    ),
}  # fmt: skip


def modules() -> list[str]:
    """Paths below a folder that holds the packages."""
    return [f"{package}/{name}.py" for package, names in HOT.items() for name in names.split()]


def compile_into(root: Path, into: Path) -> None:
    """Copies the packages of `root` to `into` and compiles them there. Raises SystemExit with the compiler's words."""
    into.mkdir(parents=True, exist_ok=True)
    if into.resolve() != root.resolve():
        for package in PACKAGES:
            shutil.copytree(root / package, into / package, dirs_exist_ok=True)
    for package in PACKAGES:  # of modules that are hot no more
        for old in (into / package).rglob("*.so"):
            old.unlink()
    work = into.resolve() / "_compile"  # generated C and objects, kept for the next time
    work.mkdir(exist_ok=True)
    settings = work / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\nignore_missing_imports = True\n")
    os.chdir(into)
    from mypyc.build import mypycify
    from setuptools import setup

    jobs = str(os.cpu_count() or 1)
    level = os.environ.get("MYPYC_OPT_LEVEL", "2")
    # without mypy's cache: with it only what changed is generated, and mypyc trips over the rest
    options = [f"--config-file={settings}", "--cache-dir=/dev/null"]
    extensions = mypycify([*options, *modules()], opt_level=level, debug_level="0", separate=True, target_dir=str(work))
    argv = ["--quiet", "build_ext", "--inplace", "--build-temp", str(work), "--build-lib", str(work), "-j", jobs]
    setup(name="forebay-compiled", packages=[], ext_modules=extensions, script_args=argv)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python deploy/compile.py DIR")
    compile_into(Path(__file__).resolve().parent.parent, Path(sys.argv[1]))
