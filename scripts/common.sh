# Sourced by the scripts of this folder: where things are, and how they talk.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
build=$root/build
logs=$build/logs
jobs=$(nproc)
# Read by the scripts that source this file.
# shellcheck disable=SC2034
readonly root venv build logs jobs

# What one working tree has compiled, another one need not.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# The content of files and folders, as one short word.
digest() {
  find "$@" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16
}

# run_logged NAME COMMAND...: output goes to build/logs/NAME.log, and to the terminal if it fails.
run_logged() {
  local log=$logs/$1.log
  shift
  mkdir -p "$logs"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    die "'$*' failed; its output is above and in $log"
  fi
}
