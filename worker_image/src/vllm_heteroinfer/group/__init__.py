"""Code that the ranks of a group share with its engine: rendezvous, comparison of settings, deadlines."""
