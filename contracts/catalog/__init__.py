"""The catalogue: one module per family, one function per contract. Importing it fills the registry."""

from contracts.catalog import crash, keys, order, precision, publish, reshard, resume, retention, writers

__all__ = ["crash", "keys", "order", "precision", "publish", "reshard", "resume", "retention", "writers"]
