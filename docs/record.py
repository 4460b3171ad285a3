#!/usr/bin/env python
"""Record what README.md and the pages of docs/ show: outputs of commands and pictures of the HTML report.

    .venv/bin/python docs/record.py                  # everything but the slow recordings; about five minutes on an idle machine
    .venv/bin/python docs/record.py bench compare    # only these; a recording brings those that it needs along
    .venv/bin/python docs/record.py emulated         # a slow one, recorded only by name
    .venv/bin/python docs/record.py --list

The script starts a server and an agent in a temporary folder, runs the commands there, and stops both. It writes
docs/recorded/NAME.txt, docs/pictures/NAME.png, and the blocks of README.md between `<!-- recorded: NAME -->` and
`<!-- end -->`. Run it on an otherwise idle machine: on a busy one, verdicts are INVALID, and the pages would show that.
Pictures need chromium (`apt-get install chromium`), the recording `emulated` also g++-aarch64-linux-gnu and qemu-user-static.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import web_pictures

DOCS: Final = Path(__file__).resolve().parent
ROOT: Final = DOCS.parent
RECORDED: Final = DOCS / "recorded"
PICTURES: Final = DOCS / "pictures"
README: Final = ROOT / "README.md"

DEMO_FOLDER: Final = "etfarm/client/export/demo_models/"
"""Where the demos' source lines are."""
MAX_PICTURE_BYTES: Final = 200_000
START_TIMEOUT_S: Final = 300.0

FP32: Final = "xnnpack_fp32"
INT8: Final = "xnnpack_pt2e_int8_static_per_channel"
INT8_PER_TENSOR: Final = "xnnpack_pt2e_int8_static_per_tensor"


@dataclass(frozen=True)
class Recording:
    """One text to show: the commands whose output it is."""

    commands: tuple[str, ...]
    """Without `.venv/bin/`. They run in the temporary folder, in order. None of pictures of the web page alone."""
    needs: tuple[str, ...] = ()
    """Recordings whose files or jobs the commands use."""
    shows_command: bool = True
    """Whether the text has `$ command` lines."""
    exit_codes: tuple[int, ...] = (0,)
    warm_up: bool = False
    """Whether the commands run twice and the second output is kept, so that the compile cache answers."""
    pictures: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By name: an HTML report of the temporary folder, and the CSS selector of the part to show."""
    web_pictures: Mapping[str, str] = field(default_factory=dict)
    """By name: an address of the farm's web page, from the slash on."""
    columns: int | None = None
    """Width of the terminal; None for a pipe's, in which nothing is shortened."""
    slow: bool = False
    """Recorded only by name."""
    prepare: Callable[[Path], None] | None = None
    """Writes files that the commands need into the temporary folder."""
    emulate: str = ""
    """The processor of an emulated device that is there for the commands."""


def _write_samples(folder: Path) -> None:
    """Write a data set of 64 labelled samples, an .npz each."""
    import numpy as np

    generator = np.random.default_rng(0)
    samples = folder / "samples"
    samples.mkdir(exist_ok=True)
    for index in range(64):
        image = generator.random((1, 3, 32, 32), dtype=np.float32)
        arrays: dict[str, Any] = {"0": image, "label": np.int64(generator.integers(10))}  # a .pte has no names of inputs
        np.savez(samples / f"{index:02}.npz", **arrays)


def _write_llama(folder: Path) -> None:
    """Write a folder of transformers without a checkpoint: the configuration of a small Llama."""
    model = folder / "models" / "llama"
    model.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "vocab_size": 2048,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))


def _link_tests(folder: Path) -> None:
    """Make the models of the tests importable in the folder."""
    (folder / "tests").symlink_to(ROOT / "tests")


