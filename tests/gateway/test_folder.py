"""What a killed supervisor leaves in the temporary folder is removed by the next one; what lives is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gateway import folder
from tests.serving import wait_for

OWNER = "from gateway import folder; print(folder.make(), flush=True); input()"
PARENT = """
import os, time
from gateway import folder
made = folder.make()
child = os.fork()
if child:
    print(made, child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def process(program: str) -> tuple[subprocess.Popen[str], list[str]]:
    """With the first line it says."""
    begun = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert begun.stdout is not None
    return begun, begun.stdout.readline().split()


def test_the_folder_of_a_supervisor_that_lives_stays_and_that_of_a_killed_one_goes(there: Path) -> None:
    owner, (made,) = process(OWNER)
    with owner:
        Path(made, "core").touch()
        folder.sweep()
        assert sorted(path.name for path in Path(made).iterdir()) == ["core", "lock"]
        owner.kill()
        owner.wait()
        folder.sweep()
        assert list(there.iterdir()) == []


def test_a_child_that_finishes_its_streams_keeps_the_folder_of_its_killed_supervisor(there: Path) -> None:
    supervisor, (made, child) = process(PARENT)
    with supervisor:
        supervisor.kill()
        supervisor.wait()
        folder.sweep()
        assert Path(made).exists()
        os.kill(int(child), signal.SIGKILL)
        wait_for(lambda: folder.sweep() or not Path(made).exists(), "nobody has the lock, and it is removed")


def test_folders_of_others_are_not_looked_into(there: Path) -> None:
    """A tool of ours, or of anybody, whose folder begins with the same letters and holds no lock."""
    mine = there / "forebay-report-x"
    mine.mkdir()
    (mine / "summary.json").touch()
    folder.sweep()
    assert (mine / "summary.json").exists()
    assert oct(Path(folder.make()).stat().st_mode & 0o777) == "0o700"
