"""The keys that `etfarm.report/1` promises."""

from __future__ import annotations

from typing import Any

ERROR = ["fault", "reason", "message", "remedy", "stage", "metadata"]
SOURCE = ["file", "line", "code"]
ARTIFACT = ["digest", "size_bytes"]
VALUES = ["dtype", "shape", "min", "max", "mean", "stddev", "nan_count", "infinite_count"]
PLACE: dict[str, Any] = {"source": dict.fromkeys(SOURCE), **dict.fromkeys(["module", "count", "undelegated_reason"])}
READING: dict[str, Any] = {
    "cpus": [dict.fromkeys(["cpu", "frequency_hz", "limit_hz", "governor"])],
    "zones": [dict.fromkeys(["name", "temperature_c"])],
    "cooling": [dict.fromkeys(["name", "state"])],
    **dict.fromkeys(
        [
            "throttle_count", "battery_share", "charging", "load_1m", "runnable", "psi_cpu_avg10", "psi_memory_avg10",
            "psi_io_avg10", "memory_available_bytes", "cpu_busy_ns", "cpu_stolen_ns", "elapsed_ms",
            "screen_on", "thermal_status",
        ]
    ),
}  # fmt: skip
VERDICT: Any = {"status": None, "reasons": [dict.fromkeys(["code", "message", "measured", "threshold"])]}

TELEMETRY: Any = {
    **dict.fromkeys(
        [
            "cpu_time_ns",
            "wall_time_ns",
            "voluntary_switches",
            "involuntary_switches",
            "minor_faults",
            "major_faults",
            "psi_cpu_some_us",
            "affinity",
        ]
    ),
    "before": READING,
    "after": READING,
    "series": [dict.fromkeys(["elapsed_ms", "frequency_hz", "temperature_c", "load_1m", "psi_cpu", "busy_cpus"])],
    "sampler_cpu_ns": None,
    "settings": [dict.fromkeys(["name", "cpus", "found", "wanted", "applied", "why"])],
    "waits": [dict.fromkeys(["gate", "waited_ms", "passed", "measured", "threshold"])],
    "runners_cpu_ns": None,
}

