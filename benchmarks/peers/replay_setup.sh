#!/usr/bin/env bash
# Makes the three virtual environments in which replay_cpprb.py, replay_flashbax.py and replay_reverb.py run.
#
#   benchmarks/peers/replay_setup.sh [FOLDER]
#
# FOLDER defaults to ~/.cache/seedbed/peers. PYTHON names the interpreter (default python3; Reverb has wheels
# for 3.11 at most).
set -euo pipefail

folder="${1:-$HOME/.cache/seedbed/peers}"
install() {
  local venv="$folder/$1"
  shift
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" "psutil==7.2.2"
  echo "ready: $venv"
}
install cpprb "cpprb==11.0.0" "numpy==2.4.6"
install flashbax "flashbax==0.1.3" "jax==0.10.2" "numpy==2.4.6"
# setuptools: Reverb imports pkg_resources, which newer ones have not. numpy: TensorFlow 2.15 needs one below 2.
install reverb "dm-reverb[tensorflow]==0.14.0" "tensorflow==2.15.1" "numpy==1.26.4" "setuptools==75.8.0"
