"""What a program is kept from on a device: the agent's memory and files, other attempts, the network, other processes.

`confine.Jail` starts runners that are confined, `box.Box` is the folder that one works in, `filters` the system calls it is
refused, `secrets` what the agent does with its own token. Each measure that the kernel lacks is left out and told.
"""
