"""What measuring generation costs: an agent's decode tokens/s over those of a bare loop and of ExecuTorch's own TextLLMRunner.

    python -m tests.bench.generation [--rounds 7] [--tokens 128] [--program LLAMA.pte --vocabulary N]

All run the same program, a small Llama of ExecuTorch's `export_llm`. Rounds are interleaved in random order. On a
busy machine only `cpu_ratios`, of the CPU time of whole repetitions, mean something:

- agent: an attempt, from the plan to the uploaded times: one pair of stamps a token;
- runner: the same command on the runner, without an agent around it;
- bare: ExecuTorch's C++ Module in a loop with one pair of stamps in all; twice in each round, which shows the noise;
- text_llm_runner: ExecuTorch's runner in Python, whose own statistics have whole milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.attempts.generation import GenerationAttempt
from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.device import inventory
from etfarm.device_agents.native import stand_ins
from etfarm.device_agents.native.toolchain import CUSTOM_OPERATORS, EXECUTORCH_LIBRARIES, Compiler, ExecutorchPackage
from etfarm.device_agents.runners.bundle import Bundle, unpack
from etfarm.device_agents.runners.generation import GenerateRequest
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.targets.local import Machine
from etfarm.v1 import agent_pb2, artifact_pb2_grpc, compile_pb2, generation_pb2, job_pb2
from etfarm.wire import digest
from etfarm.wire.channel import Access
from tests.support.attempts import Blobs
from tests.support.runner import runner_archive

SHAPE: Final = {"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 512, "hidden_dim": 688}
CONTEXT: Final = 256
PROMPT_TOKENS: Final = 16
REPETITIONS: Final = 3
_LOOP: Final = Path(__file__).with_name("generation_loop.cpp")
_TEXT_LLM_RUNNER: Final = """
import sys
import executorch.extension.llm.custom_ops.custom_ops, torch
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
from executorch.extension.pybindings import portable_lib
program, tokenizer, threads, prompt, tokens, repetitions = sys.argv[1:]
torch.set_num_threads(int(threads))
portable_lib._unsafe_reset_threadpool(int(threads))
runner = TextLLMRunner(program, tokenizer)
config = GenerationConfig(echo=False, max_new_tokens=int(tokens), temperature=0.0)
def show(stats):
    print((stats.inference_end_ms - stats.prompt_eval_end_ms) * 1_000_000 / stats.num_generated_tokens, flush=True)
for _ in range(int(repetitions)):
    runner.reset()
    runner.generate(prompt, config, None, show)
"""


def build_loop(folder: Path, bundle: Bundle) -> list[str]:
    """Compile the bare loop, and return the command that starts it with the bundle's libraries."""
    compiler = Compiler.find(bundle.manifest.arch)
    package = ExecutorchPackage.find(bundle.manifest.arch, None, folder)
    include = package.folder / "include"
    stubs = stand_ins.compile_stand_ins(compiler, package.library(CUSTOM_OPERATORS), folder / "stand_ins")
    libraries = [*map(package.library, EXECUTORCH_LIBRARIES), *stubs, package.library(CUSTOM_OPERATORS)]
    compiler.run(
        [
            "-std=c++17", "-O2", "-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_USE_THREADPOOL", "-DET_EVENT_TRACER_ENABLED",
            "-isystem", str(include), "-isystem", str(include / "executorch/runtime/core/portable_type/c10"), str(_LOOP),
            "-o", "loop", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined",
            *(word for path in libraries for word in (f"-L{path.parent}", f"-l:{path.name}")),
        ],
        "the bare loop", folder,
    )  # fmt: skip
    loader = bundle.folder / bundle.manifest.loader
    return [str(loader), "--library-path", str(bundle.folder), str(folder / "loop")]


