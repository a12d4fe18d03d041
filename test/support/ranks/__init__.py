"""Programs that ranks run, and what they are expected to compute."""
