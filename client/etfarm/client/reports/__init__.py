"""The documents of the library as frozen dataclasses: reports, job results and comparisons.

Each class stands for one object of etfarm.report/1 or etfarm.comparison/1: `from_dict` parses it and `to_dict` returns
the same JSON. Importing this package imports neither grpc, numpy nor pandas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from etfarm.client.reports.change import Method, NumberChange, OperatorOutcome, Outcome
    from etfarm.client.reports.comparison import (
        AccuracyComparison,
        ComparedDevice,
        ComparedSide,
        ComparedVerdict,
        Comparison,
        DelegatedOperator,
        DelegationComparison,
        Difference,
        LatencyComparison,
        MemoryComparison,
        NodeCounts,
        OperatorChange,
        OperatorChanges,
        OperatorTime,
        OutputErrors,
        Pair,
        ReportName,
        SizeComparison,
        Unpaired,
    )
    from etfarm.client.reports.compilation import (
        Compile,
        CompileWarning,
        Delegation,
        Fp32Operator,
        Fp32Operators,
        HostCheck,
        MethodSizes,
        ModuleFootprint,
        OperatorDelegation,
        OutputCheck,
        Place,
        ProgramFile,
        ProgramSizes,
        SelectedName,
        SelectedNames,
        SelectedOperator,
        Stage,
        Toolchain,
    )
    from etfarm.client.reports.enums import (
        Actor,
        CellState,
        CheckInputs,
        Execution,
        Gate,
        JobState,
        NumericReference,
        OperatorKind,
        PositionInput,
        RepeatabilityOutcome,
        RunSpreadSource,
        StopReason,
        VerdictStatus,
    )
    from etfarm.client.reports.error_facts import ErrorFacts
    from etfarm.client.reports.gate_result import Finding, GateLimit, GateOutcome, GateResult
    from etfarm.client.reports.generation import (
        FirstDifference,
        FlowEncoder,
        Generation,
        GenerationAccuracy,
        GenerationPart,
        GenerationPoint,
        GenerationReference,
        GenerationRun,
        LanguageModel,
        ModelFlow,
        TracedEncoder,
        TracedExecution,
    )
    from etfarm.client.reports.generation_comparison import (
        GenerationComparison,
        GenerationPartComparison,
        GenerationPointComparison,
        LogitErrors,
        LogitsComparison,
        RateChange,
    )
    from etfarm.client.reports.json_object import JsonObject
    from etfarm.client.reports.latency import (
        Latency,
        Load,
        Measurement,
        Memory,
        OutputDifference,
        PairedRatio,
        Repeatability,
    )
    from etfarm.client.reports.numerics import Accuracy, NumericGap, Numerics, ValueHistogram, ValueSummary
    from etfarm.client.reports.operators import Operator, Operators, Profile
    from etfarm.client.reports.report import (
        Analysis,
        DeviceFacts,
        Inputs,
        InputTensor,
        ModelFacts,
        Phase,
        Report,
        Runner,
        SourceFile,
    )
    from etfarm.client.reports.result import JobFacts, JobResult
    from etfarm.client.reports.runs import Run, RunSpread
    from etfarm.client.reports.samples import Samples
    from etfarm.client.reports.source import SourceLine
    from etfarm.client.reports.telemetry import (
        CoolingDevice,
        CpuReading,
        DeviceSetting,
        GateWait,
        SystemReading,
        Telemetry,
        TelemetryPoint,
        ThermalZone,
    )
    from etfarm.client.reports.verdict import Verdict, VerdictReason

__all__ = [
    "Accuracy",
    "AccuracyComparison",
    "Actor",
    "Analysis",
    "CellState",
    "CheckInputs",
    "ComparedDevice",
    "ComparedSide",
    "ComparedVerdict",
    "Comparison",
    "Compile",
    "CompileWarning",
    "CoolingDevice",
    "CpuReading",
    "DelegatedOperator",
    "Delegation",
    "DelegationComparison",
    "DeviceFacts",
    "DeviceSetting",
    "Difference",
    "ErrorFacts",
    "Execution",
    "Finding",
    "FirstDifference",
    "FlowEncoder",
    "Fp32Operator",
    "Fp32Operators",
    "Gate",
    "GateLimit",
    "GateOutcome",
    "GateResult",
    "GateWait",
    "Generation",
    "GenerationAccuracy",
    "GenerationComparison",
    "GenerationPart",
    "GenerationPartComparison",
    "GenerationPoint",
    "GenerationPointComparison",
    "GenerationReference",
    "GenerationRun",
    "HostCheck",
    "InputTensor",
    "Inputs",
    "JobFacts",
    "JobResult",
    "JobState",
    "JsonObject",
    "LanguageModel",
    "Latency",
    "LatencyComparison",
    "Load",
    "LogitErrors",
    "LogitsComparison",
    "Measurement",
    "Memory",
    "MemoryComparison",
    "Method",
    "MethodSizes",
    "ModelFacts",
    "ModelFlow",
    "ModuleFootprint",
    "NodeCounts",
    "NumberChange",
    "NumericGap",
    "NumericReference",
    "Numerics",
    "Operator",
    "OperatorChange",
    "OperatorChanges",
    "OperatorDelegation",
    "OperatorKind",
    "OperatorOutcome",
    "OperatorTime",
    "Operators",
    "Outcome",
    "OutputCheck",
    "OutputDifference",
    "OutputErrors",
    "Pair",
    "PairedRatio",
    "Phase",
    "Place",
    "PositionInput",
    "Profile",
    "ProgramFile",
    "ProgramSizes",
    "RateChange",
    "Repeatability",
    "RepeatabilityOutcome",
    "Report",
    "ReportName",
    "Run",
    "RunSpread",
    "RunSpreadSource",
    "Runner",
    "Samples",
    "SelectedName",
    "SelectedNames",
    "SelectedOperator",
    "SizeComparison",
    "SourceFile",
    "SourceLine",
    "Stage",
    "StopReason",
    "SystemReading",
    "Telemetry",
    "TelemetryPoint",
    "ThermalZone",
    "Toolchain",
    "TracedEncoder",
    "TracedExecution",
    "Unpaired",
    "ValueHistogram",
    "ValueSummary",
    "Verdict",
    "VerdictReason",
    "VerdictStatus",
]

_MODULES: Final = (
    "enums", "samples", "source", "json_object", "latency", "operators", "compilation", "numerics", "telemetry", "verdict",
    "runs", "error_facts", "generation", "report", "result", "change", "gate_result", "generation_comparison", "comparison",
)  # fmt: skip
"""The modules with the classes, those that others import first."""


def __getattr__(name: str) -> object:
    """Import a class on its first use: commands that show no report need none of them."""
    if name in __all__:
        from importlib import import_module

        for module in _MODULES:
            if (value := vars(import_module(f"{__name__}.{module}")).get(name)) is not None:
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
