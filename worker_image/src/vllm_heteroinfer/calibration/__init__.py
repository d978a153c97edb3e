"""`heteroinfer-worker calibrate`: measures this machine, for plans made before any pod exists.

The module `command` needs only the standard library and the contract, like the supervisor. Each measurement
runs in its own process: if it hangs or ends with SIGILL, only its own result is missing, and its threads
start on the intended CPUs.
"""
