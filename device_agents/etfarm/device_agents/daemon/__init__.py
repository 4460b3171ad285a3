"""The agent's process: its data folder, its connection to the server, the devices it serves and the results it still holds.

`agent` decides what runs, `connection` carries messages, `data_folder` and `result_outbox` survive the process, `phones` turns
the adb server's list into devices, and `serve_local` serves sessions on this machine without a farm.
"""
