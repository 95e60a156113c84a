"""Time to import carpus.runtime, beside numpy and cv2 alone: fresh interpreters, taken in turns, medians.

    python benchmarks/import_time.py [RUNS]

Exits 1 when carpus.runtime takes 0.5 s more than numpy and cv2, or more.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys

STATEMENTS = {"numpy + cv2": "import numpy, cv2", "carpus.runtime": "import carpus.runtime"}
MOST_SECONDS_MORE = 0.5
CODE = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    """Seconds that a statement takes in a fresh interpreter [s], start of the interpreter not counted."""
    command = [sys.executable, "-c", CODE.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Measure and print; returns the exit code."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(runs + 1):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first fills disk caches
    print(f"Python {platform.python_version()}, {runs} runs each, medians")
    for name, value in medians.items():
        print(f"{name:<16}{value * 1e3:8.1f} ms")
    more = medians["carpus.runtime"] - medians["numpy + cv2"]
    print(f"{'difference':<16}{more * 1e3:8.1f} ms (at most {MOST_SECONDS_MORE * 1e3:.0f})")
    return 0 if more < MOST_SECONDS_MORE else 1


if __name__ == "__main__":
    sys.exit(main())
