"""Trial runs of finished programs on this host, and their comparison with eager PyTorch."""
