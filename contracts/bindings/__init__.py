"""Known stacks as implementations, and how to find them by name."""