RECORDINGS: Final[dict[str, Recording]] = {
    "bench": Recording(
        (f"etfarm bench demo:resnet8 --recipe {FP32} --recipe {INT8} --json report.json --html report.html",),
        shows_command=False,
        warm_up=True,
        pictures={
            "report-overview": ("report.html", "#r0 > h2, #r0 > dl.tiles"),
            "report-cells": ("report.html", "header.page, #cells, section.beside"),
            "report-operators": ("report.html", "#r0 section.operators"),
            "report-delegates": ("report.html", "#r0 section.delegates"),
            "report-flame": ("report.html", "#r0 section.flame"),
            "report-latency": ("report.html", "#r0 section.latency"),
        },
    ),
    "by-module": Recording(("etfarm report show latest --by module --top 7",), needs=("bench",)),
    "compare": Recording(
        ("etfarm compare report.json#0 report.json#1 --gate accuracy=1dB",), needs=("bench",), exit_codes=(3,), columns=116
    ),
    "history": Recording(("etfarm history resnet8",), needs=("bench",)),
    "jobs": Recording(("etfarm jobs list",), needs=("bench",)),
    "devices": Recording(("etfarm devices list", "etfarm devices show vm")),
    "web": Recording(
        (),
        needs=("bench",),
        web_pictures={
            "web-job": "/jobs/latest", "web-report": "/jobs/latest/report", "web-submit": "/submit",
        },
    ),
    "recipes": Recording(("etfarm recipes list",)),
    "compile": Recording(("etfarm compile assistant.py:assistant --recipe mixed.toml -o assistant.pte",)),
    "numerics": Recording(
        (f"etfarm bench demo:ds_cnn --recipe {INT8} --numerics --html numerics.html",),
        pictures={"report-numerics": ("numerics.html", "#r0 section.numerics")},
    ),
    "interleave": Recording(
        (
            f"etfarm compile demo:resnet8 --recipe {INT8} -o old.pte",
            f"etfarm compile demo:resnet8 --recipe {INT8_PER_TENSOR} -o new.pte",
            "etfarm bench old.pte new.pte --interleave --threads 1",
        )
    ),
    "dataset": Recording(
        (
            "etfarm compile demo:resnet8 -o resnet8.pte",
            "etfarm run resnet8.pte --inputs samples -o outputs --metric margin.py:margin",
        ),
        prepare=_write_samples,
    ),
    "huggingface": Recording(
        ("etfarm bench hf:models/llama --recipe xnnpack_fp32 --generate 32 --prompt-tokens 16,64 --threads 1 --top 3",),
        prepare=_write_llama,
    ),
    "vision": Recording(
        (
            "etfarm bench tests.support.flow_source:model --generate 16 --prompt-tokens 12 --depth 0 --threads 1 --no-profile",
        ),
        prepare=_link_tests,
    ),
    "python": Recording(("python bench.py",)),
    # The last one: it leaves the device drained.
    "queue": Recording(
        (
            "etfarm devices drain vm --reason 'new cable'",
            "etfarm bench resnet8.pte --detach",
            "etfarm bench resnet8.pte --priority 10 --detach",
            "etfarm run resnet8.pte --max-wait 1s",
            "etfarm bench resnet8.pte --deadline 2h --detach",
            "etfarm queue",
        ),
        needs=("dataset",),
        exit_codes=(0, 1),
    ),
    "recipe-table": Recording(
        (
            "etfarm bench demo:resnet8 --threads 1 --name recipes "
            + " ".join(
                f"--recipe {name}"
                for name in (
                    "portable", FP32, "xnnpack_pt2e_int8_dynamic_per_channel", INT8, INT8_PER_TENSOR,
                    "xnnpack_torchao_int8da_int4w_per_channel", "xnnpack_torchao_int8da_int4w_per_tensor",
                )
            ),
        ),
        slow=True,
    ),
    "emulated": Recording(
        (
            f"etfarm bench demo:resnet8 --recipe {INT8} --device arch=aarch64 --numerics",
        ),
        slow=True,
        emulate="max",
    ),
}  # fmt: skip


