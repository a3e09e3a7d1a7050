#!/usr/bin/env bash
# Makes the virtual environment in which sb3_ppo.py runs.
#
#   benchmarks/peers/sb3_setup.sh [VENV]
#
# VENV defaults to ~/.cache/seedbed/peers/sb3. PYTHON names the interpreter (default python3).
set -euo pipefail

venv="${1:-$HOME/.cache/seedbed/peers/sb3}"
"${PYTHON:-python3}" -m venv "$venv"
install() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
# "+cpu" makes pip refuse the default wheel, which brings gigabytes of CUDA libraries. It goes first, since
# Stable-Baselines3 asks for a torch of any kind.
install "torch==2.13.0+cpu" || {
  echo "sb3_setup: no CPU wheel of torch; point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at PyTorch's" >&2
  exit 1
}
install "stable-baselines3==2.9.2" "gymnasium[mujoco]==1.4.0" "mujoco==4.0.0" "numpy==2.4.6" \
  "psutil==7.2.2"
echo "ready: $venv"
