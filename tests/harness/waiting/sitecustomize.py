"""On the path of every process that the tests start: waiting for a message gives the core away.

vLLM's processes wait for each other in a loop of ``sched_yield``.  On Linux 6.18 a process that yields
over and over starves whoever else wants its core: on two cores a client of a server that decodes got
a tenth of the time it asked for, and stood still for up to 20 seconds.  Beside the same loop with a
short sleep it waited 1 second of 28.
"""

import os
import time

os.sched_yield = lambda: time.sleep(50e-6)
