"""`heteroinfer up`: one HeteroInference on this machine, from a file to served tokens."""

from heteroinfer_operator.up.session import Session, SessionOptions

__all__ = ["Session", "SessionOptions"]
