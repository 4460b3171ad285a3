"""The farm's web page: a server of pages that is itself a client of a farm (`etfarm web`).

It uses `etfarm.client` and the formats of reports only, so it can do what the contract allows its visitors. `create_app`
composes it, `server` runs it. Needs etfarm[web].
"""
