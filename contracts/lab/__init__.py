"""Running a case: a warm parent, fresh torchrun ranks, a recorder in each, and file events seen from outside."""
