"""The `forebay` command: one table of commands, each imported only when it is asked for.

A gateway host needs none of numpy, scipy or matplotlib, so `forebay serve` must start without the
`loadtests` extra, and quickly. Rule: the first argument names the one module to import; help and
mistyped names import them all. Exit status: 0 success, 1 a run is INVALID or a check failed, 2 bad usage.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

# name -> (module, panel of the help page). The command is the function of that name in the module
# (dashes as underscores), or the command of that name in the module's own Typer `app`.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("gateway.cli", "Gateway"),
    "check": ("gateway.cli", "Gateway"),
    "prefixes": ("gateway.prefix_table", "Gateway"),
    "experiment": ("gateway.experiment_cli", "Gateway"),
    "demo": ("loadtests.demo", "Start here"),
    "replica": ("loadtests.replica", "Simulated replicas"),
    "calibrate": ("loadtests.calibrate", "Simulated replicas"),
    "validate": ("loadtests.validate", "Simulated replicas"),
    "simulate": ("loadtests.simulate", "Evidence"),
    "replay": ("loadtests.replay", "Evidence"),
    "compare": ("loadtests.compare", "Evidence"),
    "boundary": ("loadtests.boundary", "Evidence"),
    "report": ("loadtests.report", "Evidence"),
    "diagnose": ("loadtests.diagnose", "Evidence"),
}
OURS = ("gateway", "policies", "loadtests")
UNAVAILABLE = "unavailable"
# a command that cannot be imported says so whatever it is asked, for help too
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def command_function(name: str) -> Callable[..., Any]:
    """The function behind a command, or one that names the package that is missing for it."""
    module_name, _ = COMMANDS[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OURS:
            raise
        return _missing(name, error.name)
    own = getattr(module, "app", None)
    if isinstance(own, typer.Typer):
        for info in own.registered_commands:
            if info.callback and (info.name or info.callback.__name__.replace("_", "-")) == name:
                return info.callback
    function: Callable[..., Any] = getattr(module, name.replace("-", "_"))
    return function


def _missing(name: str, package: str) -> Callable[..., Any]:
    needs = f"needs the package {package}: pip install 'forebay[loadtests]'"

    def unavailable() -> None:
        typer.echo(f"forebay {name} {needs}", err=True)
        raise typer.Exit(2)

    unavailable.__doc__ = escape(f"({needs})")  # [loadtests] is no markup
    unavailable.__dict__[UNAVAILABLE] = True
    return unavailable


def _tell_version(wanted: bool) -> None:
    if wanted:
        from gateway.version import built, own_version

        typer.echo(f"forebay {own_version()} ({built()})")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Which version runs, and whether it is compiled."
        ),
    ] = False,
) -> None:
    """Options of no command."""


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application with the one command that `arguments` start with, or with all of them."""
    wanted = [arguments[0]] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    app = typer.Typer(
        name="forebay",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_show_locals=False,  # locals may hold keys and prompts
        help="A routing gateway in front of vLLM replicas, and the load tests that judge it. Start: forebay demo.",
    )
    app.callback(help=app.info.help)(_root)  # also keeps the name of a single command on the line
    for name in wanted:
        found = command_function(name)
        if isinstance(found, typer.Typer):  # a command of commands
            app.add_typer(found, name=name, rich_help_panel=COMMANDS[name][1])
        elif UNAVAILABLE in found.__dict__:
            app.command(name, rich_help_panel=COMMANDS[name][1], context_settings=ANY_ARGUMENTS)(found)
        else:
            app.command(name, rich_help_panel=COMMANDS[name][1])(found)
    return app


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        try:
            _tell_version(True)  # without importing every command
        except typer.Exit:
            return
    try:
        build(sys.argv[1:])(prog_name="forebay")
    except KeyboardInterrupt:  # while a command was still being imported
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
