"""The typer application: it runs a command and turns its errors into Problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from .. import __version__
from .bench import bench
from .demo import demo
from .doctor import doctor
from .finetune import finetune
from .fit import fit
from .frontier import frontier
from .problems import Problem
from .profile import profile

try:
    from typer import _click as click  # newer versions of typer include their own click
except ImportError:
    import click  # type: ignore[no-redef]

app = typer.Typer(
    name="backsketch",
    help="Train neural networks without keeping every activation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # it joins the lines of a paragraph, so that help fits every width
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(profile)
app.command()(fit)
app.command()(finetune)
app.command()(bench)
app.command()(frontier)
app.command()(doctor)


def run(arguments: Sequence[str]) -> int:
    """Run a command; a wrong argument becomes a Problem."""
    try:
        code: Any = app(list(arguments), prog_name="backsketch", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as help_text:
        print(help_text.format_message())
        return 2
    except click.exceptions.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "backsketch"
        raise Problem(f"{error.format_message()} ({command} --help tells more)") from error
    except click.exceptions.ClickException as error:
        raise Problem(error.format_message(), code=error.exit_code) from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    return code if isinstance(code, int) else 0


def _version(wanted: bool) -> None:
    if wanted:
        print(f"backsketch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Train neural networks without keeping every activation."""
