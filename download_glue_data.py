"""Fetch GLUE and SQuAD: `python download_glue_data.py --help`. The course's name for cos598d/data/fetch/download.py."""

import sys

from cos598d.data.fetch.download import main

if __name__ == "__main__":
    sys.exit(main())
