"""The command line of `etfarm agent`."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from etfarm.device_agents import logs
from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.config import DEFAULT_CACHE_LIMIT_BYTES, AgentConfig, default_data_folder
from etfarm.device_agents.device import inventory
from etfarm.device_agents.jail.options import DEFAULT_USERS
from etfarm.device_agents.runners.emulator import DEFAULT_CPUS
from etfarm.wire.names import SERVER_VARIABLE

MAX_CONCURRENT_RUNS = 64
"""Maximum of --concurrent-runs, as many as a server places on a device."""
_SIZE = re.compile(r"(\d+)\s*([KMGT]i?)?B?\Z", re.IGNORECASE)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="etfarm agent",
        description="Serve this machine as a device of a farm. It dials out to the server, so it works behind NAT; it runs "
        "programs one at a time (see --concurrent-runs), each in a process of its own. The token is read from ETFARM_TOKEN; a "
        "one-time token of `etfarm tokens create NAME --agent` is exchanged for the agent's own token at the first start.",
    )
    add = parser.add_argument
    server = os.environ.get(SERVER_VARIABLE)
    add(
        "--server",
        metavar="ADDR",
        default=server,
        help="HOST:PORT, [IPV6]:PORT, several of one farm with commas, or unix:PATH; default: $ETFARM_SERVER",
    )
    add(
        "--name",
        metavar="N",
        help="the device's name; default: the host's name. For phones: the prefix of each name",
    )
    add("--label", metavar="K=V", type=_label, action="append", default=[], help="for selectors (label.K=V); repeatable")
    add("--data", metavar="DIR", type=Path, help="the agent's id, cache and unsent results; default: "
        f"{str(default_data_folder()).replace('%', '%%')}, beside it for --adb and --emulate")  # fmt: skip
    add("--tls-ca", metavar="FILE", type=Path, help="certificates (PEM) that the server's is signed by; default: $ETFARM_TLS_CA")
    add("--tls-cert", metavar="FILE", type=Path, help="client certificate (PEM), where the server demands one")
    add("--tls-key", metavar="FILE", type=Path, help="the client certificate's key (PEM)")
    add("--cores", metavar="LIST", type=_cores, help="cpus that programs may use, as 4-7 or 0,2; default: all. Not for phones")
    add("--concurrent-runs", metavar="N", type=_concurrent_runs, default=1,
        help="run up to N programs at the same time that are not measured, each with 1/N of the memory; a measurement or a "
        "session is always alone; default: 1. Not for phones")  # fmt: skip
    size = f"{DEFAULT_CACHE_LIMIT_BYTES >> 30}GiB"
    add("--cache-limit", metavar="BYTES", type=_size, default=DEFAULT_CACHE_LIMIT_BYTES, help=f"as 500MiB; default: {size}")
    emulation = parser.add_argument_group(
        "emulation",
        "Serve an emulated device instead of this machine: programs run on another processor in software (qemu), with its "
        "kernels. Outputs are valid, times mean nothing: the verdict is NOT_BENCHMARKABLE.",
    )
    add = emulation.add_argument
    add("--emulate", metavar="ARCH", choices=sorted(DEFAULT_CPUS), help="the architecture: aarch64")
    add("--cpu", metavar="MODEL", help="the processor, as `qemu-aarch64-static -cpu help` lists them; default: cortex-a76. "
        "Not max, but max,sme=off: with SME qemu computes XNNPACK's int8 kernels wrongly")  # fmt: skip
    phones = parser.add_argument_group(
        "phones",
        "Serve the Android phones that are attached to this machine instead of it: each that the adb server lists is a device, "
        "comes and goes with its cable, and needs nothing installed. The server is that of ADB_SERVER_SOCKET, else adb's own, "
        "which is started where it does not run.",
    )
    add = phones.add_argument
    add("--adb", action="store_true", help="serve every phone")
    add("--phone-limit", metavar="BYTES", type=_size, help="of runners and programs that are kept on each phone; default: 2GiB")
    add("--phone-runner", metavar="COMMAND",
        help="a runner that was put on the phones beforehand, one built with the NDK for example, and speaks the protocol of the "
        "bundle's; its path on the phone")  # fmt: skip
    gates = parser.add_argument_group(
        "measurements",
        "What a measurement waits for, and what is set for it. It begins in any case when the wait is over, and the report tells "
        "what was missing. A machine without the sensor does not wait.",
    )
    add, limits = gates.add_argument, GateLimits()
    add("--cool-below", metavar="C", type=_number, default=limits.cool_below_c,
        help="temperature of the hottest sensor, in degrees Celsius; default: %(default)g")  # fmt: skip
    add("--cool-wait", metavar="S", type=_number, default=limits.cool_wait_s,
        help="the longest wait for it, shorter if it does not get cooler; 0: none; default: %(default)g")  # fmt: skip
    add("--cool-down", metavar="S", type=_number, default=limits.cool_down_s,
        help="least pause between two measurements on a machine with temperature sensors; default: %(default)g")  # fmt: skip
    add("--idle-below", metavar="N", type=_number, default=limits.idle_below,
        help="tasks per cpu that run while nothing is measured yet; default: %(default)g")  # fmt: skip
    add("--idle-wait", metavar="S", type=_number, default=limits.idle_wait_s,
        help="the longest wait for it; 0: none; default: %(default)g")  # fmt: skip
    add("--governor", metavar="NAME",
        help="the cpus' clock governor during measurements, where this agent may write it (as root); it is put back afterwards, "
        "also after a crash; keep: leave it as it is; default: " f"{AgentConfig.governor}")  # fmt: skip
    confinement = parser.add_argument_group(
        "confinement",
        "A program sees its own folder and its runner, but no network. Where the agent is root, the program has its own user. "
        "Measures that this machine's kernel lacks are left out and logged.",
    )
    add = confinement.add_argument
    add("--require-jail", action="store_true", help="do not start on a machine that cannot confine programs")
    add("--runner-users", metavar="FIRST-LAST", type=_users, default=DEFAULT_USERS,
        help="user ids without accounts that programs run as where the agent is root; default: "
        f"{DEFAULT_USERS.start}-{DEFAULT_USERS.stop - 1}")  # fmt: skip
    add = parser.add_argument
    add("--print-unit", action="store_true", help="print a systemd unit that runs this command from the machine's start on, and "
        "end; its first lines say how to install it")  # fmt: skip
    add("--log-format", choices=logs.FORMATS, default="text", help="of stderr; default: %(default)s")
    add("--allow-upgrade", action="store_true", help="install the wheels of etfarm that the farm's admins offer (`etfarm agents "
        "upgrade`), and run the new version: they can then run any code as this agent's user")  # fmt: skip
    add("--exit-with-stdin", action="store_true", help="end when stdin ends, for programs that start an agent of their own")
    return parser


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    return key, value


def _cores(text: str) -> frozenset[int]:
    try:
        return inventory.parse_cpu_list(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of cpus such as 4-7 or 0,2") from None


def _concurrent_runs(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_CONCURRENT_RUNS):
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and {MAX_CONCURRENT_RUNS}")
    return int(text)


def _users(text: str) -> range:
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST, such as 64000-64999")
    return range(int(first), int(last) + 1)


def _size(text: str) -> int:
    match = _SIZE.match(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1000000 or 500MiB")
    number, unit = int(match.group(1)), (match.group(2) or "").upper()
    if not unit:
        return number
    base = 1024 if unit.endswith("I") else 1000
    return number * int(base ** " KMGT".index(unit[0]))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    # Refuse NaN and infinity.
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1000000")
    return value
