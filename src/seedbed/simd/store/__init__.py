"""Machine code that is kept: in this process and on disk."""
