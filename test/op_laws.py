"""Print what covers each law of each op."""

import sys

from support.op_laws import main

if __name__ == "__main__":
    sys.exit(main())
