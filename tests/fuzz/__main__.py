"""`python -m tests.fuzz NAME... --seconds N`: fuzz readers for longer than a test does, and keep inputs that fail.

With atheris the inputs are guided by coverage; without it they are mutations of seeds and corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import engine


def main() -> int:
    """Fuzz the readers; return 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all; {', '.join(engine.NAMES)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each reader; default 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where inputs that found something go; default: a temporary folder")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--guided", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep = options.keep or Path(tempfile.mkdtemp(prefix="etfarm-fuzz-"))
    keep.mkdir(parents=True, exist_ok=True)
    if options.guided:
        _guided(options.names[0], options.seconds, options.seed, keep)
    failed = [name for name in options.names or engine.NAMES if not _run(name, options, keep)]
    print(f"found something: {', '.join(failed)}; see {keep}" if failed else "nothing found")
    return 1 if failed else 0


def _run(name: str, options: argparse.Namespace, keep: Path) -> bool:
    if not options.plain and _has_atheris():
        # libFuzzer ends the process itself.
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            name,
            "--guided",
            "--seconds",
            str(options.seconds),
            "--seed",
            str(options.seed),
        ]
        return subprocess.run([*command, "--keep", str(keep)], check=False).returncode == 0
    return _plain(engine.load(name), options.seconds, options.seed, keep)


def _plain(reader: engine.Reader, seconds: float, seed: int, keep: Path) -> bool:
    until, count, result = time.monotonic() + seconds, 0, set[str]()
    for data in itertools.chain(reader.seeds, reader.corpus, reader.attacks, engine.mutated(reader, seed)):
        if time.monotonic() > until:
            break
        try:
            count += engine.replay(reader, [data])
        except AssertionError as error:
            cause = error.__cause__ or error
            where = cause.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            # One input for each place.
            place = f"{type(cause).__name__} {where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else str(cause)
            if place not in result:
                result.add(place)
                path = keep / f"{reader.name}-{hashlib.sha256(data).hexdigest()[:12]}"
                path.write_bytes(data)
                print(f"{reader.name}: {type(cause).__name__}: {str(cause)[:300]}\n  {place}\n  {path}", flush=True)
    print(f"{reader.name}: {count} inputs, {len(result)} findings", flush=True)
    return not result


def _has_atheris() -> bool:
    return subprocess.run([sys.executable, "-c", "import atheris"], check=False, capture_output=True).returncode == 0


def _guided(name: str, seconds: float, seed: int, keep: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["etfarm"], enable_loader_override=False):
        reader = engine.load(name)
    corpus = Path(tempfile.mkdtemp(prefix=f"etfarm-fuzz-{name}-"))
    for data in [*reader.seeds, *reader.corpus]:
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    words = corpus.with_suffix(".dict")
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in token) + '"\n' for token in reader.tokens if token))
    limits = [
        f"-max_total_time={int(seconds)}",
        f"-max_len={reader.most_bytes}",
        "-timeout=20",
        "-rss_limit_mb=3000",
        f"-seed={seed + 1}",
    ]
    arguments = [sys.argv[0], str(corpus), f"-artifact_prefix={keep}/{name}-", f"-dict={words}", "-print_final_stats=1", *limits]
    atheris.Setup(arguments, reader.fuzz)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
