"""What runs emitted programs on this machine and measures them."""
