#!/usr/bin/env bash
# Runs a command with ROS 2 and the workspace on its paths where they exist, plainly where they do not.
# usage: scripts/with_ros.sh COMMAND [ARG ...]
set -eo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [ -f "$root/ros_ws/install/local_setup.sh" ]; then
  # shellcheck disable=SC1091
  . "$root/ros_ws/install/local_setup.sh"
fi
exec "$@"
