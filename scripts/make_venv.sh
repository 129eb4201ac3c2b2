#!/usr/bin/env bash
# make_venv.sh DIRECTORY REQUIREMENTS: a Python environment with the pinned packages of a requirements file.
set -euo pipefail
directory=$1
requirements=$2

# A python3 that comes first on PATH may have been built without ensurepip.
for python in python3 /usr/bin/python3; do
  if "$python" -c 'import ensurepip, venv' 2> /dev/null; then
    echo "Python packages of $requirements into $directory"
    "$python" -m venv --clear "$directory"
    "$directory/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements"
    exit 0
  fi
done
echo "No python3 here can make an environment: install python3-venv" >&2
exit 1
