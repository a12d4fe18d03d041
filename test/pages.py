"""Write what the commands of the pages print into the pages."""

import sys
from pathlib import Path

from support.pages import main

sys.path.append(str(Path(__file__).parents[1] / "docs"))

if __name__ == "__main__":
    sys.exit(main())
