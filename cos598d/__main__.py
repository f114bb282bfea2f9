"""`python -m cos598d`."""

import sys

from cos598d.cli import main

if __name__ == "__main__":
    sys.exit(main())
