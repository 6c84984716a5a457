"""The catalogue: one module per family, one function per contract. Importing it fills the registry."""

from contracts.catalog import keys, order, precision, publish, resume, writers

__all__ = ["keys", "order", "precision", "publish", "resume", "writers"]
