"""Which cases are drawn.

A function in one of these modules describes one kind of run; contracts that name the same kind share its histories. Small
means few ranks, layers and steps, so that a shrunk case reads at a glance.
"""
