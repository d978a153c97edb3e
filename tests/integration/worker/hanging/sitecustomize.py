"""Makes the main thread of a process hang when it gets a signal. For the PYTHONPATH of a group's pods.

SIGUSR1 makes it hang for SHORT_S, like a long computation, and SIGUSR2 forever. Other threads continue, as in
a deadlock.
"""

import signal
import time

SHORT_S = 4.0

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(SHORT_S))
signal.signal(signal.SIGUSR2, lambda *_: time.sleep(3600))
