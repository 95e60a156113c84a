"""`make demo`: the whole chain on this machine, ending with demo/report.html.

Interrupt it at any time; run it again to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from report import write_report
from stages import ROOT, Layout, Stage, build_stages


def main() -> int:
    """Run what is not done yet; returns the exit code (0 done, 1 a stage failed, 130 interrupted)."""
    options = argparse.ArgumentParser(prog="make demo", description=__doc__)
    options.add_argument("--out", type=Path, default=ROOT / "demo" / "out", help="work folder")
    options.add_argument("--report", type=Path, default=ROOT / "demo" / "report.html", help="the page to write")
    options.add_argument("--images", type=int, default=160, help="pictures to fine-tune on")
    options.add_argument("--check-images", type=int, default=80, help="pictures to evaluate on")
    options.add_argument("--epochs", type=int, default=8, help="passes of the fine-tuning")
    options.add_argument("--seconds", type=float, default=20.0, help="how long the ROS 2 graph runs")
    options.add_argument("--fresh", action="store_true", help="throw earlier work away first")
    args = options.parse_args()
    layout = Layout(args.out.resolve(), args.report.resolve())
    if args.fresh and layout.out.is_dir() and any(layout.out.iterdir()) and not (layout.out / "done").is_dir():
        print(f"demo: {layout.out} holds something else than a demonstration; it is not thrown away", file=sys.stderr)
        return 2
    if min(args.images, args.check_images, args.epochs) < 1:
        print("demo: --images, --check-images and --epochs must be at least 1", file=sys.stderr)
        return 2
    if args.fresh:
        shutil.rmtree(layout.out, ignore_errors=True)
    if not layout.weights.is_file():
        print(f"demo: the shipped weights are missing: {layout.weights}; is this a whole clone?", file=sys.stderr)
        return 2
    stages = build_stages(
        layout, images=args.images, check_images=args.check_images, epochs=args.epochs, seconds=args.seconds
    )
    started = time.monotonic()
    runner = _Runner(layout)
    for number, stage in enumerate(stages, 1):
        print(f"\n[{number}/{len(stages) + 1}] {stage.title}", flush=True)
        code = runner.run(stage)
        if code:
            return code
    print(f"\n[{len(stages) + 1}/{len(stages) + 1}] write the report", flush=True)
    write_report(layout, stages, runner.seconds)
    print(f"done in {time.monotonic() - started:.0f} s: open {_short(layout.report)}")
    return 0


class _Runner:
    """Runs stages, remembers finished ones, and starts over from the first whose command, code or weights differ."""

    def __init__(self, layout: Layout) -> None:
        self.seconds: dict[str, float] = {}
        self._marks = layout.out / "done"
        self._marks.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(layout.weights.read_bytes())
        for room in ("cli", "export", "models", "ros_ws/src", "runtime", "sim"):
            for source in sorted((ROOT / room).rglob("*.py")):
                digest.update(source.read_bytes())
        self._key = digest.hexdigest()

    def run(self, stage: Stage) -> int:
        """0 when the stage is done, else the exit code for the demonstration."""
        self._key = hashlib.sha256((self._key + repr(stage.commands)).encode()).hexdigest()
        mark = self._marks / f"{stage.name}.json"
        if mark.is_file() and all(path.exists() for path in stage.outputs):
            record = json.loads(mark.read_text())
            if record["key"] == self._key:
                self.seconds[stage.name] = record["seconds"]
                print("    done before")
                return 0
        mark.unlink(missing_ok=True)
        # What an earlier version of the stage left half done is of no use to this one.
        begun = self._marks / f"{stage.name}.begun"
        if stage.scratch is not None and (not begun.is_file() or begun.read_text() != self._key):
            shutil.rmtree(stage.scratch, ignore_errors=True)
        begun.write_text(self._key)
        started = time.monotonic()
        for command in stage.commands:
            print(f"    $ {_shown(command)}", flush=True)
            code = _call(command, stage.stdout)
            if code:
                return self._failed(stage, code)
        missing = [path for path in stage.outputs if not path.exists()]
        if missing:
            print(f"demo: stage '{stage.name}' left no {missing[0]}", file=sys.stderr)
            return 1
        self.seconds[stage.name] = time.monotonic() - started
        temporary = mark.with_suffix(".tmp")
        temporary.write_text(json.dumps({"key": self._key, "seconds": self.seconds[stage.name]}))
        temporary.replace(mark)
        return 0

    @staticmethod
    def _failed(stage: Stage, code: int) -> int:
        if code in (130, -signal.SIGINT):
            print("\ndemo: interrupted; nothing is lost, `make demo` goes on from here", file=sys.stderr)
            return 130
        print(f"demo: stage '{stage.name}' failed with exit code {code}; its messages are above", file=sys.stderr)
        return 1


def _call(command: tuple[str, ...], stdout: Path | None = None) -> int:
    """Run to the end. Ctrl-C reaches the command too (same terminal): wait for it to put its work away."""
    # Threads that wait passively leave the cores to whatever else runs on this machine.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(stdout.open("w")) if stdout is not None else None
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink)
    return _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> int:
    interrupted = False

    def terminated(number: int, frame: object) -> None:
        # Unlike Ctrl-C in a terminal this may have reached us alone; the command takes it as one.
        nonlocal interrupted
        interrupted = True
        process.send_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                interrupted = True
                continue
            return 130 if interrupted else code
    finally:
        signal.signal(signal.SIGTERM, before)


def _shown(command: tuple[str, ...]) -> str:
    """The command as a person would type it."""
    words = list(command)
    if words[1:3] == ["-m", "carpus.cli.main"]:
        words = ["carpus", *words[3:]]
    return " ".join(shlex.quote(_short(Path(word)) if word.startswith("/") else word) for word in words)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(ROOT))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
