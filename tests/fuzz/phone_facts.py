"""A phone's facts: what its shell printed, and what inventory and readings make of it, `etfarm.device_agents`."""

from __future__ import annotations

from etfarm.device_agents.device import android, inventory, readings, shell_facts
from tests.support import dumps

RUNS = 120
TOKENS = (
    b"cpu MHz",
    b"processor\t: 1",
    b"0-65535",
    b"0-3,6",
    b"999999999999",
    b"-1",
    b"/sys/devices/system/cpu/cpu4/cpufreq/scaling_cur_freq",
    b"/sys/class/thermal/thermal_zone0/temp",
    b"/sys/class/thermal/cooling_device0/cur_state",
    b"MemAvailable: ",
    b" kB",
    b"nan",
    b"inf",
    b"some avg10=",
    b"total=",
    "²".encode(),
    "٣".encode(),
    b"dumpsys battery",
    b"  level: 50\n",
    b"Thermal Status: 3",
)
_TOKEN = b"0" * 32


def framed(facts: dict[str, str]) -> bytes:
    """Return what the script of `shell_facts` prints of a device that has these."""
    parts = [b"etfarm-facts " + _TOKEN]
    for name, text in facts.items():
        parts += [_TOKEN + b" + " + name.encode(), text.encode(), _TOKEN + b" - 0"]
    return b"\n".join(parts) + b"\n"


def seeds() -> list[bytes]:
    """Return two real phones' facts, and the facts of a running one."""
    now = {
        "/proc/stat": "cpu  1 2 3 4 5 6 7 8\n",
        "/proc/loadavg": "0.1 0.2 0.3 2/345 6789\n",
        "/proc/pressure/cpu": "some avg10=1.00 avg60=0.50 avg300=0.10 total=12345\n",
        "/proc/meminfo": "MemAvailable:  1000 kB\n",
        "/sys/devices/system/cpu/cpufreq/policy0/related_cpus": "0 1 2 3\n",
        "/sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "1800000\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1800000\n",
        "/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
        "/sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "/sys/class/thermal/thermal_zone0/temp": "45000\n",
        "/sys/class/thermal/cooling_device0/type": "cpufreq\n",
        "/sys/class/thermal/cooling_device0/cur_state": "1\n",
        "/sys/class/power_supply/battery/type": "Battery\n",
        "/sys/class/power_supply/battery/capacity": "88\n",
        android.BATTERY: "Current Battery Service state:\n  AC powered: false\n  level: 93\n  scale: 100\n  temperature: 270\n",
        android.THERMAL: "Thermal Status: 1\nCurrent temperatures from HAL:\n"
        "\tTemperature{mValue=38.5, mType=0, mName=cpu, mStatus=0}\n",
        android.POWER: "Display Power: state=ON\n",
        android.DISK: "Filesystem 1K-blocks Used Available Use%\n/d 100 50 50 50% /data\n",
        android.GETPROP: "[ro.product.model]: [Pixel 8]\n[ro.product.cpu.abilist]: [arm64-v8a]\n",
        "getconf PAGESIZE": "4096\n",
        android.SMAPS: "KernelPageSize:        4 kB\n",
        "/proc/self/status": "Cpus_allowed_list:\t0-7\n",
    }
    return [framed(now), framed(dumps.load("pixel-8")), framed(dumps.load("nexus4"))]


def attacks() -> list[bytes]:
    """Return what a hostile phone says to keep its agent busy, or to make it raise."""
    cpu, policy = "/sys/devices/system/cpu", "/sys/devices/system/cpu/cpufreq/policy"
    text: list[dict[str, str]] = [
        {android.BATTERY: "\n" * 60_000},
        {android.BATTERY: "  a: b\n" * 9_000},
        {android.THERMAL: " \n" * 30_000},
        {android.THERMAL: "Current temperatures from HAL:" + "\n" * 60_000},
        {android.THERMAL: "x:" + " " * 60_000 + "y"},
        {android.GETPROP: "[" * 60_000},
        {android.GETPROP: "[a]: [" + "]" * 60_000},
        {android.GETPROP: "[a]: [b]" + " " * 60_000 + "x"},
        {android.DISK: " 1" + " " * 60_000},
        {android.DISK: "x\n" + " 1 1" * 15_000},
        {android.POWER: "mWakefulness=" * 5_000},
        {"/proc/pressure/cpu": "some avg10=1 total=" + "9" * 400},
        {"/proc/pressure/cpu": "some " + "total=" * 10_000},
        {"/proc/pressure/cpu": "some avg10=nan total=1.5.5"},
        {"/proc/loadavg": "inf 0 0 9999999999/1 1"},
        {"/proc/stat": "cpu " + "9" * 60_000},
        {f"{cpu}/cpu{'9' * 5000}/cpufreq/scaling_cur_freq": "1"},
        {f"{cpu}/cpu99999999999/cpufreq/scaling_cur_freq": "1"},
        {f"{policy}{number}/related_cpus": "0-65535" for number in range(900)},
        {f"{cpu}/online": "0-65535," * 7_000 + "1"},
        {"/proc/self/status": "Cpus_allowed_list:\t" + "0-65535," * 7_000 + "1"},
        {"/proc/self/status": "Cpus_allowed_list:" + "\n" * 60_000},
        {"/proc/cpuinfo": "processor\t: 999999999999999\n"},
        {"/proc/cpuinfo": "processor\t: 4294967296\n\nprocessor : 3\n"},
        {"getconf PAGESIZE": "999999999999999"},
        {android.SMAPS: "KernelPageSize: 999999999 kB"},
        {"/proc/meminfo": "MemTotal: 999999999999999 kB"},
        {"/sys/class/thermal/cooling_device0/type": "cpufreq", "/sys/class/thermal/cooling_device0/cur_state": "999999999999999"},
        {"/sys/class/thermal/cooling_device0/type": "cpufreq", "/sys/class/thermal/cooling_device0/cur_state": "-1"},
        {f"{cpu}/cpu{n}/thermal_throttle/core_throttle_count": "999999999999999" for n in range(9)},
        {f"{cpu}/cpu0/thermal_throttle/core_throttle_count": "-3"},
        {"temp": "45000"},
        {"/temp": "45000", "type": "Battery"},
        {"/etc/os-release": "PRETTY_NAME=" * 5_000},
        {"/proc/cpuinfo": "a:b\n\n" * 12_000},
    ]
    shell = [b"etfarm-facts " + _TOKEN + b"\n" + (_TOKEN + b" + a\n") * 1_500, (b"etfarm-facts " + _TOKEN + b"\n") * 1_300]
    return [*map(framed, text), *shell]


def fuzz(data: bytes) -> None:
    """No text breaks a parser: what it does not say is unset."""
    result = shell_facts.split(data)
    device = inventory.parse(result)
    reading = readings.parse(result)
    assert device.SerializeToString() is not None and reading.SerializeToString() is not None
    assert readings.hottest_c(result) is None or readings.zone_names(result)
    readings.frequency_hz(result, 0)
    readings.waited_us(result.get(readings.CPU_PRESSURE, ""))
    assert android.disk_free_bytes(result) is None or android.DISK in result
    inventory.choose_cpus(device, "", True)
    assert inventory.choose_threads(device, None) > 0
