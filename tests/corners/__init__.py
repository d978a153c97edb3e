"""Runs random resources on a real API server, each with a random fault, and checks their state."""
