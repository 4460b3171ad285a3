"""Generates the graphs that XNNPACK's passes look for, `etfarm/server/compile/lower/xnnpack_patterns.json`, from ExecuTorch's."""

from __future__ import annotations

import json
import re
import sys
import warnings


def main() -> int:
    from etfarm.server.compile.lower import xnnpack_patterns

    warnings.simplefilter("ignore")
    text = json.dumps(xnnpack_patterns.export())
    # A node a line.
    xnnpack_patterns.FILE.write_text(re.sub(r'(\[\[?"(?:placeholder|call_function|output)")', r"\n\1", text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
