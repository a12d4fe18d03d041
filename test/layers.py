"""Print the layers of the compiler and the imports between them."""

import sys

from support.layers import main

if __name__ == "__main__":
    sys.exit(main())
