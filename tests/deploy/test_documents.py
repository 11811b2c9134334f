"""What the documents name is there: links, headings, commands with their options, make targets, keys, admin paths.

A document is read by somebody who is paged at night; a command that has no such option by then is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gateway.config import Config
from gateway.mistakes import model_of
from loadtests import cli
from loadtests.bench.__main__ import app as bench
from tests.gateway.running import running

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("loadtests/*.md")])
COPIED = [ROOT / "Makefile", *(ROOT / "deploy" / name for name in ("Containerfile", "compose.yaml", "gateway.toml"))]
BENCH = "python -m loadtests.bench"
COMMAND = re.compile(rf"(?:^|[\s`(])(forebay|{re.escape(BENCH)})((?:[ ]+[^\s`|&;]+)*)", re.M)
ADMIN = re.compile(r"\b(GET|POST|PUT|PATCH|DELETE) (/admin(?:/[\w-]+)*)")
KEY = re.compile(r"`([a-z_]+)\.([a-z_]+)(?: = [^`]*)?`")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def headings(path: Path) -> set[str]:
    """Anchors, as the pages of the usual hosts make them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each program with the words after it; a line that ends in a backslash goes on."""
    for found in COMMAND.finditer(re.sub(r"\\\n\s*", " ", text)):
        yield found[1], [word.rstrip(".,:)") for word in found[2].split()]
    for name, words in re.findall(r'(BENCH|DEMO)_ARGS="([^"]*)"', text):
        yield (BENCH, words.split()) if name == "BENCH" else ("forebay", ["demo", *words.split()])


def unknown(program: str, words: list[str]) -> list[str]:
    """Options that the command has not; nothing where the words are prose about something else of that name."""
    if program == BENCH:
        command: Any = typer.main.get_command(bench)
    elif words and words[0] in cli.COMMANDS:
        command = typer.main.get_command(cli.build([words[0]]))
    else:
        return []
    known = {"--help"} | options(command)
    for word in words:
        if word in getattr(command, "commands", ()):
            command = command.commands[word]
            known |= options(command)
    given = (word.partition("=")[0] for word in words)
    return [option for option in given if option.startswith("--") and option not in known]


def options(command: Any) -> set[str]:
    return {option for one in command.params for option in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(path: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        if not there.exists() or (anchor and anchor not in headings(there)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("path", [*DOCUMENTS, *COPIED], ids=name_of)
def test_commands_have_the_options_they_are_shown_with(path: Path) -> None:
    shown = [(program, words, unknown(program, words)) for program, words in commands(path.read_text())]
    assert [one for one in shown if one[2]] == []


def test_the_reader_of_commands_sees_what_is_wrong() -> None:
    text = (
        "`forebay serve --replica URL --worker 2`, or\n\n    python -m loadtests.bench soak --rate 1 \\\n  --stream 3\n"
    )
    assert [unknown(*one) for one in commands(text)] == [["--worker"], ["--stream"]]
    text = "`forebay` sheds; forebay experiment stop --arm a --whom b"
    assert [unknown(*one) for one in commands(text)] == [[], ["--whom"]]
    assert [unknown(*one) for one in commands('make demo DEMO_ARGS="--quick --leave"')] == [["--leave"]]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_make_targets_are_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^ {4}|`|&& )make ([a-z-]+)", path.read_text(), re.M))
    assert named - targets == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_keys_are_those_of_the_configuration(path: Path) -> None:
    wrong = []
    for table, key in KEY.findall(path.read_text()):
        field = Config.model_fields.get(table)
        found = None if field is None else model_of(field.annotation)
        if found is not None and key not in ("py", "md") and key not in found.model_fields:
            wrong.append(f"{table}.{key}")
    assert wrong == []


async def test_paths_of_the_admin_api_are_there() -> None:
    async with running() as g:
        paths = (await g.http.get("/admin")).json()["paths"]
    there = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in paths]
    named = {found for path in DOCUMENTS for found in ADMIN.findall(path.read_text())}
    assert len(named) > 10
    wrong = [f"{verb} {path}" for verb, path in named if not any(one.fullmatch(f"{verb} {path}") for one in there)]
    assert [path for path in wrong if path not in ("GET /admin", "POST /admin")] == []
