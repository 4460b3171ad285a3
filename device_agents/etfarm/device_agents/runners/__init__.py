"""Runners: processes that run programs, the bundles they are started from, and their protocol.

`protocol` is the interface; `native` (the C++ runner) and `python` (ExecuTorch's Python binding) start a `process`, and `remote`
sends its commands. `emulator` provides the emulated processor that a native runner may run on.
"""
