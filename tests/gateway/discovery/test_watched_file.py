"""A file with replicas, written as people and programs write files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.discovery.report import Report, SourceError
from gateway.discovery.watched_file import WatchedFile, members
from tests.gateway.running import until

ONE = '[[replicas]]\nurl = "http://a:8000"\n'
TWO = ONE + '[[replicas]]\nurl = "http://b:8000"\nid = "bee"\nweight = 2.0\n'


@dataclass
class Watched:
    path: Path
    report: Report
    told: list[list[str]] = field(default_factory=list)

    def last(self) -> list[str] | None:
        return self.told[-1] if self.told else None


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Watched]:
    told: list[list[str]] = []
    report = Report("file", lambda listed: told.append([m.table.name for m in listed]))
    task = asyncio.create_task(WatchedFile(str(path), 0.005).run(report))
    try:
        yield Watched(path, report, told)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_file_is_read_at_once_and_again_when_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "replicas.toml"
    file.write_text(ONE)
    async with watching(file) as w:
        await until(lambda: w.last() == ["a:8000"])
        file.write_text(TWO)
        await until(lambda: w.last() == ["a:8000", "bee"])
        file.write_text("replicas = []\n")
        await until(lambda: w.last() == [])


async def test_an_atomic_rename_and_a_symlink_swap_are_seen(tmp_path: Path) -> None:
    """The second is how Kubernetes changes a mounted ConfigMap."""
    for name, text in (("one", ONE), ("two", TWO)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "replicas.toml").write_text(text)
    (tmp_path / "data").symlink_to("one")
    async with watching(tmp_path / "data" / "replicas.toml") as w:
        await until(lambda: w.last() == ["a:8000"])
        (tmp_path / "data.new").symlink_to("two")
        os.replace(tmp_path / "data.new", tmp_path / "data")
        await until(lambda: w.last() == ["a:8000", "bee"])
        (tmp_path / "next").write_text('[[replicas]]\nurl = "http://c:8000"\n')
        os.replace(tmp_path / "next", tmp_path / "two" / "replicas.toml")
        await until(lambda: w.last() == ["c:8000"])


async def test_a_file_in_the_middle_of_being_written_changes_nothing(tmp_path: Path) -> None:
    """Truncated to nothing, cut within a table, cut within a word: each stays long enough to be looked at."""
    file = tmp_path / "replicas.toml"
    file.write_text(TWO)
    async with watching(file) as w:
        await until(lambda: w.last() == ["a:8000", "bee"])
        for part, trouble in (
            ("", "is empty; `replicas = []` says that there is none"),
            (TWO[: TWO.index("http://b")], "not valid TOML"),
            (ONE + "[[replicas]]\n", "replicas[1].url: is missing; Base URL"),
            ('[[replicas]]\nurl = "http://a:8000"\nweihgt = 1.0\n', "replicas[0].weihgt: unknown key; the nearest"),
        ):
            file.write_text(part)
            await until(lambda: trouble in (w.report.trouble or ""))  # noqa: B023
        file.unlink()
        await until(lambda: "cannot be read: No such file or directory" in (w.report.trouble or ""))
        assert {tuple(names) for names in w.told} == {("a:8000", "bee")}
        file.write_text(ONE)
        await until(lambda: w.last() == ["a:8000"])
        await until(lambda: w.report.trouble is None)


async def test_a_file_that_keeps_changing_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "replicas.toml"
    file.write_text(ONE)
    source = WatchedFile(str(file), 1.0)
    look = source._look()
    file.write_text(TWO)
    assert source._read(look) is None  # it is not the file that was looked at


def test_a_private_authority_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r'replicas\[0\].ca_file = "/gone.pem": must be a readable PEM file'):
        members('[[replicas]]\nurl = "https://a"\nca_file = "/gone.pem"', tmp_path / "f.toml")


def test_one_id_for_two_replicas_is_refused() -> None:
    with pytest.raises(SourceError, match='id "x" is there twice; give one of them another id'):
        members('replicas = [{url = "http://a", id = "x"}, {url = "http://b", id = "x"}]', Path("f.toml"))


async def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would be waited for without end, and a device of zeros fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        async with watching(path) as w:
            await until(lambda: w.report.failures > 0)
            assert w.report.trouble == f"{path}: must be a file of at most 16777216 bytes"


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 5000], ids=["digits", "depth"])
def test_text_that_the_parser_gives_up_on_is_named(text: str) -> None:
    with pytest.raises(SourceError, match="not valid TOML"):
        members(text, Path("f"))


def test_a_certificate_whose_path_cannot_be_is_named() -> None:
    with pytest.raises(SourceError, match="must be a readable PEM file"):
        members('[[replicas]]\nurl = "https://a"\nca_file = "a\\u0000b"\n', Path("f"))