def main() -> int:
    """Record what the command line names; exit code 1 where a command did not end as it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all but the slow ones")
    parser.add_argument("--list", action="store_true", help="list the recordings and end")
    arguments = parser.parse_args()
    if arguments.list:
        for name, recording in RECORDINGS.items():
            print(f"{name:<14} {'slow  ' if recording.slow else '      '}{' && '.join(recording.commands)}")
        return 0
    if unknown := [name for name in arguments.names if name not in RECORDINGS]:
        parser.error(f"there is no recording {unknown[0]!r}; --list shows them")
    names = arguments.names or [name for name, recording in RECORDINGS.items() if not recording.slow]
    chosen = [name for name in RECORDINGS if name in names]
    order = list(dict.fromkeys(each for name in chosen for each in (*RECORDINGS[name].needs, name)))
    with tempfile.TemporaryDirectory(prefix="etfarm-docs-") as temporary:
        folder = Path(temporary)
        for source in (*(DOCS / "examples").glob("*.*"), ROOT / "tests" / "support" / "assistant.py"):
            shutil.copy(source, folder)
        with _run_farm(folder) as environment:
            failed = [name for name in order if not _record(name, RECORDINGS[name], folder, environment)]
    if failed:
        print(f"not as expected: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


@contextmanager
def _run_farm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a server and an agent that calls its device `vm`; give the environment of commands that use them."""
    scripts = Path(sys.executable).parent
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ETFARM_")},
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "ETFARM_DATA": str(folder / "data"),
        "NO_COLOR": "1",
    }
    environment.pop("COLUMNS", None)
    address_file = folder / "address"
    server = [str(scripts / "etfarm"), "serve", "--listen", "127.0.0.1:0", "--data", str(folder / "server")]
    server += ["--address-file", str(address_file), "--exit-with-stdin"]
    with _start(server, folder / "serve.log", environment):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address_file.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{(folder / 'serve.log').read_text()[-2000:]}")
            time.sleep(0.1)
        environment["ETFARM_SERVER"] = json.loads(address_file.read_text())["address"]
        with _start([str(scripts / "etfarm"), "agent", "--name", "vm", "--exit-with-stdin"], folder / "agent.log", environment):
            _wait_for(r"^vm .* IDLE ", "devices list", folder, environment)
            _wait_for(r"^(x86_64|aarch64) ", "bundle list", folder, environment)
            yield environment


def _wait_for(pattern: str, command: str, folder: Path, environment: dict[str, str]) -> None:
    """Wait until a command of etfarm prints what a pattern matches: devices connect, and the server builds a runner first."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ran = subprocess.run(["etfarm", *command.split()], cwd=folder, env=environment, capture_output=True, text=True)
        if re.search(pattern, ran.stdout, re.MULTILINE):
            return
        time.sleep(1)
    raise SystemExit(f"`etfarm {command}` did not show {pattern!r} within {START_TIMEOUT_S:g} s")


@contextmanager
def _start(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a daemon that ends with its stdin."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _record(name: str, recording: Recording, folder: Path, environment: dict[str, str]) -> bool:
    """Write one recording and its pictures; tell whether its last command ended as expected."""
    print(f"== {name}", flush=True)
    if recording.prepare is not None:
        recording.prepare(folder)
    if recording.emulate:
        with _emulate(recording.emulate, folder, environment):
            text, code = _run(recording, folder, environment)
    else:
        if recording.warm_up:
            _run(recording, folder, environment)
        text, code = _run(recording, folder, environment)
    if code not in recording.exit_codes:
        print(f"exit code {code}:\n{text}", file=sys.stderr)
        return False
    if recording.commands:
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{name}.txt").write_text(text)
        _update_readme(name, text)
    for picture, (page, selector) in recording.pictures.items():
        _take_picture(folder / page, selector, PICTURES / f"{picture}.png")
    if recording.web_pictures:
        for taken in web_pictures.take(recording.web_pictures, PICTURES, environment):
            _shrink(taken)
    return True


@contextmanager
def _emulate(cpu: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Offer the runner bundle of aarch64 and run an agent that emulates a processor."""
    for command in ("etfarm bundle build --arch aarch64 -o aarch64.tar.xz", "etfarm bundle add aarch64.tar.xz"):
        subprocess.run(shlex.split(command), cwd=folder, env=environment, check=True)
    scripts = Path(sys.executable).parent
    agent = [str(scripts / "etfarm"), "agent", "--emulate", "aarch64", "--cpu", cpu, "--name", "emulated", "--exit-with-stdin"]
    with _start(agent, folder / "emulated.log", environment):
        _wait_for(r"^emulated .* IDLE ", "devices list", folder, environment)
        yield


def _run(recording: Recording, folder: Path, environment: dict[str, str]) -> tuple[str, int]:
    """Run the commands; return what a person would see of them in the end, and the last one's exit code.

    That is stdout, and of stderr, where progress goes as well, the errors and the files that were written.
    """
    shown: list[str] = []
    code = 0
    if recording.columns is not None:
        environment = {**environment, "COLUMNS": str(recording.columns)}
    for command in recording.commands:
        ran = subprocess.run(shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True)
        code = ran.returncode
        if recording.shows_command:
            shown.append(f"$ {command}")
        shown += [ran.stdout.rstrip(), *(line for line in ran.stderr.splitlines() if line.startswith("etfarm: "))]
        if code not in (*recording.exit_codes, 0):
            shown.append(ran.stderr)
            break
    return _clean("\n".join(part for part in shown if part), folder), code


