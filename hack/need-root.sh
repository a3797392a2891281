#!/bin/bash
# Says clearly what needs root, and why.
set -euo pipefail
[ "$(id -u)" = 0 ] && exit 0
echo "$1 need root: they make mounts, loop devices and namespaces. Run make as root (sudo -E make ...)." >&2
exit 1
