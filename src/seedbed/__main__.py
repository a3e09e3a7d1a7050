"""`python -m seedbed`."""

import sys

from seedbed.cli import main

if __name__ == "__main__":
    sys.exit(main())
