"""plan.json, and the arrays that it names: read with Python alone."""
