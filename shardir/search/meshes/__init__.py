"""The search for a mesh."""
