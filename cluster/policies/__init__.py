"""NetworkPolicies: their rules, and the program that enforces them."""
