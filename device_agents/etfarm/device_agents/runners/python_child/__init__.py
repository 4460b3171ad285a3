"""The child process that runs programs with ExecuTorch's Python binding, over the protocol of native/PROTOCOL.md."""
