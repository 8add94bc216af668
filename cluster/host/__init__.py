"""What the machine gives: cgroups, mounts, a bridge with namespaces, and its state before all that."""
