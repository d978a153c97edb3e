"""What nodes have, what pods ask of them, and which pod gets which. Pure."""
