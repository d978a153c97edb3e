"""Plan and addressing to Kubernetes objects, a file a kind. Pure."""
