"""The split of a step into stages, and the search for its schedule."""
