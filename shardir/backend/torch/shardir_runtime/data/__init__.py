"""The rows of files that steps read."""
