"""Ways into the compiler from programs that are not its text."""
