"""Try commands under signals, full disks and closed pipes: `make faults`."""

import sys

from support.disturbances import main

if __name__ == "__main__":
    sys.exit(main())
