"""The options of generated text, in the library and on the command line."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from etfarm.client import Generate
from etfarm.client.cli.generation import GenerationOptions, refuse_others
from etfarm.client.submit.bench_options import BenchOptions
from etfarm.wire.measurement import MeasurementOptions
from etfarm.wire.options import built, option, options_of
from tests.support.refusals import refuses


def test_a_number_stands_for_that_many_tokens() -> None:
    assert BenchOptions(generate=64).job_spec() == BenchOptions(generate=Generate(64)).job_spec()
    assert BenchOptions(generate=64).job_spec().measurement.generation.tokens == 64
    assert not BenchOptions().job_spec().measurement.HasField("generation")


def test_depths_are_tokens_or_shares() -> None:
    message = Generate(prompt_tokens=128, depths=(0, 0.75, "50%", "1024", 1.0)).message()
    assert list(message.prompt_tokens) == [128] and message.tokens == 128
    assert [(each.tokens, each.share) for each in message.depths] == [(0, 0), (0, 0.75), (0, 0.5), (1024, 0), (0, 1.0)]
    assert [each.WhichOneof("depth") for each in message.depths] == ["tokens", "share", "share", "tokens", "share"]
    assert Generate(depths=0.5).message() == Generate(depths=["50%"]).message()
    assert not message.HasField("repetitions") and not message.HasField("warmup"), "the server's defaults"


@pytest.mark.parametrize("depth", ["much", "1.5", "150%", 1.5, -0.5])
def test_other_depths_are_refused(depth: str | float) -> None:
    with refuses("BAD_OPTION", match="depth"):
        Generate(depths=depth)


@pytest.mark.parametrize(
    "options",
    [{"tokens": 1 << 40}, {"prompt_tokens": [1 << 31]}, {"depths": "99999999999"}, {"depths": -1}, {"repetitions": 1 << 33}],
)
def test_numbers_that_no_message_can_hold_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with refuses("BAD_OPTION", match=f"`{name}` must be a whole number"):
        Generate(**options)


def chosen(*, tokens: int | None = 128, **options: object) -> Generate | None:
    nothing = {each.name: each.default for each in options_of(GenerationOptions)}
    return built(GenerationOptions, Namespace(**nothing | {"generate": tokens} | options)).generate


def test_the_commands_options_are_those_of_the_library() -> None:
    generate = chosen(prompt_tokens="128, 512", depth="0,75%", repetitions=3, decode_method="decode")
    assert generate == Generate(128, [128, 512], ["0", "75%"], 3, decode_method="decode")
    assert chosen(tokens=None) is None


def test_options_without_generate_are_refused() -> None:
    with refuses("USAGE", match="--depth requires --generate"):
        chosen(tokens=None, depth="0")
    with refuses("USAGE", match="--prompt-tokens 'many'"):
        chosen(prompt_tokens="many")
    with refuses("USAGE", match="--prompt-tokens '999"):
        chosen(prompt_tokens="9" * 5000)
    with refuses("BAD_OPTION", match="prompt_tokens"):
        chosen(prompt_tokens="99999999999")


def refuse(*, method: Sequence[str] = (), **options: Any) -> None:
    refuse_others(MeasurementOptions(**options), {"--method": [*method]})


@pytest.mark.parametrize(
    "options",
    [{"iterations": 1}, {"warmup": 0}, {"min_time_s": 1.0}, {"interleave": True}, {"numerics": True}, {"method": ["forward"]}],
)
def test_options_of_other_measurements_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with refuses("USAGE", match=f"--{name.removesuffix('_s').replace('_', '-')} cannot be combined with --generate"):
        refuse(**options)


def test_options_of_every_measurement_are_accepted() -> None:
    refuse(cores="big", repeat=2, profile=False, trace_iterations=5, priority=1)


def test_a_new_option_is_refused_unless_it_says_otherwise() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(MeasurementOptions):
        pause_s: float | None = option("--pause", "Seconds between iterations.", read=float)
        governed: bool = option("--no-governor", "As the device is.", default=False)
        named: str = option("--named", "A name.", default="", with_generation=True)

    refuse_others(Later(named="n"), {})
    with refuses("USAGE", match="--pause cannot"):
        refuse_others(Later(pause_s=0), {})
    with refuses("USAGE", match="--no-governor cannot"):
        refuse_others(Later(governed=False), {})
