"""Downloads that resume, are verified, and have bounds on size and time."""
