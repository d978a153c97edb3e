"""The operator and the command line.

The operator runs a HeteroInference as groups of pods; `heteroinfer up` runs it as local processes.
"""
