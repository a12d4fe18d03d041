"""The plan of a function: the search for it, and plans of presets."""
