"""Entry point of `python -m fastgen`, which runs the `fastgen` command."""

import sys

from fastgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
