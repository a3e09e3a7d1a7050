#!/usr/bin/env bash
# Makes the virtual environment in which sample_factory_runs.py runs.
#
#   benchmarks/peers/sample_factory_setup.sh [VENV]
#
# VENV defaults to ~/.cache/seedbed/peers/sample-factory. Running it again on a finished environment
# changes nothing. PYTHON names the interpreter (default python3; must be 3.11, as tried with these
# pins).
set -euo pipefail

venv="${1:-$HOME/.cache/seedbed/peers/sample-factory}"
python="${PYTHON:-python3}"

# torch: "+cpu" makes pip refuse the default wheel, which brings gigabytes of CUDA libraries.
# gymnasium: Sample Factory needs an older one than 1.0. numpy: it needs an older one than 2.
# opencv: a release that accepts that numpy. ale-py: Seedbed's emulator, with the ROMs; the one that
# gymnasium's own extra would bring, 0.8, has no Pong ROM and needs a download for it.
# The remaining three carry the data between Sample Factory's processes and measure them.
pins=(
  "torch==2.13.0+cpu"
  "sample-factory==2.1.1"
  "gymnasium==0.29.1"
  "ale-py==0.12.1"
  "vizdoom==1.3.2"
  "numpy==1.26.4"
  "opencv-python==4.11.0.86"
  "faster-fifo==1.5.2"
  "signal-slot-mp==1.0.5"
  "psutil==7.2.2"
)

fail() {
  echo "sample_factory_setup: $*" >&2
  exit 1
}

# True if the environment holds exactly the pins, and Sample Factory and the emulator import.
ready() {
  [[ -x "$venv/bin/python" ]] && "$venv/bin/python" - "${pins[@]}" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

for pin in sys.argv[1:]:
    name, wanted = pin.split("==")
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "nothing"
    if found != wanted:
        sys.exit(f"{name}: wanted {wanted}, found {found}")

import ale_py.env  # noqa: F401
import ale_py.roms
import sf_examples.atari.train_atari  # noqa: F401

if not ale_py.roms.get_rom_path("pong").is_file():
    sys.exit("ale-py holds no Pong ROM")
PY
}

if ready 2>/dev/null; then
  echo "ready: $venv"
  exit 0
fi

command -v "$python" >/dev/null || fail "no interpreter '$python'; set PYTHON to a Python 3.11"
found="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
[[ "$found" == 3.11 ]] || fail "'$python' is Python $found; set PYTHON to a Python 3.11"
if [[ -e "$venv" && ! -f "$venv/pyvenv.cfg" && -n "$(ls -A "$venv" 2>/dev/null)" ]]; then
  fail "'$venv' exists and is not a virtual environment; name another folder or remove it"
fi

if ! [[ -x "$venv/bin/python" ]]; then
  "$python" -m venv "$venv" || fail "cannot make a virtual environment in '$venv'"
fi

install() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
install "${pins[0]}" || fail "pip could not install ${pins[0]} (see above); if it found none," \
  "point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at PyTorch's CPU wheels and run this again"
install "${pins[@]}" || fail "pip could not install the pins (see above); run this again"

ready || fail "the environment does not work (see above): remove '$venv' and run this again"
echo "ready: $venv"
