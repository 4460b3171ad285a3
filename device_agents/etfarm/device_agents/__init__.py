"""The device agent, which runs and measures programs on this machine, on emulated processors and on attached phones.

Rooms, from the top: `daemon` keeps the connection to the server and the agent's data folder; `attempts` carries out what the
server asks for; `targets` are the devices on which programs run; `jail` confines runners; `conditions` controls and records the
conditions of a measurement; `native` builds the runner; `runners` starts runner processes and implements their protocol; `adb` is
a client of the adb server; `device` reads the description and the state of a device.
"""
