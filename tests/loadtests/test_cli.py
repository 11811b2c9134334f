"""The command: one table, lazy imports, exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.version import built, own_version
from loadtests import cli


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(cli.build([name]), [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"forebay {name} " in " ".join(result.output.replace("Usage: forebay", "").split())


def test_the_help_page_lists_every_command_and_no_other() -> None:
    page = CliRunner().invoke(cli.build(["--help"]), ["--help"]).output
    names = [line.split()[1] for line in page.splitlines() if line.startswith("│ ") and line[2] != " "]
    assert sorted(name for name in names if not name.startswith("-")) == sorted(cli.COMMANDS)


def test_only_the_named_command_is_imported() -> None:
    app = cli.build(["demo"])
    assert [info.name for info in app.registered_commands] == ["demo"]


def test_an_unknown_command_is_bad_usage() -> None:
    result = CliRunner().invoke(cli.build(["sreve"]), ["sreve"])
    assert result.exit_code == 2


@pytest.mark.parametrize("arguments", [[], ["runs/chat", "--title", "x"], ["--help"]])
def test_a_missing_extra_is_named_whatever_was_asked(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    without_matplotlib(monkeypatch)
    result = CliRunner().invoke(cli.build(["report"]), ["report", *arguments])
    assert result.exit_code == 2
    assert result.stderr == "forebay report needs the package matplotlib: pip install 'forebay[loadtests]'\n"


def test_the_help_page_names_the_extra_that_a_command_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    page = " ".join(CliRunner().invoke(cli.build(["--help"]), ["--help"]).output.replace("│", " ").split())
    assert "(needs the package matplotlib: pip install 'forebay[loadtests]')" in page


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = cli.importlib.import_module

    def no_matplotlib(name: str) -> object:
        if name == "loadtests.report":
            raise ModuleNotFoundError(name="matplotlib")
        return imported(name)

    monkeypatch.setattr(cli.importlib, "import_module", no_matplotlib)


def test_our_own_broken_import_is_not_taken_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError(name="loadtests.nothing")

    monkeypatch.setitem(cli.COMMANDS, "simulate", ("loadtests.cli", "Evidence"))
    monkeypatch.setattr(cli.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        cli.command_function("simulate")


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "loadtests.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Usage: forebay" in done.stdout) == (0, True)


def test_the_version_is_told_without_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["forebay", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"forebay {own_version()} ({built()})\n"


def test_the_version_is_among_the_options_of_the_help_page() -> None:
    page = CliRunner().invoke(cli.build(["--help"]), ["--help"]).output
    assert "Which version runs, and whether" in next(line for line in page.splitlines() if "--version" in line)
    assert CliRunner().invoke(cli.build(["demo"]), ["--version"]).output == f"forebay {own_version()} ({built()})\n"


NOBODY = "http://127.0.0.1:9"
LONG = ("--workload", "unique", "--window", "1")


@pytest.mark.parametrize("command", [
    ("simulate", *LONG),
    ("replay", "--url", NOBODY, "--model", "m", *LONG),
    ("compare", "--arm", f"a={NOBODY}", "--arm", f"b={NOBODY}", "--model", "m", *LONG),
    ("boundary", "--arm", "forebay", *LONG),
], ids=lambda command: command[0])  # fmt: skip
def test_a_folder_that_cannot_be_written_is_told_before_the_run(command: tuple[str, ...], tmp_path: Path) -> None:
    there = tmp_path / "notes.txt"
    there.write_text("mine")
    told = CliRunner().invoke(cli.build([command[0]]), [*command, "--out", str(there)])
    said = f"forebay {command[0]}: --out {there}: a file is there; a folder would be right\n"
    assert (told.exit_code, told.stderr, there.read_text()) == (2, said, "mine")


@pytest.mark.parametrize("command", [("calibrate", NOBODY), ("validate", NOBODY, "--profile", "a100-8b")], ids=str)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    for out, why in (
        (tmp_path, "is a folder; the path of a file would be right"),
        (
            tmp_path / "no" / "x.json",
            f"there is no folder {tmp_path / 'no'}; make it, or name a file in one that is there",
        ),
    ):
        told = CliRunner().invoke(cli.build([command[0]]), [*command, "--out", str(out)])
        assert (told.exit_code, told.stderr) == (2, f"forebay {command[0]}: --out {out}: {why}\n")


@pytest.mark.parametrize(("command", "option"), [
    (("replay", "--url", NOBODY, "--model", "m", *LONG, "--time-scale", "0"), "--time-scale"),
    (("replay", "--url", NOBODY, "--model", "m", *LONG, "--load", "0"), "--load"),
    (("replay", "--url", NOBODY, "--model", "m", *LONG, "--patience", "-1"), "--patience"),
    (("replay", "--url", NOBODY, "--model", "m", *LONG, "--check-share", "3"), "--check-share"),
    (("replay", "--url", NOBODY, "--model", "m", *LONG, "--vocabulary", "0"), "--vocabulary"),
    (("compare", "--arm", f"a={NOBODY}", "--arm", f"b={NOBODY}", *LONG, "--load", "0"), "--load"),
    (("simulate", *LONG, "--thin", "0"), "--thin"),
], ids=lambda value: value if isinstance(value, str) else value[0])  # fmt: skip
def test_a_number_that_cannot_be_is_bad_usage_of_its_option(
    command: tuple[str, ...], option: str, tmp_path: Path
) -> None:
    told = CliRunner().invoke(cli.build([command[0]]), [*command, "--out", str(tmp_path / "out")])
    assert told.exit_code == 2
    assert f"Invalid value for '{option}'" in told.stderr
