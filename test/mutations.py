"""Compile damaged variants of the examples: `make fuzz`."""

import sys

from support.mutations import main

if __name__ == "__main__":
    sys.exit(main())
