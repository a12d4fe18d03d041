"""Train random modules of torch as torch does: `make modules`."""

import sys

from support.modules.search import main

if __name__ == "__main__":
    sys.exit(main())
