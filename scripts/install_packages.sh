#!/usr/bin/env bash
# Installs the Debian packages that are missing from this machine, by name, and says which.
set -euo pipefail
cd "$(dirname "$0")"

if ! command -v dpkg-query > /dev/null; then
  echo "This is no Debian system: install these yourself, by the names your system gives them:" >&2
  grep -v '^#' debian-packages.txt | tr '\n' ' ' >&2
  echo >&2
  exit 0
fi

missing=()
while read -r package; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done < <(grep -v '^#' debian-packages.txt)
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
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq < /dev/null
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" < /dev/null
