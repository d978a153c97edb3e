"""`heteroinfer-worker calibrate`: what this machine really does, for plans made before any pod exists.

`command` needs no more than the supervisor; each measurement is a process of its own,
so that one that hangs or ends with SIGILL costs itself only, and threads start on the CPUs that they
shall have.
"""
