"""Local folders of transformers from the command line to the report, on a real farm with the real runner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.farm import FarmProcess, etfarm
from tests.support.huggingface import write_config

pytestmark = pytest.mark.slow(reason="exports, compiles and measures models of transformers")

INT8 = "xnnpack_pt2e_int8_static_per_channel"
INT4 = "xnnpack_torchao_int8da_int4w_per_tensor:group_size=32"


def test_a_decoder_with_the_operators_of_executorch_is_measured_in_8_and_4_bits(farm: FarmProcess, tmp_path: Path) -> None:
    write_config(tmp_path, "qwen3", intermediate_size=80)
    done = etfarm(
        "bench", "hf:qwen3:attention=custom,max_context_tokens=48", "--recipe", INT8, "--recipe", INT4, "--generate", "8",
        "--prompt-tokens", "12", "--depth", "0", "--repetitions", "3", "--threads", "1", "--json", "r.json",
        "--server", farm.address, cwd=tmp_path, timeout_s=840,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 of 15 layers stay in fp32" in done.stderr and "mlp.down_proj (80 inputs)" in done.stderr
    reports = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["reports"]
    for report in reports:
        (point,) = report["generation"]["points"]
        assert point["error"] is None and point["tokens_equal"] is True
        low, high = point["decode_tokens_per_s_ci95"]
        assert 0 < low <= point["decode_tokens_per_s"] <= high
        assert report["generation"]["model"]["max_context_tokens"] == 48
        names = {row["name"] for row in report["operators"]}
        assert "llama.custom_sdpa.out" in names and "llama.update_cache.out" in names, names
    warnings = [warning["message"] for warning in reports[1]["compile"]["warnings"]]
    assert any("left operators of forward in fp32" in message for message in warnings), warnings
