#!/usr/bin/env bash
# Makes the virtual environment in which brax_physics.py and brax_ppo.py run.
#
#   benchmarks/peers/brax_setup.sh [VENV]
#
# VENV defaults to ~/.cache/seedbed/peers/brax. PYTHON names the interpreter (default python3).
set -euo pipefail

venv="${1:-$HOME/.cache/seedbed/peers/brax}"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "brax==0.14.2" "mujoco-mjx==3.17.0" "jax==0.10.2" "mujoco==4.0.0"
echo "ready: $venv"
