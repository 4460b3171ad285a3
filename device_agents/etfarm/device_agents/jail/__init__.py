"""The confinement of programs, which isolates them from the agent, other attempts, other processes and the network.

`confine.Jail` starts confined runners, `box.Box` is a runner's working folder, `filters` defines the system calls that
are refused to it, and `secrets` protects the agent's token. Measures that the kernel lacks are left out and logged.
"""
