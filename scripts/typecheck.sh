#!/usr/bin/env bash
# Type-checks the rooms under their import names: a tree of links shows mypy the layout that pyproject.toml maps.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/typing/carpus
for room in calib cli export models runtime sim; do ln -sfn "../../../$room" "build/typing/carpus/$room"; done
MYPYPATH=build/typing exec "${1:-.venv}/bin/mypy"
