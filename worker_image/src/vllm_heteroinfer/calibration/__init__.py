"""`heteroinfer-worker calibrate`: measures this machine, for plans made before any pod exists.

`command` needs only what the supervisor needs. Each measurement runs in its own process: if it hangs or ends
with SIGILL, only its own result is missing, and its threads start on the intended CPUs.
"""
