"""The live view's place in a notebook: one output of the cell, which is drawn anew."""

from __future__ import annotations

import importlib
import io
from typing import Any

from rich.console import Console, RenderableType

_FORMAT = '<pre style="line-height: 1.25; font-family: monospace">{code}</pre>'


class Output:
    """An output of the notebook's present cell, as `LiveView` draws on it. For one thread at a time.

    Needs IPython, which is there wherever a notebook's kernel is.
    """

    def __init__(self, width: int) -> None:
        """Takes the width in characters of what will be drawn. Nothing is shown before `update`."""
        self._display: Any = importlib.import_module("IPython.display")
        self._width = width
        self._handle: Any = None

    def start(self) -> None:
        """Does nothing: the output appears when there is something to draw."""

    def stop(self) -> None:
        """Does nothing: the output stays as it was drawn last."""

    def update(self, renderable: RenderableType, *, refresh: bool = True) -> None:
        """Draws, in place of what was drawn before."""
        del refresh
        console = Console(
            file=io.StringIO(),
            record=True,
            emoji=False,
            width=self._width,
            force_terminal=True,
            force_jupyter=False,
            color_system="standard",
        )
        console.print(renderable)
        page = self._display.HTML(console.export_html(inline_styles=True, code_format=_FORMAT))
        if self._handle is None:
            self._handle = self._display.display(page, display_id=True)
        else:
            self._handle.update(page)
