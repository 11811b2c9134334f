"""Compiles core and data path with mypyc, so that a request costs less: python deploy/compile.py [--must] DIR | --can

DIR receives copies of the three packages with the modules of `HOT` beside their sources as C extensions, which Python
imports first. `pip install DIR` installs that, `PYTHONPATH=DIR` uses it as it is, and `forebay --version` says what
runs. The sources are the same and mean the same; `make compiled` runs the tests of core and gateway against the result.
Needs mypy, setuptools (the extra `compiled`) and a C compiler with Python's headers; without, DIR holds plain Python,
one line says why, and nothing fails, unless it must (`--must`: exit status 1). `--can` only says whether it can.
`HOT` is every module on the usual way of a request; nothing waits on that, so coroutines stand beside these in modules
of their own. Of a compiled class orjson sees no fields (`gateway/dumped.py`), an `__init__` that `dataclasses` makes
stays Python (it is written out where it is hot), and a class attribute whose type is a union of several has no default
(tests/deploy/test_compile.py looks for these).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gateway", "policies", "loadtests")
PROJECT = ("pyproject.toml", "README.md", "LICENSE")
HOT = {
    "policies": (
        "admission affinity binding blind canonical classes core dispatching feedback fleet_state forebay homes "
        "index kv ledger model objectives pacing predictor prefix price prices queue request room roster seen "
        "side_by_side sight told tracked view working_set"
    ),
    "gateway": (
        "admit answer chunks coming counted course cycle distribution door driven endpoints exchange fallback fleet "
        "gathered hand_link headers health http1 hub link looks messages mirror news openai pinning placement proxy "
        "pulses recent record relay remote reply request_head response_head result retry scheduler signals sse stall "
        "tally tenants timeline upstream usage wire"
    ),
}
# makes `pip install DIR` and `pip wheel DIR` name the platform, as extensions run on no other
SETUP = """\
from pathlib import Path
from setuptools import Distribution, setup


class Built(Distribution):
    def has_ext_modules(self):
        return any(Path("policies").glob("*.so"))


setup(distclass=Built)
"""
USAGE = "usage: python deploy/compile.py [--must] DIR | --can"


def copied(into: Path) -> None:
    """The packages in `into`, without what was compiled there before."""
    into.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        shutil.rmtree(into / package, ignore_errors=True)
        shutil.copytree(ROOT / package, into / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in (*PROJECT, "setup.py"):  # of one before: compiling would read them as its own
        (into / file).unlink(missing_ok=True)


def described(into: Path) -> None:
    """What pip needs to install `into`."""
    for file in PROJECT:
        shutil.copy(ROOT / file, into / file)
    (into / "setup.py").write_text(SETUP)


def missing() -> str | None:
    """What a machine lacks to build an extension of Python: the compiler that Python was built with, or its headers."""
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if not words or not shutil.which(words[0]):
        return "no C compiler"
    return None if (Path(sysconfig.get_path("include")) / "Python.h").exists() else "no Python.h"


def compile_into(into: Path, work: Path) -> None:
    """Compiles `HOT` in place; `work` takes what falls off. Raises what mypyc or the compiler has to say against it."""
    settings = work / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\nignore_missing_imports = True\n")
    os.chdir(into)
    from mypyc.build import mypycify
    from setuptools import setup

    # without mypy's cache: with it only what changed is generated, and mypyc trips over the rest
    options = [f"--config-file={settings}", "--cache-dir=/dev/null"]
    sources = [f"{package}/{name}.py" for package, names in HOT.items() for name in names.split()]
    print(f"compiling {len(sources)} modules: two minutes to ten, by the machine", file=sys.stderr)
    extensions = mypycify(
        [*options, *sources],
        opt_level=os.environ.get("MYPYC_OPT_LEVEL", "2"),
        debug_level="0",
        separate=[(sources, "policies.hot")],  # one library: half the work of one for each, and direct calls
        multi_file=True,
        target_dir=str(work),
    )
    for extension in extensions:
        extension.include_dirs.append(str(work / "policies"))  # where the library's own header is
    argv = ["--quiet", "build_ext", "--inplace", "--build-temp", str(work), "--build-lib", str(work)]
    argv += ["-j", str(os.cpu_count() or 1)]
    setup(name="forebay-compiled", packages=[], ext_modules=extensions, script_args=argv)
    # what was built must also load: that each module finds the others is known only then
    ask = "import policies.core, policies.forebay, gateway.exchange; print(gateway.exchange.__file__)"
    told = subprocess.run([sys.executable, "-c", ask], cwd=into, capture_output=True, text=True)
    if not told.stdout.rstrip().endswith(".so"):
        raise RuntimeError(f"it does not load: {told.stderr.rstrip() or told.stdout.rstrip()}")


def compiled(into: Path) -> bool:
    """False where `into` stays plain Python, and a line on stderr says why."""
    if lacks := missing():
        print(f"{lacks}: {into} holds plain Python", file=sys.stderr)
        return False
    try:
        with tempfile.TemporaryDirectory() as work:
            compile_into(into, Path(work))
    except (Exception, SystemExit) as e:  # no mypy, a compiler that fails: whatever it is, the sources run
        for half in into.rglob("*.so"):
            half.unlink()
        print(f"not compiled ({e}): {into} holds plain Python", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1:] == ["--can"]:
        raise SystemExit(missing())
    names = [word for word in sys.argv[1:] if word != "--must"]
    if len(names) != 1 or names[0].startswith("-"):
        raise SystemExit(USAGE)
    folder = Path(names[0]).resolve()
    copied(folder)
    done = compiled(folder)
    described(folder)
    if not done and "--must" in sys.argv:
        raise SystemExit(1)
