"""The packages of the extra `seedbed[export]`."""

from __future__ import annotations

import importlib.util

from seedbed.types import SeedbedError

EXTRA = ("onnx", "onnxruntime", "safetensors")


def require_packages(*names: str) -> None:
    """Raises SeedbedError if one of these packages is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise SeedbedError(
                f"exported policies need the package {name}: pip install seedbed[export]"
            )
