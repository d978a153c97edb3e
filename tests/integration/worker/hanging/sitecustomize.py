"""On the PYTHONPATH of a group's pods: has the main thread of each process hang when it is signalled.

SIGUSR1 for SHORT_S, as something long does; SIGUSR2 for ever. Other threads run on, as in a deadlock.
"""

import signal
import time

SHORT_S = 4.0

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(SHORT_S))
signal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))
