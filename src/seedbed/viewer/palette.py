"""The colours of plots, in reports and in docs/results: those of Okabe and Ito.

People who confuse red and green can tell them apart (Wong, Nature Methods 8, 441, 2011). Yellow and black are
left out: yellow cannot be seen on white, and black is the colour of text.
"""

from __future__ import annotations

LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""For a light background, in the order in which plots take them."""
DARK = ("#4ba6e0", "#ff8b4a", "#2fc499", "#e6a3c8", "#f2bb4a", "#9bd6ff")
"""The same hues, lighter, for a dark background."""
