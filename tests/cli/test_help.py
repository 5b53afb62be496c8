"""Every command's help ends with an example, whose options exist and parse."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from attnorm.cli import app

ROOT: Any = typer.main.get_command(app)


def commands(command: Any, path: tuple[str, ...] = ("attnorm",)) -> Iterator[tuple[str, Any]]:
    """The command and all below it, by what one types."""
    yield " ".join(path), command
    for name in command.list_commands(None) if hasattr(command, "commands") else ():
        yield from commands(command.get_command(None, name), (*path, name))


ALL = dict(commands(ROOT))


def parse(words: list[str]) -> Any:
    """The context of the command that would run, without running it."""
    context, command = None, ROOT
    while True:
        context = command.make_context(words[0], words[1:], parent=context)
        if not hasattr(command, "commands"):
            return context
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        words = [command.name, *words]


def test_all_commands_are_walked() -> None:
    assert {"attnorm", "attnorm analyze", "attnorm lab", "attnorm lab train lm", "attnorm lab stability"} <= {*ALL}


@pytest.mark.parametrize("name", ALL)
def test_help_ends_with_an_example_that_parses(name: str) -> None:
    marker, _, example = (ALL[name].epilog or "").partition(": ")
    assert marker == "Example"
    assert example.startswith(f"{name} "), "an example shows the command that it explains"
    context = parse(shlex.split(example))
    assert context.command_path.startswith(name)
    if name == context.command_path:
        given = [word.partition("=")[0] for word in shlex.split(example) if word.startswith("--")]
        known = {option for parameter in context.command.params for option in parameter.opts}
        assert set(given) <= known


@pytest.mark.parametrize("name", ALL)
def test_every_option_says_what_it_does(name: str) -> None:
    for parameter in ALL[name].params:
        if parameter.name != "help":
            assert (parameter.help or "").endswith((".", ")")), parameter.name


@pytest.mark.parametrize("name", ALL)
def test_help_has_no_words_in_brackets(name: str) -> None:
    """Rich takes them for markup and prints nothing."""
    shown = [ALL[name].help, *(parameter.help for parameter in ALL[name].params if parameter.name != "help")]
    assert not [words for words in shown if words and "[" in words.replace("\\[", "")]
