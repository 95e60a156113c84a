"""Runs the commands that the documentation shows, and writes their outputs under them.

    python docs/refresh_outputs.py [--weights FILE] [PAGE.md ...]

A block after a line ``% run`` is run: of a ``console`` block every line that starts with ``$``, in order; of a
``python`` block all of it, its output goes into the ``text`` block that follows. All blocks share one folder, page
after page, with ``weights/deimv2-atto-tabletop.pt`` in it. Error output is left out. A command that fails ends the
run with its messages, and pages not finished by then stay as they were.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WEIGHTS = Path("weights") / "deimv2-atto-tabletop.pt"
PAGES = ("tour.md", "detectors.md", "import.md", "export.md")
BLOCK = re.compile(
    r"(?<=^% run\n```console\n)(?P<commands>.*?)(?=^```$)"
    r"|(?P<start>^% run\n```python\n)(?P<code>.*?)(?P<between>^```\n+```text\n).*?(?=^```$)",
    re.MULTILINE | re.DOTALL,
)


def run(command: list[str] | str, folder: Path) -> str:
    """What a command prints in a folder.

    Raises:
        SystemExit: it failed; with its messages.
    """
    environment = {**os.environ, "COLUMNS": "110", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def console_block(text: str, folder: Path) -> str:
    """A console block with fresh outputs."""
    commands = [line for line in text.splitlines() if line.startswith("$ ")]
    return "".join(f"{line}\n{run(line.removeprefix('$ '), folder)}" for line in commands)


def fresh_block(found: re.Match[str], folder: Path) -> str:
    """A block with fresh outputs."""
    if found["code"] is None:
        return console_block(found["commands"], folder)
    return found["start"] + found["code"] + found["between"] + run([sys.executable, "-c", found["code"]], folder)


def refresh(page: Path, folder: Path) -> None:
    """Run the blocks of a page, in its order, and write it anew."""
    text = page.read_text(encoding="utf-8")
    page.write_text(BLOCK.sub(lambda found: fresh_block(found, folder), text), encoding="utf-8")


def main() -> int:
    """Refresh the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, default=DOCS.parent / WEIGHTS, help="checkpoint to use")
    parser.add_argument("pages", nargs="*", default=PAGES, help="file names in docs/; the first makes what others use")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="carpus-docs-") as scratch:
        folder = Path(scratch)
        (folder / WEIGHTS).parent.mkdir()
        (folder / WEIGHTS).symlink_to(given.weights.resolve())
        for name in given.pages:
            refresh(DOCS / name, folder)
            sys.stderr.write(f"{name}: refreshed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
