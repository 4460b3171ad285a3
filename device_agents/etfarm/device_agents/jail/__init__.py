"""The confinement of programs: away from the agent's memory and files, other attempts, other processes and the network.

`confine.Jail` starts confined runners, `box.Box` is the folder that a runner works in, `filters` defines the system calls that
are refused to it, and `secrets` protects the agent's token. Measures that the kernel lacks are left out and logged.
"""
