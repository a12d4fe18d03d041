"""The search: candidates of ops, the cost graph of a function, its minimum and its bound; and the
choice between two propagations."""
