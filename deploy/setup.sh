#!/usr/bin/env bash
# Makes the environment that the Makefile uses. Not for images: those install a wheel.
#
#   PYTHON=python3 DEVICE=auto deploy/setup.sh VENV
#
# DEVICE=cpu takes a torch without CUDA; cuda takes the `cuda` extra and its torch; auto looks for an
# NVIDIA driver. It may be run again: what is there already is kept.
set -euo pipefail

venv=${1:?usage: deploy/setup.sh VENV}
python=${PYTHON:-python3}
device=${DEVICE:-auto}
root=$(cd "$(dirname "$0")/.." && pwd)
constraints=$root/deploy/constraints.txt
torch=$(sed -n 's/^torch==//p' "$constraints")

say() { printf '%s\n' "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

# pip, with the name of each package instead of its own hundreds of lines; all it says is in $log.
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" 2>&1 | tee -a "$log" |
        awk '/^Collecting / { sub(/[^A-Za-z0-9_.-].*/, "", $2); printf "%s%s", n++ % 8 ? " " : "\n    ", $2 }
             /^Installing collected/ && n { printf "\n    … installing %d packages", n }
             { fflush() } END { if (n) print "" }' >&2
}

# Linux wheels of torch without CUDA carry +cpu. Where pip's own index has none, uv knows where
# PyTorch keeps them. A plain version is taken only if nothing of NVIDIA comes with it.
install_cpu_torch() {
    "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' 2>/dev/null &&
        return
    if [ "$(uname -s)" = Linux ]; then
        pip install -c "$constraints" "torch==$torch+cpu" && return
        pip install uv && UV_HTTP_TIMEOUT=60 "$venv/bin/uv" pip install --quiet \
            --python "$venv/bin/python" --torch-backend cpu -c "$constraints" "torch==$torch" \
            >>"$log" 2>&1 && return
    fi
    "$venv/bin/python" -m pip install --quiet --dry-run --report "$venv/plan.json" "torch==$torch" \
        >>"$log" 2>&1 || return
    ! grep -qi '"name": "nvidia' "$venv/plan.json" && pip install -c "$constraints" "torch==$torch"
}

command -v "$python" >/dev/null || fail "'$python' is not found; set PYTHON to a Python 3.11 or newer"
version=$("$python" -c 'import platform; print(platform.python_version())')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "'$python' is Python $version; Paceline needs 3.11 or newer: make … PYTHON=python3.12"

if [ "$device" = auto ]; then
    device=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; fi
fi

if [ ! -x "$venv/bin/python" ]; then
    say "1/3  Python $version, new environment in $venv"
    "$python" -m venv "$venv" || {
        rm -rf "$venv"
        fail "'$python -m venv' failed; on Debian and Ubuntu install python3-venv"
    }
else
    say "1/3  environment in $venv"
fi
log=$venv/setup.log
: >"$log"

if [ "$device" = cuda ]; then
    say "2/3  torch comes with the cuda extra"
    # sglang-kernel is built against one torch: let it choose, and pin the rest.
    grep -v -e '^torch==' -e '^triton==' "$constraints" >"$venv/constraints.txt"
    constraints=$venv/constraints.txt
    extras=dev,cuda
else
    say "2/3  torch $torch for the CPU"
    install_cpu_torch || fail "torch $torch without CUDA could not be installed; see $log, or
  install it into $venv yourself and run this again"
    extras=dev
fi

say "3/3  Paceline and its dependencies, as pinned in deploy/constraints.txt"
pip install -c "$constraints" "setuptools>=77" || fail "setuptools could not be installed; see $log"
pip install -c "$constraints" --no-build-isolation -e "$root[$extras]" ||
    fail "the dependencies could not be installed; the end of $log says:
$(tail -n 5 "$log")"
say "done"
