"""Builds the Kubernetes objects of a resource, with one module for each kind. Pure."""