def write_tokenizer(folder: Path) -> Path:
    """Train a tokenizer of the model's size, which takes a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=SHAPE["vocab_size"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([_LOOP.read_text()] * 20, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


class Bench:
    """The ways to generate the same number of tokens with one program; each returns ns per decoded token.

    `cpu_ns` collects the CPU time of a repetition from those that report it.
    """

    def __init__(self, folder: Path, program: Path, arguments: argparse.Namespace) -> None:
        self._folder = folder
        self._program = program
        self._tokens: int = arguments.tokens
        self._threads: int = arguments.threads
        self._vocabulary: int = arguments.vocabulary
        self._bundle = unpack(runner_archive(), folder / "bundle")
        self._loop = build_loop(folder, self._bundle)
        self._tokenizer = write_tokenizer(folder)
        self.cpu_ns: dict[str, list[float]] = {"bare": [], "runner": [], "agent": []}

    def _per_token(self, decode_ns: list[float]) -> float:
        return statistics.median(decode_ns) / (self._tokens - 1)

    def bare(self) -> float:
        """Run the bare loop."""
        numbers = [self._threads, PROMPT_TOKENS, self._tokens, REPETITIONS + 1]
        text = subprocess.run([*self._loop, self._program, *map(str, numbers)], capture_output=True, text=True, check=True).stdout
        rows = [[float(word) for word in line.split()] for line in text.splitlines()[1:]]
        self.cpu_ns["bare"].append(statistics.median(row[1] for row in rows))
        return self._per_token([row[0] for row in rows])

    def runner(self) -> float:
        """Run the runner's command."""
        return asyncio.run(self._runner())

    async def _runner(self) -> float:
        request = GenerateRequest("forward", "forward", [1] * PROMPT_TOKENS, 0, self._tokens, REPETITIONS, 1, 10**12)
        async with NativeRunner.start(self._bundle.command(), self._folder) as runner:
            await runner.threads(self._threads)
            await runner.load(self._program)
            await runner.load_method("forward")
            generated = await runner.generate(request, 600)
        assert generated.cpu_ns is not None
        self.cpu_ns["runner"].append(generated.cpu_ns / generated.repetitions)
        return self._per_token([sum(row[1:]) for row in generated.token_ns])

    def agent(self) -> float:
        """Run an agent's attempt."""
        return asyncio.run(self._agent())

    async def _agent(self) -> float:
        blobs, server = Blobs(), grpc.aio.server()
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(blobs, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        pte = blobs.put(self._program.read_bytes())
        model = generation_pb2.LanguageModel(
            prefill_method="forward", decode_method="forward", position_input=1, max_prompt_tokens=CONTEXT - 1,
            dynamic_prompt=True, max_context_tokens=CONTEXT, vocab_size=self._vocabulary,
        )  # fmt: skip
        plan = generation_pb2.GenerationPlan(
            model=model, points=[generation_pb2.GenerationPoint(prompt_tokens=PROMPT_TOKENS)], max_time_s=600,
            generated_tokens=self._tokens, repetitions=REPETITIONS, warmup=1,
        )  # fmt: skip
        candidate = agent_pb2.RunCandidate(
            cell_id="cell", program=compile_pb2.Program(pte=pte, digest=digest.of_program(pte.digest, {})), generation=plan,
            bundle=agent_pb2.RunnerBundle(artifact=blobs.put(runner_archive().read_bytes())), threads=self._threads,
        )  # fmt: skip
        start = agent_pb2.StartRun(
            attempt_id="a", candidates=[candidate], deadline_s=600, measurement=job_pb2.Measurement(no_profile=True)
        )
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            config = AgentConfig(Access(address), "bench", folder, gates=GateLimits(idle_below=1e9))
            machine = Machine(config, inventory.parse(inventory.collect()))
            attempt = GenerationAttempt(config, machine, Cache(folder / "cache", 1 << 30), folder / "run", start, lambda _: None)
            (result,) = (await attempt.run()).candidates
        await server.stop(None)
        assert not result.HasField("error"), result.error
        self.cpu_ns["agent"].append(result.telemetry.cpu_time_ns / REPETITIONS)
        times = array("q", blobs.blobs[result.generations[0].token_ns.digest])
        rows = [times[begin : begin + self._tokens] for begin in range(0, len(times), self._tokens)]
        return self._per_token([sum(row[1:]) for row in rows])

    def text_llm_runner(self) -> float:
        """Run ExecuTorch's own runner."""
        numbers = [str(self._threads), "for (int i = 0; i < 5; ++i) {", str(self._tokens), str(REPETITIONS + 1)]
        command = [sys.executable, "-c", _TEXT_LLM_RUNNER, str(self._program), str(self._tokenizer), *numbers]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self._folder).stdout.splitlines()
        return statistics.median([float(line) for line in lines if line.replace(".", "").isdigit()][1:])


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Run all ways in each round, and return the medians of their ratios to the bare loop, as tokens/s."""
    ways: dict[str, Callable[[], float]] = {
        "bare": bench.bare, "bare_again": bench.bare, "runner": bench.runner, "agent": bench.agent,
        "text_llm_runner": bench.text_llm_runner,
    }  # fmt: skip
    order = random.Random(0)
    result: list[dict[str, float]] = []
    for number in range(rounds):
        result.append({name: ways[name]() for name in order.sample(list(ways), len(ways))})
        print(f"round {number + 1}/{rounds}: {result[-1]}", file=sys.stderr)
    cpu_ns = {name: statistics.median(values) for name, values in bench.cpu_ns.items()}
    ratios = {f"{name}_over_bare": [each["bare"] / each[name] for each in result] for name in ways if name != "bare"}
    ratios["agent_over_text_llm_runner"] = [each["text_llm_runner"] / each["agent"] for each in result]
    return {
        "median_ratios": {name: statistics.median(values) for name, values in ratios.items()}, "ratios": ratios,
        "cpu_ratios": {name: cpu_ns["bare"] / each for name, each in cpu_ns.items()},
        "best_tokens_per_s": {name: 1e9 / min(each[name] for each in result) for name in ways},
    }  # fmt: skip


def main() -> int:
    """Run the bench and print its document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--program", type=Path, help="a .pte of export_llm with a context of at least 256 tokens")
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, program = Path(name), arguments.program
        if program is None:
            from tests.support.language_models import export_llama  # imports torch

            export_llama(folder, SHAPE, CONTEXT)
            program = folder / "program.pte"
        results = measure(Bench(folder, program.absolute(), arguments), arguments.rounds)
    print(
        json.dumps({"bench": "generation", **vars(arguments), "program": str(arguments.program or "llama"), **results}, indent=1)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