# What `etfarm.report/1` promises: dicts are objects, a list is a list of such objects, None is a leaf.
KEYS: dict[str, Any] = {
    "id": None,
    "cell": None,
    "attempt": None,
    "recipe": None,
    "recipe_digest": None,
    "method": None,
    "threads": None,
    "state": None,
    "error": dict.fromkeys(ERROR),
    "model": {**dict.fromkeys(["name", "digest"]), "sources": [dict.fromkeys(["path", "sha256"])]},
    "device": dict.fromkeys(["id", "name", "arch", "soc", "os", "cores", "memory_bytes", "emulated"]),
    "runner": dict.fromkeys(["kind", "executorch", "bundle_digest", "cores"]),
    "compile": {
        "cached": None,
        "stages": [dict.fromkeys(["stage", "duration_ms", "where", "cached", "methods"])],
        "program": dict.fromkeys(ARTIFACT),
        "etrecord": dict.fromkeys(ARTIFACT),
        "delegation": {
            "METHOD": {
                "subgraphs": None,
                "delegated_nodes": None,
                "non_delegated_nodes": None,
                "operators": [{**dict.fromkeys(["op", "delegated", "non_delegated"]), "places": [PLACE]}],
            }
        },
        "toolchain": dict.fromkeys(["torch", "executorch", "torchao", "etfarm"]),
        "warnings": [dict.fromkeys(["code", "message"])],
        "sizes": {
            **dict.fromkeys(["program_bytes", "constant_bytes", "delegate_bytes"]),
            "methods": {"METHOD": dict.fromkeys(["delegate_bytes", "planned_bytes"])},
            "data_bytes": {"METHOD": None},
        },
        "checks": [
            {
                **dict.fromkeys(["method", "inputs", "shapes", "ran", "why"]),
                "outputs": [dict.fromkeys(["output", "equal", "max_abs_error", "sqnr_db", "equal_share"])],
            }
        ],
        "stayed_fp32": {"METHOD": {"operators": [{**dict.fromkeys(["op", "count"]), "places": [PLACE]}]}},
        "selected": {
            "METHOD": {
                "names": [
                    {
                        **dict.fromkeys(["argument", "name", "count", "quantized"]),
                        "operators": [{**dict.fromkeys(["op", "count", "quantized"]), "places": [PLACE]}],
                    }
                ]
            }
        },
        "data": {"METHOD": dict.fromkeys(ARTIFACT)},
        "exported_programs": {"METHOD": dict.fromkeys(ARTIFACT)},
        "stopped_after": None,
        "stage_files": {"METHOD": dict.fromkeys(ARTIFACT)},
        "modules": [dict.fromkeys(["method", "module", "constant_bytes", "planned_bytes", "planned_tensors"])],
    },
    "measurement": {
        **dict.fromkeys(["warmup", "iterations", "duration_ns", "stop_reason", "steady", "warmup_ns"]),
        "repeatability": {
            "outcome": None,
            "differences": [
                dict.fromkeys(["output", "one", "other", "differing", "elements", "max_abs_difference", "at", "rounding"])
            ],
        },
    },
    "latency": dict.fromkeys(
        [
            "samples_ns", "min_ns", "p50_ns", "p90_ns", "p99_ns", "mean_ns", "stddev_ns", "p50_ci95_ns", "p10_ns", "drift",
            "effective_samples", "slow_share", "slow_ratio",
        ]
    ),
    "load": dict.fromkeys(["load_ns", "load_method_ns", "first_run_ns"]),
    "memory": dict.fromkeys(["peak_rss_bytes", "planned_bytes"]),
    "accuracy": [
        dict.fromkeys(
            [
                "output", "dtype", "shape", "reference", "equal", "max_abs_error", "mean_abs_error", "cosine", "sqnr_db",
                "relative_error", "top1_agreement", "nan_count", "reference_nan_count", "equal_share", "samples",
                "sqnr_db_min", "sqnr_db_max", "samples_digest",
            ]
        )
    ],
    "profile": {
        **dict.fromkeys(["iterations", "p50_ns", "times_ns", "shown", "mean_ns", "mean_ci95_ns", "drift", "traced_ratio"]),
        **dict.fromkeys(["events", "event_cost_ns"]),
        "telemetry": TELEMETRY,
        "verdict": VERDICT,
        **dict.fromkeys(["slow_share", "slow_ratio"]),
    },
    "operators": [
        {
            **dict.fromkeys(
                ["index", "kind", "parent", "name", "op_types", "backend", "delegated", "p50_ns", "mean_ns", "resolution_ns"]
            ),
            **dict.fromkeys(["share", "module"]),
            "source": dict.fromkeys(SOURCE),
            **dict.fromkeys(["aligned", "instruction_id", "debug_handles", "times_ns", "p10_ns", "p90_ns"]),
            **dict.fromkeys(["start_ns", "duration_ns", "reconstructed"]),
            "sources": [dict.fromkeys(SOURCE)],
            "unaligned_reason": None,
            "mean_ci95_ns": None,
            "rounding_ns": None,
            "input_rows": None,
            "source_reason": None,
        }
    ],
    "numeric_gap": [
        {
            **dict.fromkeys(["ops", "snr_db", "mse", "l1", "max_abs_error"]),
            "source": dict.fromkeys(SOURCE),
            **dict.fromkeys(["reference", "module"]),
            "sources": [dict.fromkeys(SOURCE)],
            **dict.fromkeys(["debug_handles", "backend"]),
            "expected": dict.fromkeys(VALUES),
            "actual": dict.fromkeys(VALUES),
            "histogram": dict.fromkeys(["low", "high", "expected", "actual"]),
            "first_bad": None,
        }
    ],
    "verdict": VERDICT,
    "telemetry": TELEMETRY,
    "timeline": [dict.fromkeys(["actor", "phase", "start_ms", "duration_ms"])],
    "interleaved": dict.fromkeys(["base_cell", "ratio", "ratio_ci95", "rounds", "process_pairs", "ratios"]),
    "numerics": {
        "program": dict.fromkeys(ARTIFACT), **dict.fromkeys(["is_timed_program", "threshold_db", "first_bad", "judged"]),
        **dict.fromkeys(["timed_sqnr_db", "sqnr_db", "wrong_only_when_fused"]),
    },
    "analysis": dict.fromkeys(["version", "key", "cached", "at"]),
    "inputs": {"digest": None, "tensors": [dict.fromkeys(["name", "dtype", "shape"])], "from_job": None},
    "runs": [
        {
            **dict.fromkeys(["warmup", "iterations", "duration_ns", "stop_reason", "steady", "warmup_ns"]),
            **dict.fromkeys(["p50_ns", "p50_ci95_ns", "drift"]),
            "verdict": VERDICT,
            "load": dict.fromkeys(["load_ns", "load_method_ns", "first_run_ns"]),
            "telemetry": TELEMETRY,
            **dict.fromkeys(["slow_share", "slow_ratio"]),
        }
    ],
    "run_spread": dict.fromkeys(["source", "runs", "relative_stddev", "p50_ci95_ns"]),
}  # fmt: skip
RATES = [
    "ttft_ns", "ttft_ci95_ns", "prefill_tokens_per_s", "prefill_tokens_per_s_ci95", "decode_tokens_per_s",
    "decode_tokens_per_s_ci95",
]  # fmt: skip
KEYS["generation"] = {
    "model": {
        **dict.fromkeys(["prefill_method", "decode_method", "token_input", "position_input", "positions", "max_prompt_tokens"]),
        **dict.fromkeys(["dynamic_prompt", "max_context_tokens", "vocab_size", "kv_cache_bytes"]),
        "metadata": {"METHOD": None},
        "flow": {
            "embedding_method": None,
            "encoders": [{**dict.fromkeys(["method", "positions"]), "inputs": dict.fromkeys(ARTIFACT)}],
        },
    },
    "generated_tokens": None,
    "points": [
        {
            **dict.fromkeys(["prompt_tokens", "depth", "repetitions"]),
            "error": dict.fromkeys(ERROR),
            **dict.fromkeys([*RATES, "token_ns", "tokens_equal"]),
            "verdict": VERDICT,
            "runs": [{"repetitions": None, **dict.fromkeys(RATES), "verdict": VERDICT, "telemetry": TELEMETRY}],
            "parts": [
                dict.fromkeys(
                    [
                        "method",
                        "prefill_executions",
                        "prefill_ns",
                        "prefill_ci95_ns",
                        "prefill_share",
                        "decode_executions",
                        "decode_ns",
                        "decode_ci95_ns",
                        "decode_share",
                    ]
                )
            ],
        }
    ],
    "prefill_execution": dict.fromkeys(["tokens", "position"]),
    "decode_execution": dict.fromkeys(["tokens", "position"]),
    "prefill_profile": KEYS["profile"],
    "prefill_operators": KEYS["operators"],
    "accuracy": {
        **dict.fromkeys(["tokens", "is_text", "perplexity", "perplexity_tokens"]),
        "references": [
            {
                **dict.fromkeys(["reference", "tokens", "top1_agreement", "logits_tokens", "sqnr_db", "max_abs_error"]),
                **dict.fromkeys(["kl_divergence", "perplexity", "perplexity_ratio", "generated_tokens"]),
                "first_difference": dict.fromkeys(["index", "position", "token", "reference_token", "gap"]),
            }
        ],
        "vocabulary": None,
        "error": dict.fromkeys(ERROR),
    },
    "encoders": [{"method": None, "profile": KEYS["profile"], "operators": KEYS["operators"]}],
}
