"""Measures machines and the networks between them, for plans made before any pod exists.

`heteroinfer-worker calibrate` measures this machine, and `heteroinfer-worker network` a network.

The modules `command` and `network` need only the standard library and the contract, like the supervisor. Each
measurement of a machine runs in its own process: if it hangs or ends with SIGILL, only its own result is
missing, and its threads start on the intended CPUs.
"""
