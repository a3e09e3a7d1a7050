"""Names and options become one settled configuration, once (`settle.py`)."""
