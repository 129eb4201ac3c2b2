#!/usr/bin/env bash
# install_packages.sh LIST [LIST ...]: installs those Debian packages of the lists (such as debian-packages.txt) that
# this machine lacks, and prints their names, and nothing else unless it fails.
set -euo pipefail
cd "$(dirname "$0")"
lists=("${@:?the names of lists}")

if ! command -v dpkg-query > /dev/null; then
  echo "This is no Debian system: install these yourself, by the names your system gives them:" >&2
  grep -hv '^#' "${lists[@]}" | tr '\n' ' ' >&2
  echo >&2
  exit 0
fi

missing=()
while read -r package; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done < <(grep -hv '^#' "${lists[@]}")
((${#missing[@]})) || exit 0

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo > /dev/null; then
    echo "Missing Debian packages: ${missing[*]}. Install them as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "Installing missing Debian packages: ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Shows a package manager's output only if it fails.
quietly() {
  "$@" < /dev/null > "$log" 2>&1 && return
  local code=$?
  cat "$log" >&2
  echo "This failed: $*" >&2
  exit "$code"
}

quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update
quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
