"""The compiling children's tasks: from exported programs and a recipe to a .pte, with ExecuTorch's toolchain."""
