"""The torch backend: programs of torch.distributed, and the start of their ranks."""
