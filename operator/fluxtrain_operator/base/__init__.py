"""What all rooms of the operator know: a job and its policy, reports, marks of nodes, names and errors."""
