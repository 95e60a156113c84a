"""``python -m tests.goldens DIR [DIR...]``: exit 0 all passed, 1 a check failed or a folder cannot be used."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.goldens.case import UnusableFolder
from tests.goldens.runner import run_folder


def main(arguments: list[str] | None = None) -> int:
    """Check folders of reference data; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description="Check models against reference data.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folder with schema.json and cases")
    parser.add_argument("--failures", action="store_true", help="print failing lines only")
    options = parser.parse_args(arguments)
    # One image at a time: more threads cost more than they bring, above all on a busy machine.
    torch.set_num_threads(1)

    def write(line: str) -> None:
        if not options.failures or not line.startswith("  ok"):
            sys.stdout.write(line + "\n")

    total = failed = 0
    unusable: list[str] = []
    for folder in options.folders:
        try:
            summary = run_folder(folder, write)
        except UnusableFolder as error:
            unusable.append(str(error))
            continue
        total += summary.total
        failed += summary.failed
    for message in unusable:
        sys.stderr.write(f"cannot be checked: {message}\n")
    verdict = "unusable" if unusable else "failed" if failed else "passed"
    sys.stdout.write(
        f"goldens {verdict}: {total} checks, {failed} failed, {len(unusable)} of {len(options.folders)} "
        "folders unusable\n"
    )
    return 1 if failed or unusable else 0


if __name__ == "__main__":
    sys.exit(main())
