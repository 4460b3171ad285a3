"""Answers of compiling children that are invalid or have unknown fields."""

from __future__ import annotations

import pytest

from etfarm.v1 import child_pb2, common_pb2, compile_pb2
from tests.support.compiling_children import INT8, World, compilation_bytes, error_of


@pytest.mark.parametrize(
    "orders",
    [
        "quantize say programs {}",
        'quantize say programs {"other":"forward.pt2"}',
        'quantize say programs {"forward":""}',
        'quantize say stages [{"stage":"REST","duration_ms":1,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":null,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":-1,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":NaN,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":Infinity,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":1e300,"methods":{}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":1,"methods":{"forward":NaN}}]',
        'quantize say stages [{"stage":"QUANTIZE","duration_ms":1,"methods":{"forward":-1}}]',
        'quantize say warnings [{"code":"A","message":"\\u0000"}]',
        'quantize say delegation {"forward":{"subgraphs":1,"delegated_nodes":0,"non_delegated_nodes":0,"operators":[]}}',
        f"quantize add {compilation_bytes(warnings=[{'code': 'A', 'message': 'X'}]).replace(b'X', bytes([0xFF])).hex()}",
        f"quantize add {compilation_bytes(stages=[{'stage': 'QUANTIZE', 'duration_ms': 1, 'where': 77}]).hex()}",
        f"quantize add {compilation_bytes(key='k').hex()}",
        f"quantize add {compilation_bytes(exported_programs={'forward': common_pb2.Artifact(digest='0' * 64)}).hex()}",
        "quantize answer 00",
        f"quantize answer {b'{}'.hex()}",
        "quantize flood",
        "lower say program null",
        "lower say facts null",
        'lower say program {"pte":"..","data":{}}',
        'lower say program {"pte":"' + "a" * 300 + '","data":{}}',
        'lower say program {"pte":"model.pte","data":{"weights":"/etc/passwd"}}',
        f"lower add {compilation_bytes(program=compile_pb2.Program(digest='0' * 64)).hex()}",
        f"lower add {compilation_bytes(etrecord=common_pb2.Artifact(digest='0' * 64)).hex()}",
        f"lower add {compilation_bytes(error=common_pb2.Error(reason='STAGE_FAILED')).hex()}",
        f"lower add {compilation_bytes(checks=[{'method': 'forward', 'inputs': 4}]).hex()}",
        f"lower add {compilation_bytes(delegation={chr(0): compile_pb2.Delegation()}).hex()}",
    ],
)
async def test_an_invalid_answer_is_refused_and_not_cached(world: World, orders: str) -> None:
    outcome = await world.compile(await world.model(orders, INT8))
    assert error_of(outcome).reason == "BAD_WORKER_ANSWER"
    assert len(error_of(outcome).message) < 1000
    assert not outcome.lasting
    assert not outcome.compilation.HasField("program")


async def test_unknown_fields_of_an_answer_are_dropped(world: World) -> None:
    unknown = child_pb2.CompileResult(compilation=compile_pb2.Compilation.FromString(b"\xfa\x7f\x03xyz")).SerializeToString()
    assert b"xyz" in unknown
    created = (await world.compile(await world.model(f"lower add {unknown.hex()}"))).compilation
    assert created.HasField("program") and b"xyz" not in created.SerializeToString()
