"""Compositions of ops, and the ops that compute them: terms, their matches, and the table of
rules."""
