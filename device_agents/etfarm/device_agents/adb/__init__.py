"""Client of an adb server, written to the server's own protocol: device lists, shells with separate streams, file transfers.

`AdbServer` is all that an agent needs of adb. The adb program itself is used only to start the server. Every wait has a limit,
because adb keeps reporting `device` for a phone whose link is dead, and every error names the phone.

Source: AOSP's packages/modules/adb: OVERVIEW.TXT, SERVICES.TXT, SYNC.TXT and shell_protocol.h.
"""

from etfarm.device_agents.adb.address import DEFAULT_ADDRESS, server_address
from etfarm.device_agents.adb.commands import Completed
from etfarm.device_agents.adb.errors import (
    AdbRefused,
    AdbServerMissing,
    PhoneFileMissing,
    PhoneFileRefused,
    PhoneFull,
    PhoneGone,
    PhoneSilent,
    adb_missing,
    phone_answer_too_long,
)
from etfarm.device_agents.adb.phones import Phone, State
from etfarm.device_agents.adb.server import AdbServer
from etfarm.device_agents.adb.shell import ShellInput, ShellProcess
from etfarm.device_agents.adb.sync import OnProgress, RemoteFile

__all__ = [
    "DEFAULT_ADDRESS",
    "AdbRefused",
    "AdbServer",
    "AdbServerMissing",
    "Completed",
    "OnProgress",
    "Phone",
    "PhoneFileMissing",
    "PhoneFileRefused",
    "PhoneFull",
    "PhoneGone",
    "PhoneSilent",
    "RemoteFile",
    "ShellInput",
    "ShellProcess",
    "State",
    "adb_missing",
    "phone_answer_too_long",
    "server_address",
]
