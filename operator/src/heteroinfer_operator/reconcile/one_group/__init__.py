"""Decides the changes that one group needs: ordered checks, one module for each kind. Pure."""
