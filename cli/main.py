"""Entry point of the `carpus` command: finds the subcommand, imports its room, turns errors into exit codes.

Exit codes: 0 done, 1 the work failed (parity not met, inputs unreadable), 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
from collections.abc import Sequence

from carpus.runtime.errors import CarpusError
from carpus.runtime.names import unknown

__all__ = ["COMMANDS", "Command", "main"]


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand: where its configuration class lives and what it needs.

    Attributes:
        module: import path of the module that holds the class.
        name: name of a dataclass with a `run() -> int` method; its fields are the command's options.
        summary: one line for the overview.
        extra: the optional-dependency group that provides what the module imports; empty for the base install.
        resumes: whether the same command goes on where an interruption left it.
    """

    module: str
    name: str
    summary: str
    extra: str = ""
    resumes: bool = False


COMMANDS: dict[str, Command] = {
    "detect": Command("carpus.cli.detect", "Detect", "run a bundle on images, folders or videos"),
    "bench": Command("carpus.cli.bench", "Bench", "latency of preprocess, inference and postprocess, apart"),
    "verify": Command("carpus.cli.verify", "Verify", "run every backend against the bundle's stored reference"),
    "import": Command("carpus.cli.import_", "Import", "published checkpoint -> checked weights of one form", "train"),
    "export": Command("carpus.cli.export", "Export", "checkpoint -> verified bundle (ONNX, OpenVINO)", "export"),
    "evaluate": Command("carpus.cli.evaluate", "Evaluate", "COCO AP of a bundle on a dataset", "train"),
    "train": Command("carpus.cli.train", "Train", "train or fine-tune a detector on COCO data", "train", True),
    "models": Command(
        "carpus.cli.models", "Models", "families and variants: cost, published figures, licence, support", "train"
    ),
    "sim dataset": Command("carpus.cli.sim", "SimDataset", "render a labelled tabletop dataset", "sim", True),
    "sim preview": Command("carpus.cli.sim", "SimPreview", "contact sheet of rendered scenes with their boxes", "sim"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: arguments without the program name; None takes them from the process.

    Returns:
        The exit code (see the module's docstring).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        from importlib.metadata import version

        sys.stdout.write(f"carpus {version('carpus')}\n")
        return 0
    name, rest = _split(args)
    if name is None:
        sys.stderr.write(f"carpus: {_unknown(args)}\n")
        return 2
    # Other packages speak up only when something is wrong.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("carpus").setLevel(logging.INFO)
    command = COMMANDS[name]
    try:
        return _run(name, command, rest)
    except CarpusError as error:
        sys.stderr.write(f"carpus {name}: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`carpus ... | head`); nothing is wrong on this side.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"carpus {name}: cannot use {str(error.filename)!r}: {error.strerror}; name another path\n")
        return 2
    except KeyboardInterrupt:
        outcome = "finished work is kept, the same command goes on from it" if command.resumes else "run it again"
        sys.stderr.write(f"\ncarpus {name}: interrupted; {outcome}\n")
        return 130


def _run(name: str, command: Command, rest: list[str]) -> int:
    import tyro

    try:
        config_class = getattr(importlib.import_module(command.module), command.name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing == "carpus" or not command.extra:
            raise
        sys.stderr.write(
            f"carpus {name}: needs the Python package {missing!r}, which is not installed; "
            f"install it with: pip install 'carpus[{command.extra}]'\n"
        )
        return 2
    config = tyro.cli(config_class, prog=f"carpus {name}", args=rest, description=config_class.__doc__)
    return int(config.run())


def _split(args: list[str]) -> tuple[str | None, list[str]]:
    for words in (2, 1):
        name = " ".join(args[:words])
        if name in COMMANDS:
            return name, args[words:]
    return None, args


def _unknown(args: list[str]) -> str:
    group = [name for name in COMMANDS if name.startswith(args[0] + " ")]
    if group:
        return f"'{args[0]}' needs one of: {', '.join(name.split(' ', 1)[1] for name in group)}"
    return unknown("command", args[0], COMMANDS)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: carpus COMMAND [OPTIONS]   (carpus COMMAND --help lists the options)", ""]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
