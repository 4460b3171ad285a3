"""Recipes as text, TOML and JSON: `etfarm.wire.recipes`."""

from __future__ import annotations

from etfarm.wire import recipes
from etfarm.wire.errors import UserError

TOKENS = (
    b"recipe = ",
    b"combine = [",
    b"[methods.forward]",
    b"[executorch]",
    b"[[partitioners]]",
    b"[[quantizers]]",
    b'"xnnpack_fp32"',
    b'"recipe":',
    b'"arguments":{',
    b'"options":{',
    b"\n",
    b"+",
    b":",
    b"=",
    b"inf",
    b"nan",
    b"1979-05-27T07:32:00Z",
    b"a.b.c = 1\n",
)


def seeds() -> list[bytes]:
    """Return recipes in each of the three forms, the form's letter first."""
    return [
        b"nxnnpack_fp32",
        b"nxnnpack_pt2e_int8_static_per_channel+portable",
        b"nxnnpack_torchao_int8_dynamic:group_size=32",
        b'trecipe = "xnnpack_fp32"\nstages = ["TORCH_EXPORT"]\n[executorch]\nmemory_planning = "greedy"\n',
        b'tcombine = ["portable", "xnnpack_fp32"]\n[methods.forward]\npartitioners = ["xnnpack"]\n',
        b't[[partitioners]]\nname = "xnnpack"\nper_op = true\n',
        b'j{"recipe":"xnnpack_fp32","arguments":{},"options":{"partitioners":[{"name":"xnnpack"}]}}',
        b'j{"combine":[{"recipe":"portable","arguments":{}}],"options":{}}',
    ]


def fuzz(data: bytes) -> None:
    """A recipe is refused, or is the same when it is read from its own JSON."""
    text = data[1:].decode(errors="replace")
    read = {b"t": recipes.from_toml, b"j": recipes.from_json}.get(data[:1], recipes.parse)
    try:
        recipe = read(text)
    except UserError as error:
        assert str(error)
        return
    assert recipes.from_json(recipe.json).digest == recipe.digest
