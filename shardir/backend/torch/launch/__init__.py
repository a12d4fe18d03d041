"""Programs on the ranks of this machine: runs, the comparison with one device, measurements."""
