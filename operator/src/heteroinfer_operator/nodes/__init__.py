"""Capacity of nodes, demands of pods, and the placement of pods onto nodes. Pure."""
