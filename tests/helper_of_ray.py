"""What the process with Ray says, for tests without Ray; a program. The number of hosts says how it fares."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    run, case = Path(sys.argv[1]), int(sys.argv[2])
    if case == 7:
        time.sleep(60)
    if case == 8:
        os._exit(3)
    first = {"error": "no node"} if case == 9 else {"hosts": case}
    print(json.dumps(first), flush=True)
    print(json.dumps({"say": "waiting"}), flush=True)
    word = sys.stdin.readline()
    run.write_text(f"ended by {word!r}")


if __name__ == "__main__":
    main()
