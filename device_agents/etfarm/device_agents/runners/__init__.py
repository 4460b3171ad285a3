"""Runners: processes that run programs, the bundles they are started from, and the protocol they speak.

`protocol` is the interface; `native` (the C++ runner) and `python` (ExecuTorch's Python binding) start a `process`, and `remote`
sends its commands. `emulator` is the processor in software that a native runner may run on.
"""
