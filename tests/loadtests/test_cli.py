"""The command: one table, lazy imports, exit statuses."""

from __future__ import annotations

import subprocess
import sys

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
    done = subprocess.run([sys.executable, "-m", "loadtests.cli", "--help"], capture_output=True, text=True, timeout=60)
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
