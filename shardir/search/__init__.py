"""Floor 3: the search for layouts: least cost over a graph of choices, and the choices of an op."""
