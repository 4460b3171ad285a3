"""The synchronous client: the asynchronous classes without `await`, driven on an event loop in its own thread.

`client/generate_sync.py` generates the modules from the asynchronous ones.
"""

from etfarm.client.client.farm import Farm
from etfarm.client.client.jobs import Job
from etfarm.client.client.local_sessions import LocalSession
from etfarm.client.client.projects import Projects
from etfarm.client.client.reservations import Reservation
from etfarm.client.client.sessions import Session
from etfarm.client.client.text import TokenStream

__all__ = ["Farm", "Job", "LocalSession", "Projects", "Reservation", "Session", "TokenStream"]
