"""The planner: what is, what should be, what to do next. Pure."""
