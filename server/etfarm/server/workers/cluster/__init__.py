"""Jailed children on the nodes of a Ray cluster.

The daemon orders children from a process of its own, the connector, as it does from a forkserver. The connector is the only
process that speaks with Ray. On each node it starts one actor, which holds a pool of local children, and relays their bytes.
"""
