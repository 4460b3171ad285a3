"""Generated text from the command line to the report, on a real farm with the real runner."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from etfarm.client import Farm, Generate, ModelSource, UserError
from etfarm.wire import tensors
from etfarm.wire.generation import draw_tokens
from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="a farm measures language models")


def test_a_language_model_has_rates_for_each_length_and_depth(farm: FarmProcess, tmp_path: Path) -> None:
    options = ("--generate", "8", "--prompt-tokens", "4,12", "--depth", "0,50%", "--repetitions", "3", "--repeat", "2")
    files = ("--json", "r.json", "--html", "r.html", "--threads", "1")
    done = etfarm("bench", str(program("decoder_start").path), *options, *files, "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["reports"]
    assert report["latency"] is None and report["inputs"] is None and report["method"] == "forward"
    generated = report["generation"]
    assert [(point["prompt_tokens"], point["depth"]) for point in generated["points"]] == [(4, 0), (4, 26), (12, 0), (12, 22)]
    for point in generated["points"]:
        assert point["repetitions"] == 6 and [run["repetitions"] for run in point["runs"]] == [3, 3]
        assert point["tokens_equal"] is True and point["error"] is None
        assert len(point["token_ns"]) == 8 and min(point["token_ns"]) > 0
        low, high = point["decode_tokens_per_s_ci95"]
        assert low <= point["decode_tokens_per_s"] <= high and point["verdict"]["status"] in ("VALID", "INVALID")
        # The first token comes after the prompt, so that no prompt is faster than its first token.
        assert point["prompt_tokens"] * 1e9 / point["prefill_tokens_per_s"] <= point["ttft_ns"] * 1.001
    assert generated["model"]["kv_cache_bytes"] == 4 * 64 * 32 * 4, "keys and values of two layers"
    assert (generated["prefill_execution"], generated["decode_execution"]) == (
        {"tokens": 4, "position": 0},
        {"tokens": 1, "position": 4},
    )
    assert report["operators"] and generated["prefill_operators"] and generated["prefill_profile"]["iterations"] >= 6
    assert report["memory"]["peak_rss_bytes"] and report["load"]["load_method_ns"] and report["telemetry"]["wall_time_ns"]
    assert "decode" in done.stdout and "tokens/s" in done.stdout and "<polyline" in (tmp_path / "r.html").read_text()


def test_logits_are_compared_with_the_server_and_a_text_has_a_perplexity(farm: FarmProcess, tmp_path: Path) -> None:
    from torch.export import Dim

    from tests.support import language_models

    text = draw_tokens(3, language_models.VOCABULARY, 150).tolist()
    (tmp_path / "text.txt").write_text(" ".join(map(str, text)))
    losses = []
    for begin in range(0, len(text), language_models.CONTEXT):
        window = text[begin : begin + language_models.CONTEXT]
        logits = language_models.forced_logits("start", window).astype(float)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses += [-logs[index, token] for index, token in enumerate(window[1:])]
    module, example = language_models.example("start")
    model = ModelSource(
        methods={"forward": module},
        example_inputs={"forward": example},
        dynamic_shapes={"forward": {"tokens": {1: Dim("length", max=language_models.CONTEXT - 1)}, "positions": None}},
        constant_methods={"get_max_seq_len": 64, "get_vocab_size": 96, "use_kv_cache": True},
    )
    recipes = ["portable", "xnnpack_pt2e_int8_dynamic_per_channel"]
    with Farm(farm.address) as client:
        generate = Generate(8, prompt_tokens=12, depths=0, repetitions=2, text=tmp_path / "text.txt")
        result = client.bench(model, recipes=recipes, generate=generate, threads=1).result()
        assert not [report.error for report in result.reports if report.error is not None]
        ready = str(program("decoder_start").path)
        alone = client.bench(ready, generate=Generate(8, prompt_tokens=12, depths=0), threads=1).result().report
        with pytest.raises(UserError) as refused:
            _ = client.bench(ready, generate=Generate(8, text=[1, 96])).result().report
        assert refused.value.reason == "TOKEN_OUTSIDE_VOCABULARY"
    for report in (*result.reports, alone):
        assert report.compile is not None
        assert not [warning for warning in report.compile.warnings if warning.code.startswith("ANALYSIS_")]
    exact, quantized = (report.generation.accuracy for report in result.reports if report.generation is not None)
    assert exact is not None and quantized is not None
    assert exact.tokens == 150 and exact.is_text and exact.vocabulary == 96
    assert exact.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4) and exact.perplexity_tokens == 147
    (eager,) = exact.references
    assert eager.reference == "program before quantization" and eager.tokens == 150 and eager.logits_tokens == 32
    assert eager.sqnr_db is not None and eager.sqnr_db > 80 and eager.top1_agreement == 1.0
    assert eager.perplexity_ratio == pytest.approx(1, abs=1e-5)
    assert eager.generated_tokens == 8 and eager.first_difference is None
    before, after = quantized.references
    assert (before.reference, after.reference) == ("program before quantization", "quantized program")
    assert before.sqnr_db is not None and 5 < before.sqnr_db < 60 and before.kl_divergence and before.kl_divergence > 1e-7
    assert after.sqnr_db is not None and after.sqnr_db > before.sqnr_db
    assert alone.generation is not None and alone.generation.accuracy is not None
    (host,) = alone.generation.accuracy.references
    assert host.reference == "same program on the server" and host.sqnr_db is not None and host.sqnr_db > 80
    assert alone.generation.accuracy.perplexity is None and alone.generation.accuracy.tokens == 64


def test_a_language_model_is_not_measured_on_made_up_tokens(farm: FarmProcess) -> None:
    with Farm(farm.address) as client:
        result = client.bench(str(program("decoder_start").path)).result()
        with pytest.raises(UserError) as refused:
            assert result.report
        assert refused.value.reason == "GENERATION_NOT_REQUESTED" and "--generate" in refused.value.remedy
        assert result.reports[0].attempt is None, "refused before work"
        other = client.bench(str(program("add").path), generate=8).result()
        assert other.reports[0].error is not None and other.reports[0].error.reason == "NOT_A_LANGUAGE_MODEL"
        long = client.bench(str(program("decoder_start").path), generate=Generate(8, prompt_tokens=100)).result()
        assert long.reports[0].error is not None and long.reports[0].error.reason == "CONTEXT_TOO_SHORT"


def test_an_encoder_an_embedding_and_a_decoder_are_measured_as_one(farm: FarmProcess, tmp_path: Path) -> None:
    options = ("--generate", "8", "--prompt-tokens", "12", "--depth", "0", "--repetitions", "3", "--threads", "1")
    files = ("--json", "r.json", "--html", "r.html")
    done = etfarm("bench", str(program("flow_start").path), *options, *files, "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["reports"]
    generated = report["generation"]
    assert generated["model"]["flow"] == {
        "embedding_method": "token_embedding",
        "encoders": [{"method": "vision_encoder", "positions": 16, "inputs": None}],
    }
    (point,) = generated["points"]
    assert point["tokens_equal"] is True and point["prefill_tokens_per_s"] * point["ttft_ns"] >= (12 + 16) * 1e9 * 0.999
    encoder, embedding, decoder = point["parts"]
    assert (encoder["method"], encoder["prefill_executions"], encoder["decode_ns"]) == ("vision_encoder", 1, None)
    assert (embedding["prefill_executions"], embedding["decode_executions"]) == (1, 7)
    assert (decoder["method"], decoder["prefill_executions"], decoder["decode_executions"]) == ("text_decoder", 2, 7)
    low, high = decoder["decode_ci95_ns"]
    assert low <= decoder["decode_ns"] <= high
    assert 0 < sum(part["prefill_share"] for part in point["parts"]) <= 1
    assert 0 < embedding["decode_share"] + decoder["decode_share"] <= 1
    assert generated["decode_execution"] == {"tokens": 1, "position": 28} and report["operators"]
    assert "vision_encoder (16 positions), token_embedding > text_decoder" in done.stdout
    (traced,) = generated["encoders"]
    assert (
        traced["method"] == "vision_encoder" and traced["profile"]["verdict"]["status"] and traced["profile"]["iterations"] >= 30
    )
    assert any("convolution" in row["name"] for row in traced["operators"]), "the encoder's own operators"
    assert "vision_encoder, traced" in done.stdout
    assert "What is slow in vision_encoder?" in (tmp_path / "r.html").read_text()
    assert "Which method takes how long?" in (tmp_path / "r.html").read_text()


def test_an_image_of_the_user_is_encoded(farm: FarmProcess, tmp_path: Path) -> None:
    model = program("flow_start")
    picture = tensors.to_array(model.inputs[0])  # type: ignore[arg-type]
    np.savez(tmp_path / "image.npz", **{"vision_encoder/0": picture})
    np.savez(tmp_path / "large.npz", **{"vision_encoder/0": np.concatenate([picture, picture], axis=-1)})
    np.savez(tmp_path / "other.npz", **{"text_decoder/0": picture})
    options = ("--generate", "4", "--prompt-tokens", "12", "--depth", "0", "--repetitions", "2", "--threads", "1", "--no-profile")
    command = ("bench", str(model.path), *options, "--server", farm.address)
    done = etfarm(*command, "--inputs", "image.npz", "--json", "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads((tmp_path / "r.json").read_text())["reports"]
    (encoder,) = report["generation"]["model"]["flow"]["encoders"]
    assert encoder["inputs"]["digest"] and not report["compile"]["warnings"]
    for name, message in (("large.npz", "[1, 3, 16, 32]"), ("other.npz", "'text_decoder' is none")):
        refused = etfarm(*command, "--inputs", name, cwd=tmp_path)
        assert refused.returncode == 1 and message in refused.stderr + refused.stdout, refused.stderr


def test_modules_of_a_flow_become_such_a_program(farm: FarmProcess) -> None:
    from tests.support.flow_source import model

    with Farm(farm.address) as client:
        generate = Generate(8, prompt_tokens=12, depths=0, repetitions=2)
        generated = client.bench(model(), recipe="portable", generate=generate, threads=1).result().report.generation
        assert generated is not None and generated.model is not None and generated.model.flow is not None
        assert [each.positions for each in generated.model.flow.encoders] == [16] and generated.points[0].tokens_equal
        assert [part.method for part in generated.points[0].parts] == ["vision_encoder", "token_embedding", "text_decoder"]
        # Its encoder is of another width.
        (report,) = client.bench(str(program("flow_misfit").path), generate=8).result().reports
        assert report.attempt is None and report.error is not None and report.error.reason == "NOT_A_LANGUAGE_MODEL"
        assert "float32[1, 16, 24], but 'text_decoder' takes float32[<=1, <=63, <=32]" in report.error.message
