"""Buffers that methods share: one memory in the program, compared in a sequence of calls, or refused with the reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import refuses

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from etfarm.client.export import ModelSource, export_source  # noqa: E402 - needs torch
from etfarm.server.workers.pool import Workers  # noqa: E402
from etfarm.wire import recipes  # noqa: E402
from etfarm.wire.errors import EtfarmError  # noqa: E402
from tests.support.compiling import compiled  # noqa: E402
from tests.support.shared_state import Holder, counter, weights  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow(reason="each test compiles in a child")]

PLANNED = "[executorch]\nshare_mutable_buffers = {}\n"


def programs(source: ModelSource) -> dict[str, Callable[[], Any]]:
    exported = export_source(source, name="m").methods
    return {name: lambda pt2=method.pt2: torch.export.load(io.BytesIO(pt2)) for name, method in exported.items()}  # type: ignore[misc]


def called(pte: bytes, *calls: tuple[str, float]) -> list[float]:
    """Return the first element of each call's output."""
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(pte)
    methods = {name: program.load_method(name) for name in ("set", "add", "get")}
    return [float(methods[name].execute([torch.full((2,), value)])[0][0]) for name, value in calls]


@pytest.mark.parametrize("recipe", ["portable", "xnnpack_fp32"])
async def test_methods_share_a_buffer_and_keep_their_own(workers: Workers, tmp_path: Path, recipe: str) -> None:
    one = await compiled(workers, tmp_path, programs(counter()), recipe)
    assert one.codes == ["STATE_SHARED"]
    assert "state.n is shared by" in one.result["warnings"][0]["message"]
    results = called(one.pte, ("set", 5.0), ("add", 1.0), ("add", 1.0), ("get", 10.0), ("set", 1.0))
    assert results == [105.0, 106.0, 207.0, 70.0, 201.0]


class Remember(torch.nn.Module):  # type: ignore[misc]
    """Writes to a tensor that is a constant of its program."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [Holder()]

    def forward(self, x: Any) -> Any:
        self.held[0].n.add_(x)
        return self.held[0].n * 1


async def test_a_program_keeps_what_it_writes_to_a_constant(workers: Workers, tmp_path: Path) -> None:
    from executorch.runtime import Runtime

    one = await compiled(workers, tmp_path, lambda: torch.export.export(Remember().eval(), (torch.ones(2),)), "portable")
    method = Runtime.get().load_program(one.pte).load_method("forward")
    assert [float(method.execute([torch.ones(2)])[0][0]) for _ in range(2)] == [1.0, 2.0]


async def test_a_recipe_file_gives_each_method_its_own(workers: Workers, tmp_path: Path) -> None:
    recipe = recipes.from_toml(f'recipe = "portable"\n{PLANNED.format("false")}')
    one = await compiled(workers, tmp_path, programs(counter()), recipe)
    assert one.codes == []
    planned = {method: len(facts["planned_bytes"]) for method, facts in one.result["facts"]["methods"].items()}
    assert planned == {"set": 1, "add": 1, "get": 1}


@pytest.mark.parametrize(
    ("source", "recipe", "why"),
    [
        (counter(start=1.0), 'recipe = "portable"', "not zero"),
        (counter(), 'recipe = "portable"\n[executorch]\nalloc_mutable_buffers = false', "plans no memory"),
        (weights(), 'recipe = "xnnpack_fp32"', "into a delegate of weigh"),
    ],
)
async def test_what_cannot_be_shared_is_refused(
    workers: Workers, tmp_path: Path, source: ModelSource, recipe: str, why: str
) -> None:
    with pytest.raises(EtfarmError) as caught:
        await compiled(workers, tmp_path, programs(source), recipes.from_toml(recipe))
    assert caught.value.reason == "STATE_NOT_SHARED" and why in caught.value.message
    assert caught.value.metadata["buffer"] == "state.n"


class Writes(torch.nn.Module):  # type: ignore[misc]
    """Fills a memory."""

    def __init__(self, memory: Holder) -> None:
        super().__init__()
        self.memory, self.linear = memory, torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        self.memory.n.copy_(self.linear(x)[0])
        return self.linear(x)


class Reads(Writes):
    """Adds the memory to something that is quantized."""

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.memory.n


async def test_what_another_method_writes_stays_state_beside_what_is_quantized(workers: Workers, tmp_path: Path) -> None:
    memory = Holder()
    methods = {"write": Writes(memory).eval(), "read": Reads(memory).eval()}
    exported = programs(ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, (torch.randn(1, 2),))))
    static = "xnnpack_pt2e_int8_static_per_channel"
    shared = await compiled(workers, tmp_path / "shared", exported, static)
    assert "STATE_SHARED" in shared.codes
    apart = await compiled(
        workers, tmp_path / "apart", exported, recipes.from_toml(f'recipe = "{static}"\n{PLANNED.format("false")}')
    )
    assert "STATE_SHARED" not in apart.codes


class Fills(Writes):
    """Fills a memory with what it gets, and quantizes nothing."""

    def forward(self, x: Any) -> Any:
        self.memory.n.copy_(x[0])
        return x + 1


@pytest.mark.parametrize("writer", [Writes, Fills])
async def test_programs_that_were_exported_apart_share_what_has_one_name(
    workers: Workers, tmp_path: Path, writer: type[Writes]
) -> None:
    from executorch.runtime import Runtime

    torch.manual_seed(0)
    modules = {"write": writer(Holder()).eval(), "read": Reads(Holder()).eval()}
    x = torch.randn(1, 2)
    exported = {name: lambda module=module: torch.export.export(module, (x,)) for name, module in modules.items()}
    recipe = recipes.from_toml(f'recipe = "xnnpack_pt2e_int8_static_per_channel"\n{PLANNED.format("true")}')
    one = await compiled(workers, tmp_path, exported, recipe)
    assert "STATE_SHARED" in one.codes
    program = Runtime.get().load_program(one.pte)
    write, read = program.load_method("write"), program.load_method("read")
    expected = modules["read"].linear(x) + (x[0] if writer is Fills else modules["write"].linear(x)[0])
    write.execute([x])
    assert torch.allclose(read.execute([x])[0], expected, atol=0.1)


class Joins(Writes):
    """Joins the memory to something that is quantized."""

    def forward(self, x: Any) -> Any:
        return torch.cat([self.linear(x), self.memory.n[None]], -1)


async def test_what_another_method_writes_is_not_clipped_to_its_initial_value(workers: Workers, tmp_path: Path) -> None:
    memory = Holder()
    methods = {"write": Writes(memory).eval(), "read": Joins(memory).eval()}
    exported = programs(ModelSource(methods=methods, example_inputs=dict.fromkeys(methods, (torch.randn(1, 2),))))
    one = await compiled(workers, tmp_path, exported, "xnnpack_pt2e_int8_static_per_channel")
    assert one.quantized is not None
    (message,) = (w["message"] for w in one.quantized["warnings"] if w["code"] == "UNSEEN_VALUES_KEPT")
    assert "1 x cat at " in message and " Buffers that other methods write: memory.n. No calibration shows " in message
    assert "Give calibration inputs" not in message


def test_a_recipe_that_contradicts_itself_is_refused() -> None:
    with refuses("BAD_RECIPE_COMBINATION"):
        recipes.from_toml(f'recipe = "portable"\n{PLANNED.format("true")}alloc_mutable_buffers = false')
