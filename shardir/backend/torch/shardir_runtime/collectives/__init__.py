"""The mesh, and collectives on local tensors. A program calls them by runtime.py."""
