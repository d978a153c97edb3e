"""Random resources on a real API server, each with a random fault: what must hold in every corner."""
