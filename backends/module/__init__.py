"""A program as a `torch.nn.Module` on a DeviceMesh, forward and backward."""
