"""What a step computes again or keeps in host memory, so that it keeps to a limit of bytes."""
