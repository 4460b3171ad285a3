"""Sessions: a program stays loaded on a device, and its owner calls it with tensors until the lease ends."""
