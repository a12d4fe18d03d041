"""What turns a program in the local view into something that runs: one package for each backend."""
