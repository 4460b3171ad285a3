"""What the server's own process imports: numpy and torch would take its memory and the time of its start."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_imports_neither_numpy_nor_torch() -> None:
    code = "import sys, etfarm.server.main; print([each for each in ('numpy', 'torch', 'executorch') if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
