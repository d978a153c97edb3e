"""Reads the HeteroInferences of a cluster and its installation for the command line; changes nothing."""
