"""Pages in which a robot moves by itself: its physics and its policy run in the browser."""
