#!/usr/bin/env bash
# Makes the virtual environment in which mjbatch_steps.py runs.
#
#   benchmarks/peers/mjbatch_setup.sh [VENV]
#
# VENV defaults to ~/.cache/seedbed/peers/mjbatch. PYTHON names the interpreter (default python3).
set -euo pipefail

venv="${1:-$HOME/.cache/seedbed/peers/mjbatch}"
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "mjbatch==0.1.4" "mujoco==3.14.0" "numpy==2.4.6"
echo "ready: $venv"
