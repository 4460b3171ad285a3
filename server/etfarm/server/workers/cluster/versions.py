"""What a node must share with the server: the versions of everything that a child computes with.

`describe` and `describe_python` run on nodes whose Python may lack etfarm, so that Ray pickles this module by value, and another
Python there gets its text: standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "executorch", "torchao", "ray", "etfarm")
PYTHON_S = 15.0
"""Time within which another Python of the node describes itself."""


def describe() -> str:
    """Return this Python's versions by name, as JSON; empty for packages that are not installed."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), "architecture": platform.machine()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    return json.dumps(versions)


def describe_python(python: str, module: str) -> str:
    """Return what another Python of this machine describes, as JSON; or `{"problem": sentence}` where it cannot.

    Ray itself does not report a Python that is missing or broken: it keeps on starting it.

    Args:
        python: path of the interpreter.
        module: the text of this module.
    """
    remedy = "Create the environment at that path, or change --compile-python."
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        return json.dumps({"problem": f"It has no {python} that it can execute. {remedy}"})
    try:
        done = subprocess.run(
            [python, "-c", module], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=PYTHON_S, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"it did not end within {PYTHON_S:g} s"
    except OSError as error:
        problem = str(error)
    else:
        with contextlib.suppress(ValueError):
            if isinstance(described := json.loads(done.stdout), dict):
                return json.dumps(described)
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it printed no versions"])[-1]
        problem = f"exit code {done.returncode}, {last}"
    return json.dumps({"problem": f"Its {python} does not work as Python: {problem[:300].rstrip('.')}. {remedy}"})


def find_difference(node: Mapping[str, object], server: Mapping[str, str], python: str | None = None) -> str:
    """Return a sentence that names what a node has and what the server has; empty if they are equal.

    Args:
        python: path of the Python that was described if it is not the one that started Ray.
    """
    if problem := node.get("problem"):
        return str(problem)
    differences = [
        f"{name} {str(node.get(name) or '')[:50] or '(not installed)'}, and the server has {value or '(not installed)'}"
        for name, value in server.items()
        if str(node.get(name) or "") != value
    ]
    return f"{f'Its {python}' if python else 'It'} has {'; '.join(differences)}." if differences else ""


if __name__ == "__main__":
    print(describe())
