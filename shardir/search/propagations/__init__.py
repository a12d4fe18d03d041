"""The choice between two propagations, or a mixture of them."""
