"""`python -m closeranks` is the same as the command `closeranks`."""

import sys

from closeranks.cli import main

if __name__ == "__main__":
    sys.exit(main())
