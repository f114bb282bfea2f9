"""Fetch GLUE, SQuAD or images: `python download_glue_data.py --help`. The code is cos598d/data/fetch.py."""

import sys

from cos598d.data.fetch import main

if __name__ == "__main__":
    sys.exit(main())