def _clean(text: str, folder: Path) -> str:
    """Take out what only belongs to this machine: the temporary folder, the checkout, the kernel's build."""
    text = text.replace(f"{folder}/", "").replace(f"{ROOT}/client/", "").replace(f"{ROOT}/", "")
    text = re.sub(r"(Linux \d+\.\d+)[\w.+-]*", r"\1", text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


def _update_readme(name: str, text: str) -> None:
    """Replace the block of README.md that shows a recording; its lines may be a selection: `lines=1-12`."""
    pattern = re.compile(
        rf"(<!-- recorded: {re.escape(name)}(?: lines=([\d,-]+))? -->\n```text\n).*?(```\n<!-- end -->)", re.DOTALL
    )

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{select_lines(narrow(text), match[2])}{match[3]}"

    before = README.read_text()
    after = pattern.sub(block, before)
    if after != before:
        README.write_text(after)


def narrow(text: str) -> str:
    """Return a recording with `…/` for the demos' folder, little space before it, and a short name of the processor.

    Lines of README.md have 120 characters.
    """
    return re.sub(rf" *{re.escape(DEMO_FOLDER)}", "  …/", re.sub(r"\(R\)|(?<=Xeon\(R\)) Processor", "", text))


def select_lines(text: str, choice: str | None) -> str:
    """Return the lines that a choice such as `1-6,12` names, the first being 1; all without a choice.

    Where lines are left out, a line `  ...` stands.
    """
    if choice is None:
        return text
    lines = text.splitlines()
    kept: list[str] = []
    last = 0
    for part in choice.split(","):
        first, _, end = part.partition("-")
        start, stop = int(first), min(int(end or first), len(lines))
        if start > last + 1 and start <= len(lines):
            kept.append("  ...")
        kept += lines[start - 1 : stop]
        last = stop
    if last < len(lines):
        kept.append("  ...")
    return "\n".join(kept) + "\n"


def _take_picture(page_file: Path, selector: str, target: Path) -> None:
    """Take a picture of the parts of an HTML report that a selector names, from the first one's top to the last one's end.

    A picture that is too large as a file is taken again in fewer colours.
    """
    from playwright.sync_api import sync_playwright

    chromium_path = shutil.which("chromium")
    if chromium_path is None:
        raise SystemExit("pictures need chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        page = chromium.new_context(
            offline=True, viewport={"width": 1100, "height": 1000}, color_scheme="light", device_scale_factor=1.5
        ).new_page()
        page.goto(page_file.as_uri())
        page.locator("canvas").first.wait_for(state="attached")
        page.wait_for_timeout(500)
        boxes = [box for part in page.locator(selector).all() if (box := part.bounding_box()) is not None and box["height"] > 0]
        if not boxes:
            raise SystemExit(f"{page_file.name} has no {selector}")
        top, left = min(box["y"] for box in boxes), min(box["x"] for box in boxes)
        bottom, right = max(box["y"] + box["height"] for box in boxes), max(box["x"] + box["width"] for box in boxes)
        clip = {"x": left, "y": top, "width": right - left, "height": min(bottom - top, 1100)}
        target.parent.mkdir(exist_ok=True)
        page.screenshot(path=target, full_page=True, clip=clip)  # type: ignore[arg-type]  # a FloatRect is this dict
        chromium.close()
    _shrink(target)


def _shrink(picture: Path) -> None:
    """Reduce a picture's palette: a report's page has few colours."""
    from PIL import Image

    image = Image.open(picture).convert("RGB")
    for colours in (128, 64, 32):
        image.quantize(colours, dither=Image.Dither.NONE).save(picture, optimize=True)
        if picture.stat().st_size <= MAX_PICTURE_BYTES:
            return
    raise SystemExit(f"{picture} has {picture.stat().st_size} bytes; at most {MAX_PICTURE_BYTES} are allowed")


if __name__ == "__main__":
    sys.exit(main())
