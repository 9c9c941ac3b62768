"""Let `python -m rankopt` do what the `rankopt` command does."""

from __future__ import annotations

import sys

from rankopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
