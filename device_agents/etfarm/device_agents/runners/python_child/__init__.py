"""The child that runs programs with ExecuTorch's Python binding, behind the protocol of native/PROTOCOL.md."""
