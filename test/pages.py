"""Write what the commands of the pages print into the pages."""

import sys

from support.pages import main

if __name__ == "__main__":
    sys.exit(main())
