"""The device agent: runs and measures programs on this machine, on emulated processors and on attached phones.

Rooms, from the top: `daemon` keeps the connection to the server and the agent's data folder; `attempts` carries out what the
server asks for; `targets` are what programs run on; `jail` confines runners; `conditions` watches and sets the surroundings of a
measurement; `native` builds the runner; `runners` starts runner processes and speaks their protocol; `adb` speaks to the adb
server; `device` reads what a device is and how it is.
"""
