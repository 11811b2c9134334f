"""The null replica and the load client, compiled when this machine has a C compiler.

Both stand on the same core, so they have to be cheap: together about 8 us a request in C. Where no compiler is found
the Python versions of the same programs run; they take the same arguments and print the same, but they are slower
than what is measured, so that the gateway waits for them: its CPU per request is then measured at partial load.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

COMPILERS = ("cc", "gcc", "clang")


def command(name: str, into: Path, console: Console) -> list[str]:
    """Argument list that starts `null_replica` or `load_client`; compiles it into the folder `into` if it can."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    if compiler is not None:
        binary = into / name
        with as_file(files("loadtests.bench") / f"{name}.c") as source:
            made = subprocess.run([compiler, "-O2", "-o", str(binary), str(source)], capture_output=True, text=True)
        if made.returncode == 0:
            return [str(binary)]
        console.print(f"[yellow]{compiler} could not compile {name}.c: {made.stderr.strip().splitlines()[-1]}")
    else:
        console.print(f"[yellow]no C compiler ({', '.join(COMPILERS)}) found for {name}")
    console.print(f"[yellow]using {name}.py instead: slower than the gateway, so expect numbers at partial load")
    return [sys.executable, "-m", f"loadtests.bench.{name}"]
