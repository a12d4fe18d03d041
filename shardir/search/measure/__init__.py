"""Plans written into copies of a function, lowered, and priced."""
