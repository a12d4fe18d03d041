"""torch: modules by torch.export, before decomposition."""
